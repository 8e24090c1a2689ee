"""A run that rank 0 runs by itself: it counts, scores and saves, and no other rank meets it at boundaries.

That is how asynchronous strategies run: the ranks have no common step at which they could meet. Nothing but the set-up
and the summary is collective. The parameters lie on servers, or are the average that rank 0 calls for; a strategy
derives from `OnOneRank` and says how rank 0 gets at them.
"""

from typing import TYPE_CHECKING, Any

from hpcdl.comm import Communicator
from hpcdl.kernels.device import Array
from hpcdl.memory import Memory
from hpcdl.runs.held import Held
from hpcdl.runs.state import Same, Tracked

if TYPE_CHECKING:
    from hpcdl.optim import Optimizer


class OnOneRank(Held):
    """parameters: on rank 0 the whole vector, which `refresh` fills in; elsewhere what this rank works on, or None.

    works: whether this rank computes gradients.
    """

    leads = False  # whether this is rank 0, once the run has begun

    def __init__(self, model: Any, parameters: Array | None, optimizer: "Optimizer", works: bool = True):
        super().__init__(model, parameters, optimizer)
        self.works = works

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        self.leads = bookkeeping.rank == 0
        self.peers = bookkeeping.split(0 if self.leads else None, name="leader")  # type: ignore[assignment]  # others: None
        self.weigh(memory)

    def weigh(self, memory: Memory) -> None:
        """A rank that does not work has a part of the optimizer's state at most; what it serves it counts itself."""
        if self.works:
            super().weigh(memory)
        else:
            for vector in self.optimizer.state.values():
                memory.hold("optimizer", vector)

    def tracked(self) -> dict[str, Tracked]:
        """What rank 0 knows the whole of; a strategy adds the optimizer's vectors."""
        return {"parameters": Same(self.parameters)} if self.leads else {}
