"""A stand-in for CuPy where there is no GPU: what hpcdl uses of it, on numpy arrays, and as strict as CuPy or stricter.

An array here does not become a numpy array by itself, nor takes one in an assignment; numpy's functions refuse it, and
a single element is only read inside of a kernel. New arrays hold NaN. A copy from the host happens when the stream is
synchronized, no sooner, so that a host array that is used again too early is noticed. With NUMBA_ENABLE_CUDASIM=1
Numba's simulator takes these arrays. STANDIN_GPUS: how many GPUs there are (1)."""

import operator
import os
import threading
import time
from operator import attrgetter
from types import SimpleNamespace

import numba
import numpy

if numba.config.ENABLE_CUDASIM:
    import quick_simulator  # noqa: F401
    from numba.cuda.simulator import kernel as simulator
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray as Base

    from hpcdl.kernels import gpu

    gpu.THREADS, gpu.LANES = 8, 4  # each barrier costs time for each thread; tests/kernels/simulate.py takes more

    def inside_a_kernel():
        return simulator._get_kernel_context() is not None
else:
    Base = object

    def inside_a_kernel():
        return False


pending = []  # copies from the host that were asked for: (array, host array)
__version__ = "0"
counts = {"pinned": 0, "pinned by": None, "to host": 0, "from host": 0}


