"""The process grid: replicas of the model, stages of a replica, shares of sequences and experts, parts of layers.

    data 2, pipeline 2, tensor 2        replica 0              replica 1
                                        tensor 0   tensor 1    tensor 0   tensor 1
                      stage 0           rank 0     rank 1      rank 4     rank 5
                      stage 1           rank 2     rank 3      rank 6     rank 7

    rank = (((d * pipeline + p) * context + c) * expert + e) * tensor + t

Each rank is in a group along each axis, of the ranks that differ on this axis alone. Pipeline ends are in one more:

    group       ranks that share      of rank 5     what they do together
    data        all but d             1 5           copies of the model with other examples
    pipeline    all but p             5 7           send activations, and their gradients
    context     all but c             5             send keys and values, of other tokens of the same examples
    expert      all but e             5             send tokens of other examples to their experts, and back
    tensor      all but t             4 5           multiply by the parts of a matrix
    copies      p, e and t            1 5           add up gradients
    ends        all but p, p at an    5 7           add up gradients of tied embeddings
                end

Tensor is the innermost axis, because its messages are the most frequent and neighbouring ranks share a node; expert
and context come next, with messages in each mixture and attention. Data is the outermost: one exchange for each update.
(As Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021.)"""

import math

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.errors import UsageError, nearest
from hpcdl.formatting import counted

AXES = ("data", "pipeline", "context", "expert", "tensor")


def parse_grid(text: str, size: int) -> dict[str, int]:
    """Return the number of ranks on each axis from `data=2,tensor=2`, by default 1. UsageError if not `size` ranks."""
    grid = {}
    for item in text.split(","):
        axis, equals, number = item.partition("=")
        if not equals:
            raise UsageError(f"grid {text!r}: write AXIS=RANKS,... with the axes {', '.join(AXES)}, not {item!r}")
        if axis not in AXES:
            hint = nearest(axis, AXES)
            raise UsageError(f"grid {text!r}: there is no axis {axis!r}{hint}; the axes are {', '.join(AXES)}")
        if axis in grid:
            raise UsageError(f"grid {text!r}: the axis {axis} is given twice; give each axis once")
        if not (number.isascii() and number.isdigit() and int(number) > 0):
            raise UsageError(f"grid {text!r}: the axis {axis} has a whole number of ranks, at least 1, not {number!r}")
        grid[axis] = int(number)
    grid = {axis: grid.get(axis, 1) for axis in AXES}
    check_grid(grid, size)
    return grid


def check_grid(grid: dict[str, int], size: int) -> None:
    """Raise UsageError, with numbers of ranks that would fit, if the grid does not have `size` ranks."""
    text = ",".join(f"{axis}={number}" for axis, number in grid.items())
    if min(grid.values()) < 1:
        raise UsageError(f"grid {text}: each axis has at least 1 rank")
    ranks = math.prod(grid.values())
    replica = ranks // grid["data"]
    if ranks != size:
        fitting = "" if size % replica else f", or take data={size // replica}"
        needed = counted(ranks, "rank")
        raise UsageError(f"grid {text} has {needed}, and the job has {size}: start {needed}{fitting}")


class Grid:
    """This rank's place on the grid, and its groups of each axis, `copies` and `ends`: communicators that share the
    traffic counts of `comm`. Made collectively; UsageError if `comm` has another size than the grid.
    shape: ranks along each of AXES. place: (d, p, c, e, t), also the rank's numbers in its groups. ends: group of the
    first and last stage; None on other stages, and if there is one stage."""

    def __init__(
        self, comm: Communicator, data: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1, tensor: int = 1
    ):
        self.shape = data, pipeline, context, expert, tensor
        check_grid(dict(zip(AXES, self.shape, strict=True)), comm.size)
        self.place = place(comm.rank, self.shape)
        self.data, self.pipeline, self.context, self.expert, self.tensor = (self._along(comm, axis) for axis in AXES)
        self.copies = self.data if context == 1 else self._along(comm, "data", "context")
        self.ends = two_ends(self.pipeline)

    def _along(self, comm: Communicator, *axes: str) -> Communicator:
        """Return the group of the ranks that differ on these axes alone, ordered by rank; collective."""
        others = [number for axis, number in zip(AXES, self.place, strict=True) if axis not in axes]
        sizes = [size for axis, size in zip(AXES, self.shape, strict=True) if axis not in axes]
        color = int(np.ravel_multi_index(others, sizes))
        return comm.split(color, comm.rank, "-".join(axes))

    def free(self) -> None:
        """Free the groups; `comm` stays. Collective."""
        for group in dict.fromkeys((self.data, self.pipeline, self.context, self.expert, self.tensor, self.copies)):
            group.free()


def two_ends(comm: Communicator) -> Communicator | None:
    """Return the group of the first and last rank, which share tied weights; None on others, and for one rank."""
    if comm.size == 1:
        return None
    return comm.split(0 if comm.rank in (0, comm.size - 1) else None, name="ends")


def place(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of a rank along the axes of a grid, the last axis innermost."""
    return tuple(map(int, np.unravel_index(rank, shape)))
