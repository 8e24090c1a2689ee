"""What ranks go on from whose vectors are their own: the last step after which all that are left had met.

    local SGD, H = 3     |--o--o--O--o--o--O--o--x             O: an average of all; what is after it is kept
    rank 0               |--o--o--O--o--o--O--o--o             gone at x: all go back to the last O that all have
    rank 1               |--o--o--O--o--o--O--o

A replica, or a rank's momentum, is nowhere else: it is gone with its rank, and those that are left go on with theirs.
Ranks that do steps of their own are not equally far, and where an exchange has failed on one rank it may have come to
its end on another. So each rank keeps a copy of what it has at its last two anchors, the steps after which all ranks
have met. Nobody comes to an anchor before all have come to the one before: of their two, all that are left have one in
common. From the last such one on the run is that of the smaller world, and the steps behind it are done again.

Where a strategy lets ranks meet seldom (local SGD: each synchronization), these are its anchors. Where it never does
(gossip), each step is one. The ranks meet in the run's small message at each anchor, so that the losses up to it are
known to all.
"""

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
    """Where a run was after a step, and this rank's vectors by name, on the host, as a checkpoint has them."""

    progress: Progress
    vectors: dict[str, np.ndarray]


class Anchors:
    """The last anchors of one rank, the newest one at the end; for all legs of a run."""

    def __init__(self) -> None:
        self.kept: list[Anchor] = []

    def follow(self, run: "Run") -> None:
        """A leg has begun: where it begins all have met. Raises AgreedError for what cannot be copied."""
        if strange := [name for name, each in run.state.tracked.items() if not isinstance(each, Same | PerRank)]:
            raise AgreedError(f"--survive: {' and '.join(strange)} cannot be kept by each rank by itself")
        if not self.kept:
            self.keep(run)

    def passed(self, run: "Run") -> None:
        """A step has come to its end, with its boundary."""
        if self.after(run):
            self.keep(run)

    def after(self, run: "Run") -> bool:
        """Whether the run's last step is an anchor."""
        return run.held.synchronized is None or run.held.synchronized(run.step)

    def keep(self, run: "Run") -> None:
        """Copy what this rank has; the oldest anchor's memory is used again."""
        room = self.kept.pop(0).vectors if len(self.kept) == DEEP else {}
        with averaged(run.held, lambda: run.over):
            for name, vector in run.state.tracked.items():
                array = vector.array  # type: ignore[attr-defined]  # of Same and PerRank
                if name not in room:
                    room[name] = run.memory.hold("optimizer", np.empty(array.shape, array.dtype))
                device_of(array).copy_out(array, room[name])
        self.kept.append(Anchor(run.progress, room))

    def go_back(self, run: "Run", left: MPI.Intracomm) -> int:
        """Let the run be as far as at the last anchor that all ranks of `left` have; collective over them.

        Returns how many steps the furthest of them had done since.
        """
        known = left.allgather((run.step, [each.progress.step for each in self.kept]))
        common = set.intersection(*(set(steps) for _, steps in known))
        if not common:  # ranks that do not meet between two anchors, which would be a mistake of the strategy's
            raise TrainingError("the ranks that are left have no step in common to go on from")
        self.kept = [each for each in self.kept if each.progress.step == max(common)][-1:]
        anchor = self.kept[0].progress
        run.progress = replace(anchor, seconds=run.seconds)  # which have been spent
        run.bounded = run.progress
        return max(step for step, _ in known) - anchor.step

    def give_back(self, run: "Run", joined: int = 0) -> None:
        """Into the vectors of a leg that begins, what this rank had; the last `joined` ranks, which had nothing, take
        what a neighbour had. Collective.
        """
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
    """From whom a new rank takes what it begins with: of `old` ranks that have it, the one before it on the ring."""
    return (rank - 1) % old
