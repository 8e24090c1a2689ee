"""Grid search: every combination of the values, each range cut evenly.

Values of inactive parameters are not combined, so no point occurs twice. With k values for each of d parameters there
are k^d trials, and random search finds more with as many (Bergstra and Bengio, "Random search for hyper-parameter
optimization", JMLR 2012).
"""

from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask


class GridSearch:
    """The points of a grid in order, or the first `trials` of them (0: all). Raises UsageError for too large a grid."""

    planned = True

    def __init__(self, space: Space, trials: int, points: int):
        self.space, self.points = space, space.grid(points)
        self.trials = min(trials or len(self.points), len(self.points))
        self.begun = 0

    def ask(self) -> SearchTask | None:
        """Return the next point."""
        if self.over:
            return None
        self.begun += 1
        return SearchTask(self.begun - 1, self.points[self.begun - 1])

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """Ignore the loss."""

    @property
    def over(self) -> bool:
        """True if all points were returned."""
        return self.begun == self.trials
