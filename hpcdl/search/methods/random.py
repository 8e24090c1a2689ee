"""Random search: independent points of the unit cube, or those of a scrambled Sobol sequence (sobol.py).

Bergstra and Bengio, "Random search for hyper-parameter optimization", JMLR 2012: if only few parameters matter, n
points try n values of each of those, a grid of d parameters only the d-th root of n.

Point i depends on the seed and i alone, not on the number of trials.
"""

from hpcdl.random import Random
from hpcdl.search.methods.sobol import Sobol
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask, Values


def point(space: Space, seed: int, number: int) -> Values:
    """Return the values of trial `number`, uniform in the unit cube."""
    return space.values(Random(seed)("search", number).random(len(space.parameters)))


class RandomSearch:
    """Trials 0 to trials - 1. Raises UsageError for more parameters than the Sobol sequence has dimensions."""

    planned = True

    def __init__(self, space: Space, trials: int, seed: int, sobol: bool = False):
        self.space, self.trials, self.seed = space, trials, seed
        self.sobol = Sobol(len(space.parameters), seed) if sobol else None
        self.begun = 0

    def ask(self) -> SearchTask | None:
        """Return the next point."""
        if self.over:
            return None
        number, self.begun = self.begun, self.begun + 1
        values = self.space.values(self.sobol(number)) if self.sobol else point(self.space, self.seed, number)
        return SearchTask(number, values)

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """Ignore the loss."""

    @property
    def over(self) -> bool:
        """True if all points were returned."""
        return self.begun == self.trials
