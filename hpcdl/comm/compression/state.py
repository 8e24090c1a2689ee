"""The state of one vector's compressed all-reduces, whatever the method.

    state = compressed("topk:0.01", gradient.size, gradient.dtype, seed)
    comm.all_reduce_compressed(gradient, state)                  or by buckets, each with state.part(slice)

A method overrides `reduce`, the steps of its all-reduce, and names its vectors in `tracked`. A method that takes over a
part of the optimizer also overrides `prepare` and `update`, and knows the `training`:

    before the all-reduce       prepare(vector, ranks)      changes this rank's gradient in place
    after it                    update(optimizer, parameters, gradient, scale)      in the place of optimizer.update

All ranks end with the same bits. A single rank sends nothing and its vector stays as it is."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.comm.allreduce.ring import ring_all_reduce
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import ErrorFeedback, RandomKey, VectorCodec
from hpcdl.errors import UsageError

Steps = Callable[[Any, np.ndarray], Iterator[Step]]  # of a plain all-reduce, which sums the vector


@dataclass
class TrainingContext:
    """What a part of the optimizer must know of the training. parameters: the whole vector. steps: of the run.
    per_epoch: steps of an epoch. scale: 1 / (examples of the batch, on all ranks), set before its gradient."""

    optimizer: Any
    parameters: np.ndarray
    steps: int
    per_epoch: int
    scale: float = 1.0

    def __deepcopy__(self, memo: dict) -> "TrainingContext":
        return self  # a trial reads it


class Compressed:
    """Base of the states. size, dtype: of the vector. spec: the method, as in --compress. key: of the random numbers;
    its step counts the all-reduces. in_flight: True while an all-reduce uses the state. feedback: of a method with a
    codec."""

    spec = ""  # set by `compressed`
    feedback: ErrorFeedback | None = None
    training: TrainingContext  # set before `part`, for methods that take over a part of the optimizer

    def __init__(self, size: int, dtype: DTypeLike, key: RandomKey | None = None):
        self.dtype = VectorCodec(dtype).dtype
        self.size, self.key, self.in_flight = size, key or RandomKey(), False

    @property
    def tracked(self) -> dict[str, np.ndarray]:
        """This rank's vectors by name, for the checkpoint. Their sum over the ranks is what counts: a run that goes on
        with another number of ranks distributes the sum anew."""
        return {"residual": self.feedback.residual} if self.feedback is not None and self.feedback.keep else {}

    @property
    def common(self) -> dict[str, np.ndarray]:
        """Vectors by name that are the same on all ranks, for the checkpoint."""
        return {}

    def part(self, cut: slice) -> "Compressed":
        """Return the state of slice `cut` of the vector, reduced by itself. Its vectors are views of the whole ones."""
        part = copy.copy(self)
        start, stop, _ = cut.indices(self.size)
        part.size, part.key = stop - start, self.key.at(start)
        part.cut_vectors(slice(start, stop))
        return part

    def cut_vectors(self, cut: slice) -> None:
        """Replace this state's vectors by views of their slice `cut`, and drop its buffers. Called on a copy."""

    def fresh(self) -> "Compressed":
        """Return a state with vectors of its own, for a trial."""
        return copy.deepcopy(self)

    def begin(self, step: int) -> None:
        """Set the step of the next all-reduce, as a resumed run does."""
        self.key = self.key._replace(step=step)

    def check_vector(self, vector: np.ndarray, op: str) -> None:
        """Raise UsageError, before any message leaves, if vector or op do not fit this state, or it is in use."""
        if vector.size != self.size or vector.dtype != self.dtype:
            wanted = f"{self.size} elements of {self.dtype}"
            raise UsageError(f"this compression state is for {wanted}, not for {vector.size} of {vector.dtype}")
        if op not in ("sum", "mean"):
            raise UsageError(f"compressed messages are for sum and mean, not {op}, whose errors do not add up")
        if self.in_flight:
            raise UsageError("an all-reduce in flight uses this compression state; wait for it, or make another state")

    def steps(
        self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps = ring_all_reduce.steps
    ) -> Iterator[Step]:
        """Sum `vector` (flat, contiguous) over all ranks of `comm`, in place.
        all_reduce: for what is not compressed."""
        self.in_flight = True
        self.prepare(vector, comm.Get_size())
        if comm.Get_size() > 1:
            yield from self.reduce(comm, vector, all_reduce)
        self.key = self.key._replace(step=self.key.step + 1)
        self.in_flight = False

    def prepare(self, vector: np.ndarray, ranks: int) -> None:
        """Change this rank's gradient before it is reduced over so many ranks."""

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        """Yield the steps of the all-reduce, over several ranks."""
        raise NotImplementedError

    def update(self, optimizer: Any, parameters: np.ndarray, gradient: np.ndarray, scale: float) -> None:
        """Update the parameters by the reduced gradient, times `scale`."""
        optimizer.update(parameters, gradient, scale=scale)
