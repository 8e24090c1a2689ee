"""Grid search: every combination of the values, each range cut evenly.

Values of a parameter that its condition leaves out are not combined, so that no point is there twice. With k values for
each of d parameters that is k^d trials: what a cluster is good at, and why random search finds more with as many
(Bergstra and Bengio, "Random search for hyper-parameter optimization", JMLR 2012).
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
        """The next point."""
        if self.over:
            return None
        self.begun += 1
        return SearchTask(self.begun - 1, self.points[self.begun - 1])

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """Nothing depends on it."""

    @property
    def over(self) -> bool:
        """Whether all points were asked for."""
        return self.begun == self.trials
