"""A vector that threads of one rank, or of all ranks of a node, update at once: where it lies, and what a run asks.

    Sharing        which ranks have a vector in common, and which rank of them speaks for it
    OneVector      held by a run: one vector, that of all ranks            Same in a checkpoint
    Vectors        one for each node, or each rank; scored is their mean   a row for each rank

Both keep the tally of what the threads have counted (kernels/hogwild.py): at each checkpoint, and at the end, the sums
over all ranks and all legs of the run.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.errors import AgreedError
from hpcdl.kernels import hogwild_locks as locks
from hpcdl.memory import Memory
from hpcdl.optim import Optimizer
from hpcdl.parallel.thread_team import ThreadTeam
from hpcdl.runs.folder import Folder
from hpcdl.runs.ownership import Whole
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.segments import Legs
from hpcdl.shared_memory import share

if TYPE_CHECKING:
    from hpcdl.runs.run import Run


class VectorSharing:
    """Which ranks of `comm` share a vector: those of a node (shared), or each has its own. Collective.

    node: the ranks that share this rank's; None where it is alone. owners: one rank of each vector, the first of its
    node; None on the others. vectors: how many there are.
    """

    def __init__(self, comm: Communicator, run: "Run", shared: bool):
        self.node: Communicator | None = None
        self.owners: Communicator | None = comm
        self.place, self.vectors = 0, comm.size  # this rank's number among those that share its vector
        if not shared or comm.size == 1:
            return
        bare = ranks_of_node(comm.mpi)
        first = bare.bcast(comm.rank)
        self.place = bare.rank
        bare.Free()
        self.node = run.until_end(comm.split(first, name="node"))
        color = 0 if self.place == 0 else None
        self.owners = run.until_end(comm.split(color, name="vectors", allreduce=comm.allreduce))
        self.vectors = comm.mpi.allreduce(int(self.place == 0))

    @property
    def sharers(self) -> int:
        """How many ranks share this rank's vector."""
        return self.node.size if self.node is not None else 1

    def arrays(self, comm: Communicator, lengths: list[tuple[int, np.dtype]]) -> list[np.ndarray]:
        """Arrays of so many elements, all 0, that all ranks of the vector have in common; collective.

        Raises AgreedError where a node has no room for them.
        """
        if self.node is None:
            return [np.zeros(length, dtype) for length, dtype in lengths]
        sizes = [-(-length * dtype.itemsize // 64) * 64 for length, dtype in lengths]  # whole cache lines
        mine = sum(sizes) if self.place == 0 else 0
        parts = share(self.node.mpi, mine, "the vector of --shared", "this cannot begin")
        if not comm.mpi.allreduce(parts is not None, op=MPI.LAND):
            raise AgreedError(
                "--shared: a node has no memory that its ranks could share (/dev/shm); make room there, or take "
                "--threads on one rank instead"
            )
        assert parts is not None
        starts = np.cumsum([0, *sizes])
        return [
            parts[0][start : start + length * dtype.itemsize].view(dtype)
            for start, (length, dtype) in zip(starts, lengths, strict=False)
        ]

    def meet(self) -> None:
        """All ranks of this vector are here: what they have written is there."""
        if self.node is not None:
            self.node.mpi.Barrier()  # no message of the training


class ThreadCounts:
    """What the threads of all ranks have counted, in this leg of a run and those before it; in `totals`.

    The updates are the optimizer's steps.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self.team: ThreadTeam | None = None
        self.totals = np.zeros(locks.COUNTS, np.int64)

    def gather(self, everyone: Communicator) -> None:
        """Add what has been counted since the last time; collective."""
        found = np.zeros_like(self.totals) if self.team is None else self.team.take_counts()
        highest = found[locks.STALEST : locks.STALEST + 1].copy()
        everyone.all_reduce(found)
        everyone.all_reduce(highest, op="max")
        stalest = max(int(self.totals[locks.STALEST]), int(highest[0]))
        self.totals += found
        self.totals[locks.STALEST] = stalest
        self.optimizer.step = int(self.totals[locks.UPDATES])

    def entries(self, seconds: float) -> dict[str, Any]:
        """The summary's entries."""
        totals = self.totals.tolist()
        histogram = totals[locks.HISTOGRAM :]
        while histogram and not histogram[-1]:
            histogram.pop()
        samples, touched = totals[locks.SAMPLES], totals[locks.TOUCHED]
        return {
            "updates": totals[locks.UPDATES],
            "updates_per_second": totals[locks.UPDATES] / max(1e-9, seconds),
            "updates_sampled": samples,
            "collisions": totals[locks.COLLISIONS] / touched if touched else None,
            "update_staleness": {
                "mean": totals[locks.STALE] / samples if samples else None,
                "max": totals[locks.STALEST],
                "histogram": histogram,
            },
        }


class CountingOwnership:
    """What both have in common; comes before a class derived from Held."""

    tally: ThreadCounts
    peers: Communicator
    optimizer: Optimizer
    parameters: np.ndarray

    def weigh(self, memory: Memory) -> None:
        """There is no gradient."""
        memory.hold("parameters", self.parameters)
        for vector in self.optimizer.state.values():
            memory.hold("optimizer", vector)
        assert self.tally.team is not None
        self.tally.team.weigh(memory)

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """The tally, too."""
        self.tally.gather(self.peers)
        super().gather_costs(legs, folder)  # type: ignore[misc]

    def tracked(self) -> dict[str, Tracked]:
        """The tally, too."""
        return super().tracked() | {"hogwild/tally": Same(self.tally.totals)}  # type: ignore[misc]


class SharedVector(CountingOwnership, Whole):
    """All ranks share one vector, or there is one rank."""

    def __init__(self, model: Any, w: np.ndarray, optimizer: Optimizer, tally: ThreadCounts):
        super().__init__(model, w, optimizer)
        self.tally = tally


class VectorPerNode(CountingOwnership, Replicas):
    """Each node, or each rank, has a vector; what is scored and saved is their mean."""

    def __init__(self, model: Any, w: np.ndarray, optimizer: Optimizer, tally: ThreadCounts, sharing: VectorSharing):
        super().__init__(model, w, optimizer)
        self.tally, self.sharing = tally, sharing

    def weigh(self, memory: Memory) -> None:
        super().weigh(memory)
        memory.hold("parameters", self.replica)

    def refresh(self) -> None:
        """parameters <- the mean of the vectors, each counted once, however many ranks share it; collective."""
        if self.sharing.node is None:
            super().refresh()
            return
        self.parameters[:] = self.replica if self.sharing.place == 0 else 0
        self.everyone.all_reduce(self.parameters)
        self.parameters /= self.sharing.vectors
