"""A run that rank 0 runs by itself: rank 0 counts, scores and saves, and no other rank meets it at boundaries.

Asynchronous strategies run so, as their ranks have no common step at which to meet. Only set-up and end are collective.
If the run cannot go on, rank 0 gives out no more steps, and all ranks raise its error at the end (`raise_failure`)."""

from typing import Any

from hpcdl.checkpoint.buffers import share
from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.trace import SentTotals, Traffic
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import Array
from hpcdl.memory import Memory
from hpcdl.optim import Optimizer
from hpcdl.runs.folder import Folder
from hpcdl.runs.ownership import Ownership
from hpcdl.runs.segments import Legs


class OnOneRank(Ownership):
    """The ownership of a run that rank 0 runs; derived classes say how rank 0 gets the parameters. parameters: on rank
    0 the whole vector, which `refresh` fills in; elsewhere the vector that this rank works on, or None (no vector).
    works: True if this rank computes gradients. everyone: a communicator of all ranks of the run, from `join` on."""

    everyone: Communicator

    still = False  # other ranks train while rank 0 scores and saves
    goes_on = False  # True for a resumed run
    leads = False  # True on rank 0, from `join` on
    failure: TrainingError | None = None  # on rank 0: why the run cannot go on

    def __init__(self, model: Any, parameters: Array | None, optimizer: Optimizer, works: bool = True):
        super().__init__(model, parameters, optimizer)
        self.works = works
        self.others_sent = SentTotals()  # of the other ranks, as rank 0 knows

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        self.leads, self.everyone = bookkeeping.rank == 0, bookkeeping
        share(self.model, bookkeeping)
        self.peers = bookkeeping.split(0 if self.leads else None, name="leader")  # type: ignore[assignment]  # others: None
        self.weigh(memory)

    def weigh(self, memory: Memory) -> None:
        if self.works:
            super().weigh(memory)
        else:
            for vector in self.optimizer.state.values():
                memory.hold("optimizer", vector)

    def sent(self, traffic: Traffic) -> tuple[float, float]:
        parts = traffic.sent_so_far, *self.others_sent.values()
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    def fail(self, error: TrainingError) -> None:
        """Keep the error until all ranks have ended their loops."""
        self.failure = error

    def raise_failure(self) -> None:
        """Raise a TrainingError on all ranks if rank 0 has a failure; after the loop, collective."""
        with self.everyone.inside("end"):
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
        return {"parameters": Same(self.parameters)} if self.leads else {}
