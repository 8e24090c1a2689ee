"""Random search: independent points of the unit cube, or points of a scrambled Sobol sequence (sobol.py).
n random points try n values of each parameter, n points of a grid of d parameters only the d-th root of n, which counts
if few parameters matter (Bergstra and Bengio, "Random search for hyper-parameter optimization", JMLR 2012)."""

from collections.abc import Callable

from hpcdl.random import Random
from hpcdl.search.methods.sobol import Sobol
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask, Values


def point(space: Space, seed: int, number: int) -> Values:
    """Return the values of trial `number`, uniform in the unit cube; they depend on the seed and the number alone."""
    return space.values(Random(seed)("search", number).random(len(space.parameters)))


class PlannedSearch:
    """Trials 0 to trials - 1, all known in advance. values(number): values of a trial."""

    planned = True

    def __init__(self, space: Space, trials: int, values: Callable[[int], Values]):
        self.space, self.trials, self.values = space, trials, values
        self.begun = 0

    def ask(self) -> SearchTask | None:
        if self.over:
            return None
        number, self.begun = self.begun, self.begun + 1
        return SearchTask(number, self.values(number))

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """Ignore the loss."""

    @property
    def over(self) -> bool:
        return self.begun == self.trials


class RandomSearch(PlannedSearch):
    """Independent points. sobol: points of a Sobol sequence; UsageError if it has fewer dimensions than parameters."""

    def __init__(self, space: Space, trials: int, seed: int, sobol: bool = False):
        sequence = Sobol(len(space.parameters), seed) if sobol else None
        super().__init__(
            space, trials, lambda number: space.values(sequence(number)) if sequence else point(space, seed, number)
        )
