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


@dataclass(frozen=True)
class Reduction:
    """op(into, values) combines two flat vectors into the first; `mpi` is the same operation in MPI's words.

    divides: whether what is combined is then divided by the number of vectors, which `finish` does.
    """

    name: str
    mpi: MPI.Op
    combine: Callable[[np.ndarray, np.ndarray], None]
    divides: bool = False

    def __call__(self, into: np.ndarray, values: np.ndarray) -> None:
        self.combine(into, values)

    def finish(self, vector: np.ndarray, size: int) -> None:
        """What is left to do once `size` vectors are combined."""
        if self.divides:
            kernels.scale(vector, 1 / size)


def keeping_nan(combine: Callable[[np.ndarray, np.ndarray], None]) -> MPI.Op:
    """A maximum or minimum for MPI that is not a number where one of its values is none (IEEE 754-2019).

    MPI's own leaves that to the library, and which of two values is lost then depends on their order. Of whole numbers,
    too, so that both sides of a call name the same operation.
    """

    def call(values: Any, into: Any, datatype: MPI.Datatype) -> None:
        dtype = to_numpy_dtype(datatype)
        combine(np.frombuffer(into, dtype), np.frombuffer(values, dtype))

    return MPI.Op.Create(call, commute=True)


SUM = Reduction("sum", MPI.SUM, kernels.add_into)
MEAN = Reduction("mean", MPI.SUM, kernels.add_into, divides=True)
MAX = Reduction("max", keeping_nan(kernels.max_into), kernels.max_into)
MIN = Reduction("min", keeping_nan(kernels.min_into), kernels.min_into)
OPERATIONS = {op.name: op for op in (SUM, MEAN, MAX, MIN)}


def reducible(dtype: np.dtype) -> bool:
    """Whether the loops know this type."""
    return dtype.isnative and (dtype.kind in "iu" or dtype in (np.float32, np.float64))


def operation(name: str, dtype: np.dtype) -> Reduction:
    """The operation of that name, if the type has it: a mean of integers would not be an integer."""
    if not isinstance(name, str):
        raise UsageError(f"a reduction is one of the words {', '.join(OPERATIONS)}, not {name!r}")
    return known(name, dtype)


@functools.cache
def known(name: str, dtype: np.dtype) -> Reduction:
    """The same of a word."""
    if name not in OPERATIONS:
        raise unknown("reduction", name, OPERATIONS)
    if not reducible(dtype):
        raise UsageError(f"reductions take integers, float32 and float64, not {dtype}")
    if name == "mean" and not np.issubdtype(dtype, np.floating):
        raise UsageError(f"the mean of {dtype} values is not {dtype}; take the sum, or convert to floating point")
    return OPERATIONS[name]
