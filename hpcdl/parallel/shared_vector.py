"""Shared vectors of HOGWILD!: updated concurrently by the threads of a rank, or of all ranks of a node."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.errors import AgreedError
from hpcdl.kernels import hogwild as kernels
from hpcdl.optim import Optimizer
from hpcdl.parallel.thread_team import ThreadTeam
from hpcdl.runs.replicas import Replicas
from hpcdl.shared_memory import share

if TYPE_CHECKING:
    from hpcdl.runs.run import Run


class VectorSharing:
    """Which ranks of `comm` share a vector: those of a node (shared), or none. Collective. node: group of ranks that
    share this rank's vector; None: only this rank. owners: group of the vectors' first ranks; None on others."""

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

    def arrays(self, comm: Communicator, lengths: list[tuple[int, Any]]) -> list[np.ndarray]:
        """Return zero arrays of these lengths and types, shared by the ranks of the vector; collective.
        Raises AgreedError if a node has no room for them."""
        if self.node is None:
            return [np.zeros(length, dtype) for length, dtype in lengths]
        bytes_of = [length * np.dtype(dtype).itemsize for length, dtype in lengths]
        sizes = [-(-each // 64) * 64 for each in bytes_of]  # rounded up to cache lines
        mine = sum(sizes) if self.place == 0 else 0
        parts: Any = share(self.node.mpi, mine, "the vector of --shared", "this cannot begin")
        if not comm.mpi.allreduce(parts is not None, op=MPI.LAND):
            raise AgreedError(
                "--shared: a node has no memory that its ranks could share (/dev/shm); make room there, or take "
                "--threads on one rank instead"
            )
        return [
            parts[0][start:][:length].view(dtype)
            for start, length, (_, dtype) in zip(np.cumsum([0, *sizes[:-1]]), bytes_of, lengths, strict=True)
        ]

    def meet(self) -> None:
        """Barrier over the ranks of this vector; makes their writes visible."""
        if self.node is not None:
            self.node.mpi.Barrier()  # not counted as traffic of the training


class ThreadCounts(Same):
    """Counters of the threads of all ranks, over all segments of a run (`totals`). Updates are optimizer steps."""

    def __init__(self, optimizer: Optimizer, team: ThreadTeam | None):
        self.optimizer, self.team = optimizer, team
        self.totals = np.zeros(kernels.COUNTS, np.int64)
        super().__init__(self.totals)

    def gather(self, everyone: Communicator) -> np.ndarray | None:
        """Add the counts since the last call, and return the totals as `Same` does; collective."""
        found = np.zeros_like(self.totals) if self.team is None else self.team.take_counts()
        highest = found[kernels.STALEST : kernels.STALEST + 1].copy()
        everyone.all_reduce(found)
        everyone.all_reduce(highest, op="max")
        stalest = max(int(self.totals[kernels.STALEST]), int(highest[0]))
        self.totals += found
        self.totals[kernels.STALEST] = stalest
        self.optimizer.step = int(self.totals[kernels.UPDATES])
        return super().gather(everyone)

    def entries(self, seconds: float) -> dict[str, Any]:
        """Return the summary's entries about the counters. seconds: of the run."""
        totals = self.totals.tolist()
        histogram = totals[kernels.HISTOGRAM :]
        while histogram and not histogram[-1]:
            histogram.pop()
        samples, touched = totals[kernels.SAMPLES], totals[kernels.TOUCHED]
        return {
            "updates": totals[kernels.UPDATES],
            "updates_per_second": totals[kernels.UPDATES] / max(1e-9, seconds),
            "updates_sampled": samples,
            "collisions": totals[kernels.COLLISIONS] / touched if touched else None,
            "update_staleness": {
                "mean": totals[kernels.STALE] / samples if samples else None,
                "max": totals[kernels.STALEST],
                "histogram": histogram,
            },
        }


class VectorPerNode(Replicas):
    """Ownership of a vector by each node or rank; the mean of these vectors is scored and saved."""

    def __init__(self, model: Any, w: np.ndarray, optimizer: Optimizer, weigh: Callable, sharing: VectorSharing):
        super().__init__(model, w, optimizer, weigh_gradients=weigh)
        self.sharing = sharing

    def refresh(self) -> None:
        """Set the parameters to the mean of the vectors, each counted once; collective."""
        if self.sharing.node is None:
            super().refresh()
            return
        self.parameters[:] = self.replica if self.sharing.place == 0 else 0
        self.peers.all_reduce(self.parameters)
        self.parameters /= self.sharing.vectors