def plain(value):
    """The numpy array inside of an array, or a number; an array of numpy's is refused."""
    if isinstance(value, ndarray):
        return value._ary
    if isinstance(value, numpy.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value


class Flags:
    def __init__(self, flags):
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata

    def __getitem__(self, name):
        return getattr(self, {"C_CONTIGUOUS": "c_contiguous", "F_CONTIGUOUS": "f_contiguous"}[name])


class ndarray(Base):
    __array_ufunc__ = None
    __hash__ = None

    def __init__(self, ary, base=None):
        self._ary, self.base, self.stream = ary, base, 0
        self.device = cuda.Device()

    def __getattr__(self, name):
        raise AttributeError(f"this array has no {name}")

    def __array__(self, *arguments, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    @property
    def __cuda_array_interface__(self):
        about = {"shape": self.shape, "typestr": self.dtype.str, "version": 3, "stream": 1, "strides": None}
        if not self.flags.c_contiguous:
            about["strides"] = self._ary.strides
        return about | {"data": (self._ary.ctypes.data if self.size else 0, False)}

    dtype, shape, size, ndim, nbytes, itemsize = (
        property(attrgetter(f"_ary.{name}")) for name in ("dtype", "shape", "size", "ndim", "nbytes", "itemsize")
    )
    flags = property(lambda self: Flags(self._ary.flags))
    T = property(lambda self: self._view(self._ary.T))

    def _view(self, ary):
        return ndarray(ary, self if self.base is None else self.base)

    def reshape(self, *shape):
        made = self._ary.reshape(*shape)
        assert numpy.shares_memory(made, self._ary) or not made.size, "CuPy would copy here"
        return self._view(made)

    def transpose(self, *axes):
        return self._view(self._ary.transpose(*axes))

    def swapaxes(self, one, other):
        return self._view(self._ary.swapaxes(one, other))

    def copy(self):
        return ndarray(self._ary.copy())

    def fill(self, value):
        self._ary.fill(value)

    def get(self, out=None):
        cuda.get_current_stream().synchronize()
        counts["to host"] += 1
        if out is None:
            return self._ary.copy()
        if type(out) is not numpy.ndarray or (out.dtype, out.shape) != (self.dtype, self.shape):
            raise TypeError("get: another type or shape")
        out[...] = self._ary
        return out

    def set(self, array):
        if type(array) is not numpy.ndarray or (array.dtype, array.shape) != (self.dtype, self.shape):
            raise TypeError("set: another type or shape")
        counts["from host"] += 1
        pending.append((self, array))

    def max(self, axis, keepdims):
        return ndarray(self._ary.max(axis=axis, keepdims=keepdims))

    def sum(self, axis, keepdims):
        return ndarray(self._ary.sum(axis=axis, keepdims=keepdims))

    @property
    def data(self):
        def copy_from_device_async(other, nbytes):
            self._ary.view(numpy.uint8)[:nbytes] = other.array._ary.view(numpy.uint8)[:nbytes]

        return SimpleNamespace(array=self, copy_from_device_async=copy_from_device_async)

    def __float__(self):
        return float(self.get())

    def __len__(self):
        return len(self._ary)

    def __getitem__(self, index):
        found = self._ary[index]
        if isinstance(found, numpy.ndarray):
            return self._view(found)
        if not inside_a_kernel():
            raise TypeError("a single element of an array on the GPU is read on the host")
        return found

    def __setitem__(self, index, value):
        self._ary[index] = plain(value)

    def __iadd__(self, other):
        self._ary += plain(other)
        return self

    def __neg__(self):
        return ndarray(-self._ary)

    def infix(operation):
        return lambda self, other: ndarray(operation(self._ary, plain(other)))

    __add__, __sub__, __gt__, __truediv__ = map(infix, (operator.add, operator.sub, operator.gt, operator.truediv))

    def astype(self, dtype):
        return ndarray(self._ary.astype(dtype))


def empty(shape, dtype):
    made = ndarray(numpy.empty(shape, dtype))
    made.fill(numpy.nan if made.dtype.kind == "f" else 77)
    return made


def zeros(shape, dtype):
    return ndarray(numpy.zeros(shape, dtype))


def concatenate(arrays):
    return ndarray(numpy.concatenate([array._ary for array in arrays]))


def ascontiguousarray(array):
    return array if array.flags.c_contiguous else ndarray(numpy.ascontiguousarray(array._ary))


def matmul(a, b, out=None):
    product = plain(a) @ plain(b)
    if out is None:
        return ndarray(product)
    if not isinstance(out, ndarray) or (out.dtype, out.shape) != (product.dtype, product.shape):
        raise ValueError("matmul: out of another type or shape")
    out._ary[...] = product
    return out


def binary(name):
    def call(a, b, out=None):
        made = getattr(numpy, name)(plain(a), plain(b), out=None if out is None else out._ary)
        return ndarray(numpy.asarray(made)) if out is None else out

    return call


add, maximum, minimum, multiply, dot = map(binary, ("add", "maximum", "minimum", "multiply", "dot"))


def unary(function):
    return lambda x, out=None: ndarray(function(x._ary, out=None if out is None else out._ary))


exp, tanh = map(unary, (numpy.exp, numpy.tanh))


def logaddexp(x, y):
    return ndarray(numpy.logaddexp(plain(x), plain(y)))


class Device:
    thread = threading.local()  # the current device is each thread's own

    def __init__(self, index=None):
        self.id = getattr(Device.thread, "current", 0) if index is None else index

    def __int__(self):
        return self.id

    def use(self):
        Device.thread.current = self.id
        return self

    def __enter__(self):
        self.before = int(Device())
        self.use()

    def __exit__(self, *_):
        Device(self.before).use()


class Event:
    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        pass


class CUDARuntimeError(RuntimeError):
    pass


class Stream:
    def synchronize(self):
        while pending:
            array, host = pending.pop(0)
            array._ary[...] = host


def alloc_pinned_memory(size):
    counts["pinned"] += 1
    counts["pinned by"] = int(Device())
    assert size > 0
    return bytearray(b"\xff" * size)


def getDeviceCount():
    count = int(os.environ.get("STANDIN_GPUS", "1"))
    if not count:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return count


def get_default_memory_pool():
    return SimpleNamespace(total_bytes=lambda: 12345)


cuda = SimpleNamespace(
    Device=Device,
    alloc_pinned_memory=alloc_pinned_memory,
    get_current_stream=Stream,
    Event=Event,
    get_elapsed_time=lambda begin, end: 1000 * (end.time - begin.time),
    runtime=SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=getDeviceCount,
        getDeviceProperties=lambda index: {"name": b"stand-in"},
    ),
)
