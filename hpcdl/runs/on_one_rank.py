"""A run that rank 0 runs by itself: it counts, scores and saves, and no other rank meets it at boundaries.

That is how asynchronous strategies run: the ranks have no common step at which they could meet. Nothing but the set-up
and the end is collective: where rank 0 finds that the run cannot go on, it gives out no more steps, and when all have
come to the end, all raise its error (`raise_failure`). The parameters lie on servers, or are the average that rank 0
calls for; a strategy derives from `OnOneRank` and says how rank 0 gets at them.
"""

from typing import Any

from hpcdl.checkpoint.buffers import share
from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.comm.trace import SentTotals, Traffic
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import Array
from hpcdl.memory import Memory
from hpcdl.optim import Optimizer
from hpcdl.runs.folder import Folder
from hpcdl.runs.ownership import Ownership
from hpcdl.runs.segments import Legs


class OnOneRank(Ownership):
    """parameters: on rank 0 the whole vector, which `refresh` fills in; elsewhere what this rank works on, or None.

    works: whether this rank computes gradients. everyone: all ranks of the run, once it has begun.
    """

    everyone: Communicator

    still = False  # others go on meanwhile
    goes_on = False  # whether the run has begun where another has ended
    leads = False  # whether this is rank 0, once the run has begun
    failure: TrainingError | None = None  # on rank 0: why the run cannot go on

    def __init__(self, model: Any, parameters: Array | None, optimizer: Optimizer, works: bool = True):
        super().__init__(model, parameters, optimizer)
        self.works = works
        self.others_sent = SentTotals()  # on rank 0, as far as it knows

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        self.leads, self.everyone = bookkeeping.rank == 0, bookkeeping
        share(self.model, bookkeeping)
        self.peers = bookkeeping.split(0 if self.leads else None, name="leader")  # type: ignore[assignment]  # others: None
        self.weigh(memory)

    def weigh(self, memory: Memory) -> None:
        """A rank that does not work has a part of the optimizer's state at most; what it serves it counts itself."""
        if self.works:
            super().weigh(memory)
        else:
            for vector in self.optimizer.state.values():
                memory.hold("optimizer", vector)

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        """Of all ranks, up to what those have sent since that rank 0 has heard of last."""
        return self.others_sent.with_own(traffic.sent_so_far)

    def fail(self, error: TrainingError) -> None:
        """The run cannot go on: keep the error until all ranks have come to the end of their loops."""
        self.failure = error

    def raise_failure(self) -> None:
        """The loop has ended on all ranks: raise a TrainingError on all where rank 0 has a failure; collective."""
        with activity.inside("end", self.everyone):
            failure = self.everyone.mpi.bcast(None if self.failure is None else str(self.failure))
        if failure is not None:
            raise TrainingError(failure)

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        super().gather_costs(legs, folder)
        legs.sent = self.sent(legs.comm.traffic)

    def resumed(self, everyone: Communicator) -> None:
        self.goes_on = True
        share(self.model, everyone)

    def tracked(self) -> dict[str, Tracked]:
        """What rank 0 knows the whole of; a strategy adds the optimizer's vectors."""
        return {"parameters": Same(self.parameters)} if self.leads else {}
