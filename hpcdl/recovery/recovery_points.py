"""Recovery of ranks with vectors of their own: they continue from the last step after which all survivors had met.

    local SGD, H = 3     |--o--o--O--o--o--O--o--x             O: an average of all; the state after it is kept
    rank 0               |--o--o--O--o--o--O--o--o             x: lost; all go back to the last O that all have
    rank 1               |--o--o--O--o--o--O--o

A replica, or a rank's momentum, is lost with its rank; the survivors continue with theirs. Ranks are not equally far,
and an exchange that failed on one rank may have ended on another. So each rank keeps copies of its state at its last
two anchors, the steps after which all ranks have met. No rank reaches an anchor before all have reached the one before,
so the survivors have an anchor in common, and repeat the steps after it. Anchors are the steps after which the strategy
lets ranks meet (local SGD: each synchronization), or all steps if it never does (gossip)."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.state import PerRank, Same
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.kernels.device import device_of
from hpcdl.runs.ownership import averaged
from hpcdl.runs.progress import Progress

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

DEEP = 2  # anchors that are kept


@dataclass(frozen=True)
class Anchor:
    """A rank's state after a step. progress: of the run. vectors: by name, on the host, as a checkpoint has them."""

    progress: Progress
    vectors: dict[str, np.ndarray]


class Anchors:
    """The last anchors of one rank, `kept` for all legs of a run, the newest last."""

    def __init__(self) -> None:
        self.kept: list[Anchor] = []

    def follow(self, run: "Run") -> None:
        """Begin a leg; the first begins with an anchor. Raises AgreedError for vectors that no rank can copy alone."""
        if strange := [name for name, each in run.state.tracked.items() if not isinstance(each, Same | PerRank)]:
            raise AgreedError(f"--survive: a rank alone cannot keep a copy of {' and '.join(strange)}")
        if not self.kept:
            self.keep(run)

    def keep(self, run: "Run") -> None:
        """Copy this rank's state as the newest anchor; the oldest anchor's memory is reused."""
        room = self.kept.pop(0).vectors if len(self.kept) == DEEP else {}
        with averaged(run.held, lambda: run.over):
            for name, vector in run.state.tracked.items():
                array = vector.array  # type: ignore[attr-defined]  # of Same and PerRank
                if name not in room:
                    room[name] = run.memory.hold("optimizer", np.empty(array.shape, array.dtype))
                device_of(array).copy_out(array, room[name])
        self.kept.append(Anchor(run.progress, room))

    def go_back(self, run: "Run", left: MPI.Intracomm) -> int:
        """Go back to the last anchor that all ranks of `left` have; collective. Return how many steps are repeated."""
        known = left.allgather((run.step, [each.progress.step for each in self.kept]))
        common = set.intersection(*(set(steps) for _, steps in known))
        if not common:  # ranks that do not meet between two anchors, which would be a mistake of the strategy's
            raise TrainingError("the surviving ranks have no step in common from which they can continue")
        self.kept = [each for each in self.kept if each.progress.step == max(common)][-1:]
        anchor = self.kept[0].progress
        run.progress = replace(anchor, seconds=run.seconds)  # repeated steps take time, too
        run.bounded = run.progress
        return max(step for step, _ in known) - anchor.step

    def give_back(self, run: "Run", joined: int = 0) -> None:
        """Load this rank's vectors into a new leg. The last `joined` ranks, all new, take a neighbour's. Collective."""
        comm = run.comm
        old = comm.size - joined
        for name, vector in run.state.tracked.items():
            array = vector.array  # type: ignore[attr-defined]
            if comm.rank >= old:
                comm.wait(array, neighbour(comm.rank, old))
                continue
            device_of(array).copy_in(array, self.kept[-1].vectors[name])
            for rank in range(old, comm.size):
                if neighbour(rank, old) == comm.rank:
                    comm.push(array, rank)


def neighbour(rank: int, old: int) -> int:
    """Return from which of the first `old` ranks a new rank takes its state: from the one before it on their ring."""
    return (rank - 1) % old
