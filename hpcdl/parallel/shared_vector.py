"""Shared vectors of HOGWILD!: updated concurrently by the threads of a rank, or of all ranks of a node.

    Sharing        which ranks share a vector, and which one represents it
    OneVector      all ranks share one vector: `Same` in a checkpoint
    Vectors        a vector for each node or rank, scored by their mean: a row for each rank in a checkpoint

Both keep the thread counters (kernels/hogwild.py), summed over all ranks and segments of the run at each checkpoint and
at the end.
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
    """The sharing of vectors among the ranks of `comm`: by node (shared), or each its own. Collective.

    node: the ranks that share this rank's vector; None if it is alone. owners: the first rank of each vector; None on
    the others. vectors: the number of vectors.
    """

    def __init__(self, comm: Communicator, run: "Run", shared: bool):
        self.node: Communicator | None = None
        self.owners: Communicator | None = comm
        self.place, self.vectors = 0, comm.size  # this rank's number among the sharers of its vector
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
        """The number of ranks that share this rank's vector."""
        return self.node.size if self.node is not None else 1

    def arrays(self, comm: Communicator, lengths: list[tuple[int, np.dtype]]) -> list[np.ndarray]:
        """Return zero arrays of these lengths and types, shared by all ranks of the vector; collective.

        Raises AgreedError if a node has no room for them.
        """
        if self.node is None:
            return [np.zeros(length, dtype) for length, dtype in lengths]
        sizes = [-(-length * dtype.itemsize // 64) * 64 for length, dtype in lengths]  # rounded up to cache lines
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
        """Barrier over the ranks of this vector; makes their writes visible."""
        if self.node is not None:
            self.node.mpi.Barrier()  # not counted as traffic of the training


class ThreadCounts:
    """Counters of the threads of all ranks, over all segments of a run, in `totals`.

    Updates are the optimizer's steps.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self.team: ThreadTeam | None = None
        self.totals = np.zeros(locks.COUNTS, np.int64)

    def gather(self, everyone: Communicator) -> None:
        """Add the counts since the last call; collective."""
        found = np.zeros_like(self.totals) if self.team is None else self.team.take_counts()
        highest = found[locks.STALEST : locks.STALEST + 1].copy()
        everyone.all_reduce(found)
        everyone.all_reduce(highest, op="max")
        stalest = max(int(self.totals[locks.STALEST]), int(highest[0]))
        self.totals += found
        self.totals[locks.STALEST] = stalest
        self.optimizer.step = int(self.totals[locks.UPDATES])

    def entries(self, seconds: float) -> dict[str, Any]:
        """Return the entries of the summary."""
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
    """Mixin for both ownerships; it precedes a class derived from Held."""

    tally: ThreadCounts
    peers: Communicator
    optimizer: Optimizer
    parameters: np.ndarray

    def weigh(self, memory: Memory) -> None:
        """Count memory; there is no gradient."""
        memory.hold("parameters", self.parameters)
        for vector in self.optimizer.state.values():
            memory.hold("optimizer", vector)
        assert self.tally.team is not None
        self.tally.team.weigh(memory)

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """Include the counters."""
        self.tally.gather(self.peers)
        super().gather_costs(legs, folder)  # type: ignore[misc]

    def tracked(self) -> dict[str, Tracked]:
        """Include the counters."""
        return super().tracked() | {"hogwild/tally": Same(self.tally.totals)}  # type: ignore[misc]


class SharedVector(CountingOwnership, Whole):
    """All ranks share one vector, or there is one rank."""

    def __init__(self, model: Any, w: np.ndarray, optimizer: Optimizer, tally: ThreadCounts):
        super().__init__(model, w, optimizer)
        self.tally = tally


class VectorPerNode(CountingOwnership, Replicas):
    """Each node or rank has a vector; their mean is scored and saved."""

    def __init__(self, model: Any, w: np.ndarray, optimizer: Optimizer, tally: ThreadCounts, sharing: VectorSharing):
        super().__init__(model, w, optimizer)
        self.tally, self.sharing = tally, sharing

    def weigh(self, memory: Memory) -> None:
        super().weigh(memory)
        memory.hold("parameters", self.replica)

    def refresh(self) -> None:
        """parameters <- the mean of the vectors, each counted once; collective."""
        if self.sharing.node is None:
            super().refresh()
            return
        self.parameters[:] = self.replica if self.sharing.place == 0 else 0
        self.everyone.all_reduce(self.parameters)
        self.parameters /= self.sharing.vectors
