"""Compression of large tensors only: small ones, and vectors such as biases and norms, are reduced as they are.

    vector      | weight 1 | bias 1 | weight 2 | bias 2 |
    compressed  | weight 1 | weight 2 |                      by the method
    rest        | bias 1 | bias 2 |                          by the communicator's own all-reduce, after the others

The small tensors are few bytes, and their values have other sizes than those of the matrices. (Vogels et al.,
"PowerSGD", NeurIPS 2019, leaves out biases)"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce.ring import ring_all_reduce
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.state import Compressed, Steps
from hpcdl.errors import UsageError


def large(layout: Any, smallest: int) -> tuple[list[slice], Any]:
    """Return the slices of the tensors of two or more dimensions and at least `smallest` bytes, and their own layout.
    UsageError if there are none."""
    item = layout.dtype.itemsize
    chosen = [t for t in layout.tensors.values() if len(t.shape) > 1 and math.prod(t.shape) * item >= smallest]
    if not chosen:
        raise UsageError(f"--compress-from {smallest} leaves no tensor to compress; take a smaller number of bytes")
    moved, offset = [], 0
    for tensor in chosen:
        moved.append(dataclasses.replace(tensor, offset=offset))
        offset += math.prod(tensor.shape)
    return [tensor.slice for tensor in chosen], type(layout)(moved, layout.dtype)


def put(part: np.ndarray, vector: np.ndarray, cut: list[slice]) -> None:
    """Write the values of `part`, one slice after the other, to these slices of the vector."""
    start = 0
    for each in cut:
        stop = start + each.stop - each.start
        vector[each] = part[start:stop]
        start = stop


class LargeTensors(Compressed):
    """State of all-reduces in which the slices `chosen` are compressed, together, by the state `inner`."""

    def __init__(self, size: int, chosen: list[slice], inner: Compressed):
        super().__init__(size, inner.dtype, inner.key)
        self.inner, self.chosen = inner, chosen

    @property
    def rest(self) -> list[slice]:
        """The slices between the chosen ones."""
        ends = [0, *(end for each in self.chosen for end in (each.start, each.stop)), self.size]
        return [slice(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]

    @property
    def tracked(self) -> dict[str, np.ndarray]:
        return self.inner.tracked

    def cut_vectors(self, cut: slice) -> None:
        before = sum(max(0, min(each.stop, cut.start) - each.start) for each in self.chosen)
        inside = [slice(max(each.start, cut.start), min(each.stop, cut.stop)) for each in self.chosen]
        self.chosen = [
            slice(each.start - cut.start, each.stop - cut.start) for each in inside if each.start < each.stop
        ]
        self.inner = self.inner.part(slice(before, before + sum(each.stop - each.start for each in self.chosen)))

    @property
    def common(self) -> dict[str, np.ndarray]:
        return self.inner.common

    def begin(self, step: int) -> None:
        super().begin(step)
        self.inner.begin(step)

    def steps(
        self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps = ring_all_reduce.steps
    ) -> Iterator[Step]:
        self.in_flight = True
        if self.chosen:
            part = np.concatenate([vector[each] for each in self.chosen])
            yield from self.inner.steps(comm, part, all_reduce)
            put(part, vector, self.chosen)
        if self.rest and comm.Get_size() > 1:
            part = np.concatenate([vector[each] for each in self.rest])
            yield from all_reduce(comm, part)
            put(part, vector, self.rest)
        self.in_flight = False
