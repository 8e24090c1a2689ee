"""How far workers may run ahead of each other: three consistencies of a parameter store.

A worker's clock is the number of pushes it has made; the store's clock is that of its slowest worker.

                    a pull at clock c is answered when     a push is applied                  staleness of a push
    bsp             the store's clock is c                 with its whole round, as one sum   0
    ssp, bound K    the store's clock is at least c - K    at once (K = 0: as bsp)            in clocks: 0 ... K
    async           it comes                               at once                            in versions: any

The staleness of a push is the number of updates it missed: under ssp the clocks by which the store was behind the
worker at its pull; else the updates applied between that pull and the push. (Bulk synchronous parallel: Valiant, CACM
1990; stale synchronous parallel: Ho et al., NeurIPS 2013; asynchronous: Dean et al., NeurIPS 2012)"""

import math
from typing import NamedTuple

from hpcdl.errors import UsageError, unknown

NAMES = ("bsp", "ssp", "async")


class Consistency(NamedTuple):
    """A consistency of a store. name: bsp, ssp or async. staleness: the bound of ssp, in clocks."""

    name: str = "bsp"
    staleness: int = 0

    @property
    def clocked(self) -> bool:
        """True if workers wait for each other: for bsp and ssp."""
        return self.name != "async"

    @property
    def bound(self) -> float:
        """The most clocks that the store may be behind a worker that pulls; infinite for async."""
        return self.staleness if self.clocked else math.inf

    @property
    def in_rounds(self) -> bool:
        """True if the pushes of a clock are applied together."""
        return self.bound == 0

    def checked(self) -> "Consistency":
        """Return the consistency; UsageError for invalid values."""
        if self.name not in NAMES:
            raise unknown("consistency", self.name, NAMES)
        if self.staleness < 0:
            raise UsageError(f"the staleness must be 0 clocks or more, not {self.staleness}")
        if self.staleness and self.name != "ssp":
            raise UsageError(f"a staleness of {self.staleness} is for ssp only; with {self.name} take 0")
        return self


BSP = Consistency("bsp")
