"""The reductions: sum, mean, max and min, as kernels for our algorithms and as MPI operations."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import to_numpy_dtype

from hpcdl.errors import UsageError, unknown
from hpcdl.kernels import reduce as kernels
from hpcdl.kernels import shared


@dataclass(frozen=True)
class Reduction:
    """A reduction: op(into, values) combines two flat vectors into the first. divides: `finish` makes it the mean."""

    name: str
    combine: Callable[[np.ndarray, np.ndarray], None]
    native: MPI.Op | None = None
    divides: bool = False

    @functools.cached_property
    def mpi(self) -> MPI.Op:
        """The MPI operation; if MPI has none like it, created on first use, as MPI has started by then."""
        return propagate_nan(self.combine) if self.native is None else self.native

    def __call__(self, into: np.ndarray, values: np.ndarray) -> None:
        self.combine(into, values)

    def finish(self, vector: np.ndarray, size: int) -> None:
        """Finish the reduction of `size` vectors: divide, for a mean."""
        if self.divides:
            kernels.scale(vector, 1 / size)


def propagate_nan(combine: Callable[[np.ndarray, np.ndarray], None]) -> MPI.Op:
    """Return a maximum or minimum for MPI that propagates NaN (IEEE 754-2019); with MPI's own the result depends on the
    order of values. It serves integers, too, so that all ranks of a call name the same operation."""

    def call(values: Any, into: Any, datatype: MPI.Datatype) -> None:
        dtype = to_numpy_dtype(datatype)
        combine(np.frombuffer(into, dtype), np.frombuffer(values, dtype))

    return MPI.Op.Create(call, commute=True)


SUM = Reduction("sum", kernels.add_into, MPI.SUM)
MEAN = Reduction("mean", kernels.add_into, MPI.SUM, divides=True)
MAX = Reduction("max", kernels.max_into)
MIN = Reduction("min", kernels.min_into)
# As numbers, for kernels.
CODES = {"sum": shared.SUM, "max": shared.MAX, "min": shared.MIN, "mean": shared.MEAN}
OPERATIONS = {op.name: op for op in (SUM, MEAN, MAX, MIN)}


def reducible(dtype: np.dtype) -> bool:
    """True if reductions support this type."""
    return dtype.isnative and (dtype.kind in "iu" or dtype in (np.float32, np.float64))


def operation(name: str, dtype: np.dtype) -> Reduction:
    """Return the reduction of that name for this type. Raises UsageError, as for a mean of integers."""
    if not isinstance(name, str):
        raise UsageError(f"a reduction is one of the words {', '.join(OPERATIONS)}, not {name!r}")
    return reduction_named(name, dtype)


@functools.cache
def reduction_named(name: str, dtype: np.dtype) -> Reduction:
    """Return the reduction of that name; cached form of `operation`."""
    if name not in OPERATIONS:
        raise unknown("reduction", name, OPERATIONS)
    if not reducible(dtype):
        raise UsageError(f"reductions take integers, float32 and float64, not {dtype}")
    if name == "mean" and not np.issubdtype(dtype, np.floating):
        raise UsageError(f"{dtype} cannot hold the mean of {dtype} values; take the sum, or convert to floating point")
    return OPERATIONS[name]
