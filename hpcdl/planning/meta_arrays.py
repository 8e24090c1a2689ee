"""Arrays that have a shape and a type and no memory: with them a model's own code says what it would hold.

    device    OUTLINES                where a model is made whose layers, pool and shards then work on outlines
    array     Outline(shape, dtype)   what numpy's arrays are asked for here: views, products, sums, sizes
    kernel    returns 0, (0, 0), ...  what is launched on an outline computes nothing (kernels/bind.py)

A model of 10^11 parameters is so taken through a step in a second, and what it takes from its pool is counted as in a
run: a forecast follows the code that trains, and not a copy of it.
"""

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


class NoResult(float):
    """What a kernel returns that computes nothing: 0, or where two numbers are expected two of them."""

    def __iter__(self) -> Iterator[float]:
        return iter((0.0, 0.0))


class Outline:
    """An array of this shape and type without elements; `base` is that of which it is a view, or itself."""

    __slots__ = ("base", "dtype", "shape")

    outlined = NoResult()
    __cuda_array_interface__ = None  # no compiled version for the processor fits (kernels/bind.py)
    __array_ufunc__ = None  # numpy leaves operators with an outline on the right to it
    flags = SimpleNamespace(c_contiguous=True, carray=True)

    def __init__(self, shape: int | tuple[int, ...], dtype: DTypeLike):
        self.shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        self.dtype, self.base = np.dtype(dtype), self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def _view(self, *shape: int) -> "Outline":
        made = object.__new__(Outline)  # a step has millions
        made.shape, made.dtype, made.base = shape, self.dtype, self.base
        return made

    def reshape(self, *shape: Any) -> "Outline":
        wanted = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
        if -1 in wanted:
            known = math.prod(n for n in wanted if n != -1)
            wanted[wanted.index(-1)] = self.size // known if known else 0
        if math.prod(wanted) != self.size:
            raise ValueError(f"{self.shape} cannot have the shape {tuple(wanted)}")
        return self._view(*wanted)

    def ravel(self) -> "Outline":
        return self._view(self.size)

    def transpose(self, *axes: int) -> "Outline":
        return self._view(*(self.shape[axis] for axis in axes or reversed(range(self.ndim))))

    @property
    def T(self) -> "Outline":
        return self.transpose()

    def swapaxes(self, a: int, b: int) -> "Outline":
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return self._view(*shape)

    def __getitem__(self, index: Any) -> "Outline":
        index = index if isinstance(index, tuple) else (index,)
        shape, axes = [], iter(self.shape)
        for each, n in zip(index, axes, strict=False):
            if isinstance(each, slice):
                shape.append(len(range(*each.indices(n))))
            elif isinstance(each, np.ndarray | Outline):
                shape.append(len(each))
        return self._view(*shape, *itertools.islice(self.shape, len(index), None))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Nothing is stored."""

    def __iter__(self) -> Iterator["Outline"]:
        return (self._view(*self.shape[1:]) for _ in range(len(self)))

    def _same(self, other: Any) -> "Outline":
        return self

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _same

    def copy(self) -> "Outline":
        return Outline(self.shape, self.dtype)


def matmul(a: Outline, b: Outline, out: Outline) -> Outline:
    """The product, of which the shapes are compared."""
    wanted = *a.shape[:-1], b.shape[-1]
    if a.shape[-1] != b.shape[-2] or out.shape != wanted:
        raise ValueError(f"the product of {a.shape} and {b.shape} is not {out.shape}")
    return out


class Outlines:
    """The device (hpcdl/kernels/device.py) of arrays without memory."""

    name = "outline"
    xp: Any = SimpleNamespace(
        matmul=matmul,
        empty=Outline,
        ascontiguousarray=lambda array: array,
        concatenate=lambda arrays: Outline(sum(len(each) for each in arrays), arrays[0].dtype),
    )

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array of this shape and type."""
        return Outline(shape, dtype)

    zeros = pinned = empty

    def array(self, host: Any) -> Any:
        """An outline of a host array."""
        return Outline(host.shape, host.dtype)

    def copy_in(self, array: Any, host: Any) -> None:
        """Nothing is stored."""

    copy_out = copy_in

    def synchronize(self) -> None:
        """Nothing is under way."""

    def holds(self, array: Any) -> bool:
        """Whether this is an outline."""
        return isinstance(array, Outline)

    writable = holds

    def __str__(self) -> str:
        return self.name


OUTLINES: Any = Outlines()  # stands where a Device does
