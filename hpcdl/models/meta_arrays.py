"""Meta arrays: shape and type without memory, on which a model's own code runs to count the memory it would take.

A kernel launched on a meta array computes nothing (kernels/bind.py). A step of a model of 10^11 parameters takes a
second, and its pool counts bytes as in a run: a forecast runs the training code itself, not a copy of the code."""

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


class NoResult(float):
    """The result of a kernel on meta arrays: 0, or (0, 0) if the caller unpacks two numbers."""

    def __iter__(self) -> Iterator[float]:
        return iter((0.0, 0.0))


class MetaArray:
    """An array without elements; base: the array of which this one is a view, or this array itself."""

    __slots__ = ("base", "dtype", "shape")

    outlined = NoResult()
    __cuda_array_interface__ = None  # no compiled version for the processor fits (kernels/bind.py)
    __array_ufunc__ = None  # numpy then leaves operators to the right operand
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

    def _view(self, *shape: int) -> "MetaArray":
        view = object.__new__(MetaArray)  # a step has millions
        view.shape, view.dtype, view.base = shape, self.dtype, self.base
        return view

    def reshape(self, *shape: Any) -> "MetaArray":
        wanted = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
        if -1 in wanted:
            known = math.prod(n for n in wanted if n != -1)
            wanted[wanted.index(-1)] = self.size // known if known else 0
        if math.prod(wanted) != self.size:
            raise ValueError(f"an array of shape {self.shape} cannot get the shape {tuple(wanted)}")
        return self._view(*wanted)

    def transpose(self, *axes: int) -> "MetaArray":
        return self._view(*(self.shape[axis] for axis in axes or reversed(range(self.ndim))))

    @property
    def T(self) -> "MetaArray":
        return self.transpose()

    def swapaxes(self, a: int, b: int) -> "MetaArray":
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return self._view(*shape)

    def __getitem__(self, index: Any) -> "MetaArray":
        index = index if isinstance(index, tuple) else (index,)
        shape, axes = [], iter(self.shape)
        for each, n in zip(index, axes, strict=False):
            if isinstance(each, slice):
                shape.append(len(range(*each.indices(n))))
            elif isinstance(each, np.ndarray | MetaArray):
                shape.append(len(each))
        return self._view(*shape, *itertools.islice(self.shape, len(index), None))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator["MetaArray"]:
        return (self._view(*self.shape[1:]) for _ in range(len(self)))

    def _same(self, other: Any) -> "MetaArray":
        return self

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _same

    def sum(self, axis: int, out: "MetaArray") -> "MetaArray":
        """Return `out` without computing it."""
        return out

    def copy(self) -> "MetaArray":
        return MetaArray(self.shape, self.dtype)


def matmul(a: MetaArray, b: MetaArray, out: MetaArray) -> MetaArray:
    """Return `out` without computing it. Raises ValueError if the shapes do not fit."""
    wanted = *a.shape[:-1], b.shape[-1]
    if a.shape[-1] != b.shape[-2] or out.shape != wanted:
        raise ValueError(f"a product of arrays {a.shape} and {b.shape} does not have the shape {out.shape} of out")
    return out


def concatenate(arrays: list[MetaArray], axis: int = 0) -> MetaArray:
    """Return an array of the shape of the arrays, one after the other along the axis."""
    first = arrays[0].shape
    return MetaArray((*first[:axis], sum(each.shape[axis] for each in arrays), *first[axis + 1 :]), arrays[0].dtype)


class MetaDevice:
    """The device (hpcdl/kernels/device.py) of meta arrays: a model on it has meta arrays in layers, pool and shards."""

    name = "outline"
    xp: Any = SimpleNamespace(matmul=matmul, empty=MetaArray, ascontiguousarray=lambda array: array)
    xp.concatenate = concatenate

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return MetaArray(shape, dtype)

    zeros = pinned = empty

    def array(self, host: Any) -> Any:
        return MetaArray(host.shape, host.dtype)

    def copy_in(self, array: Any, host: Any) -> None:
        """Do nothing."""

    copy_out = copy_in

    def synchronize(self) -> None:
        """Do nothing."""

    def holds(self, array: Any) -> bool:
        return isinstance(array, MetaArray)

    writable = holds

    def __str__(self) -> str:
        return self.name


META: Any = MetaDevice()  # passed as a Device
