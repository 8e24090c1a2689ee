"""Devices: the CPU with numpy arrays, or a GPU with CuPy arrays and the CUDA twins of the kernels.

    member                   CPU                          Cuda
    xp                       numpy                        cupy, for matrix products, exp, ... of this device's arrays
    empty, zeros             from a cache line on         in the GPU's memory, aligned to 512 bytes
    array(host)              the array itself             a copy on the GPU
    host(array)              the array itself             a copy in the host's memory
    pinned                   as empty                     page-locked host memory, which copies at full speed
    copy_in, copy_out        copy from or to a host array of the same shape and type, after all earlier launches
    synchronize              nothing                      wait until all launches are done

Code that allocates calls its device; code that computes calls a kernel or `device.xp`, and need not know where an array
lies. A GPU computes in the background, in the order of the launches: CuPy and Numba share the default stream. Copies,
and kernels that return a number, return when they are done."""

import functools
import importlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, unknown

LINE = 64  # bytes of a cache line
Array: TypeAlias = np.ndarray  # or CuPy's array, which has the same members
Shape: TypeAlias = int | tuple[int, ...]


class Cpu:
    """The host: numpy arrays."""

    name = "cpu"
    xp: Any = np

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Return an uninitialized array that begins with a cache line: no vector store crosses two lines."""
        dtype = np.dtype(dtype)
        memory = np.empty(int(np.prod(shape)) * dtype.itemsize + LINE, np.uint8)
        start = -memory.ctypes.data % LINE
        return np.ndarray(shape, dtype, memory, start)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        result = self.empty(shape, dtype)
        result[...] = 0
        return result

    pinned = empty

    def array(self, host: np.ndarray) -> Array:
        return host

    def host(self, array: Array) -> np.ndarray:
        return array

    def copy_in(self, array: Array, host: np.ndarray) -> None:
        array[...] = host

    def copy_out(self, array: Array, host: np.ndarray) -> None:
        host[...] = array

    def synchronize(self) -> None:
        pass

    def holds(self, array: Array) -> bool:
        """True if this array lies on this device."""
        return isinstance(array, np.ndarray)

    def writable(self, array: Array) -> bool:
        """True if a kernel may write this array: it lies here, is C-contiguous, aligned and not read-only."""
        return isinstance(array, np.ndarray) and array.flags.carray

    def __str__(self) -> str:
        return self.name


class Cuda:
    """GPU number `index` of those visible to this process, with CuPy arrays; `open_device` makes one for each GPU."""

    name = "cuda"

    def __init__(self, index: int):
        import cupy

        self.xp: Any = cupy
        self.index = index

    def use(self) -> None:
        """Make this GPU the current one of the calling thread; CuPy and Numba share its context."""
        self.xp.cuda.Device(self.index).use()

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        return self.xp.empty(shape, dtype)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        return self.xp.zeros(shape, dtype)

    def pinned(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Return a host array in page-locked memory, from CuPy's pool."""
        dtype, size = np.dtype(dtype), int(np.prod(shape))
        with self.xp.cuda.Device(self.index):  # the thread that gathers batches has not called `use`
            memory = self.xp.cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
        return np.ndarray(shape, dtype, memory)

    def array(self, host: np.ndarray) -> Array:
        result = self.empty(host.shape, host.dtype)
        self.copy_in(result, host)
        return result

    def host(self, array: Any) -> np.ndarray:
        return array.get()

    def copy_in(self, array: Any, host: np.ndarray) -> None:
        if host.size:
            array.set(host)  # in the background, when the host array is pinned
            self.synchronize()

    def copy_out(self, array: Any, host: np.ndarray) -> None:
        if host.size:
            array.get(out=host)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def memory(self) -> int:
        """Return bytes of GPU memory in CuPy's pool; the pool never shrinks, so this is the peak."""
        return self.xp.get_default_memory_pool().total_bytes()

    def holds(self, array: Any) -> bool:
        """True if this array lies on this GPU."""
        return isinstance(array, self.xp.ndarray) and int(array.device) == self.index

    def writable(self, array: Any) -> bool:
        """True if a kernel may write this array: it lies here and is C-contiguous."""
        return self.holds(array) and array.flags.c_contiguous

    def __str__(self) -> str:
        name = self.xp.cuda.runtime.getDeviceProperties(self.index)["name"]
        return f"{self.name}:{self.index} ({name.decode()})"


Device: TypeAlias = Cpu | Cuda
CPU = Cpu()
cuda = functools.cache(Cuda)


def on_device(array: Any) -> bool:
    """True if this array lies on a GPU."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def device_of(array: Any) -> Device:
    """Return the device on which this array lies."""
    return cuda(int(array.device)) if on_device(array) else CPU


def open_device(name: str, local_rank: int = 0) -> Device:
    """Return the CPU for the name cpu; for cuda GPU number (local_rank mod number of GPUs), made the current one.
    local_rank: rank of this process on its machine. UsageError for another name, without a GPU or without a package."""
    if name == "cpu":
        return CPU
    if name != "cuda":
        raise unknown("device", name, ("cpu", "cuda"))
    refusal, package = "device cuda cannot be used", "CuPy"
    try:
        import cupy

        package = "numba-cuda"
        import_compiler()
    except ImportError as error:
        lines = (line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line)))
        reason = next(lines, "no reason given")
        raise UsageError(f"{refusal}: {package} is missing ({reason}); pip install 'hpcdl[cuda]'") from None
    count, reason = 0, ""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = f" ({error})"
    if count == 0:
        raise UsageError(f"{refusal}: this process sees no GPU{reason}; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    device = cuda(local_rank % count)
    device.use()
    return device


def import_compiler() -> None:
    """Import the compiler for GPUs: numba-cuda (Numba's own CUDA target is deprecated), or the simulator."""
    import numba  # here: CPU memory and help texts need no compiler

    if not numba.config.ENABLE_CUDASIM:
        importlib.import_module("numba_cuda")
    importlib.import_module("hpcdl.kernels.gpu")
