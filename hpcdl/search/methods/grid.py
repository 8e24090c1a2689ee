"""Grid search: every combination of the choices and of evenly spaced values of ranges, without inactive parameters.
k values of each of d parameters are k^d trials; random search (random.py) finds better values with as many trials."""

from hpcdl.search.methods.random import PlannedSearch
from hpcdl.search.space import Space


class GridSearch(PlannedSearch):
    """The points of a grid in order, or the first `trials` of them (0: all). Raises UsageError for too large a grid."""

    def __init__(self, space: Space, trials: int, points: int):
        grid = space.grid(points)
        super().__init__(space, min(trials or len(grid), len(grid)), grid.__getitem__)
