"""Where arrays lie and what computes on them: the CPU with numpy, or a GPU with CuPy and the CUDA twins of the kernels.

    member                   CPU                          Cuda
    xp                       numpy                        cupy: matrix products, exp, ... on this device's arrays
    empty, zeros             in the host's memory         in the GPU's memory
    array(host)              the array itself             a copy on the GPU
    host(array)              the array itself             a copy in the host's memory
    pinned                   as empty                     host memory that the GPU copies at full speed, from and to
    copy_in, copy_out        copy between an array here and one on the host; done when the call returns
    synchronize              nothing                      wait until everything that was launched is done

Whoever allocates asks its device; whoever computes calls a kernel, or `device.xp`, and no one asks where an array is.
A GPU computes in the background, in the order of the launches, all of them on the one default stream that CuPy and
Numba share; a kernel that returns a number waits for it.
"""

import functools
import importlib
from typing import Any, TypeAlias

import numba
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
        """An array with unspecified contents, aligned to whole cache lines: no vector register is stored across two."""
        dtype = np.dtype(dtype)
        memory = np.empty(int(np.prod(shape)) * dtype.itemsize + LINE, np.uint8)
        start = -memory.ctypes.data % LINE
        return np.ndarray(shape, dtype, memory, start)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An array of zeros, aligned likewise."""
        made = self.empty(shape, dtype)
        made[...] = 0
        return made

    def pinned(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Memory of the host that copies to this device are fast from."""
        return self.empty(shape, dtype)

    def array(self, host: np.ndarray) -> Array:
        """This host array on this device."""
        return host

    def host(self, array: Array) -> np.ndarray:
        """This array in the host's memory."""
        return array

    def copy_in(self, array: Array, host: np.ndarray) -> None:
        """array[...] = host; shapes and types are the same."""
        array[...] = host

    def copy_out(self, array: Array, host: np.ndarray) -> None:
        """host[...] = array; shapes and types are the same."""
        host[...] = array

    def synchronize(self) -> None:
        """Wait for what was launched."""

    def holds(self, array: Array) -> bool:
        """Whether this array lies on this device."""
        return isinstance(array, np.ndarray)

    def writable(self, array: Array) -> bool:
        """Whether a kernel may write this array as one block: it lies here, is C-contiguous, aligned and not locked."""
        return isinstance(array, np.ndarray) and array.flags.carray

    def __str__(self) -> str:
        return self.name


class Cuda:
    """The GPU number `index` of those that this process sees: CuPy arrays. Made by `open_device`, one for each GPU."""

    name = "cuda"

    def __init__(self, index: int):
        import cupy

        self.xp: Any = cupy
        self.index = index

    def use(self) -> None:
        """Make this GPU the one that the calling thread uses; CuPy and Numba share its context."""
        self.xp.cuda.Device(self.index).use()

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An array with unspecified contents, aligned to 512 bytes."""
        return self.xp.empty(shape, dtype)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An array of zeros."""
        return self.xp.zeros(shape, dtype)

    def pinned(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """A host array in page-locked memory, from CuPy's pool of it."""
        dtype, size = np.dtype(dtype), int(np.prod(shape))
        with self.xp.cuda.Device(self.index):  # in a thread that has not called `use`, too: batches are gathered in one
            memory = self.xp.cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
        return np.ndarray(shape, dtype, memory)

    def array(self, host: np.ndarray) -> Array:
        """A copy on this GPU."""
        made = self.empty(host.shape, host.dtype)
        self.copy_in(made, host)
        return made

    def host(self, array: Any) -> np.ndarray:
        """A copy in the host's memory, made after all that was launched before."""
        return array.get()

    def copy_in(self, array: Any, host: np.ndarray) -> None:
        """array[...] = host; from then on the host array may change."""
        if host.size:
            array.set(host)  # in the background, when the host array is pinned
            self.synchronize()

    def copy_out(self, array: Any, host: np.ndarray) -> None:
        """host[...] = array, after all that was launched before."""
        if host.size:
            array.get(out=host)

    def synchronize(self) -> None:
        """Wait for what was launched."""
        self.xp.cuda.get_current_stream().synchronize()

    def memory(self) -> int:
        """Bytes of the GPU's memory that CuPy has taken; it gives none back, so this is its peak."""
        return self.xp.get_default_memory_pool().total_bytes()

    def holds(self, array: Any) -> bool:
        """Whether this array lies on this GPU."""
        return isinstance(array, self.xp.ndarray) and int(array.device) == self.index

    def writable(self, array: Any) -> bool:
        """Whether a kernel may write this array as one block: it lies here and is C-contiguous."""
        return self.holds(array) and array.flags.c_contiguous

    def __str__(self) -> str:
        name = self.xp.cuda.runtime.getDeviceProperties(self.index)["name"]
        return f"{self.name}:{self.index} ({name.decode()})"


Device: TypeAlias = Cpu | Cuda
CPU = Cpu()
cuda = functools.cache(Cuda)


def on_device(array: Any) -> bool:
    """Whether this array lies on a GPU."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def device_of(array: Any) -> Device:
    """The device on which this array lies."""
    return cuda(int(array.device)) if on_device(array) else CPU


def open_device(name: str, local_rank: int = 0) -> Device:
    """The device `cpu`, or for `cuda` GPU number local_rank mod their count, which becomes the calling thread's.

    local_rank: the number of this process among those on its machine, so that they spread over its GPUs. Raises
    UsageError, which says what is missing, where there is no GPU or nothing to use it with.
    """
    if name == "cpu":
        return CPU
    if name != "cuda":
        raise unknown("device", name, ("cpu", "cuda"))
    refusal, install = "device cuda cannot be used", "pip install 'hpcdl[cuda]'"
    try:
        import cupy
    except ImportError as error:
        raise UsageError(f"{refusal}: CuPy is missing ({one_line(error)}); {install}") from None
    try:
        import_compiler()
    except ImportError as error:
        raise UsageError(f"{refusal}: numba-cuda is missing ({one_line(error)}); {install}") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        count, reason = 0, f" ({error})"
    else:
        reason = ""
    if count == 0:
        raise UsageError(f"{refusal}: this process sees no GPU{reason}; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    device = cuda(local_rank % count)
    device.use()
    return device


def import_compiler() -> None:
    """Import what compiles kernels for a GPU: numba-cuda (Numba's own CUDA target is deprecated), or the simulator."""
    if not numba.config.ENABLE_CUDASIM:
        importlib.import_module("numba_cuda")
    importlib.import_module("hpcdl.kernels.gpu")


def one_line(error: Exception) -> str:
    """The first line of a message that says something."""
    return next((line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))), "no reason given")
