"""CUDA kernels: compilation, launches and sums. bind.py imports it when a kernel first gets an array on a GPU.

Only this module imports Numba's CUDA. Grids are one-dimensional, of THREADS threads a block; every kernel strides over
its grid, so any number of blocks is correct. The order of a sum depends only on the shapes of the arrays (THREADS
partial sums as a tree within a block, then the blocks' sums in order): a call always gives the same bits, except in
gpu_sparse.py. Launches go to CUDA's default stream, like CuPy's: they run in order without further synchronization.
With NUMBA_ENABLE_CUDASIM=1, set before Numba is imported, the kernels run in Numba's simulator."""

import contextlib
import dis
import functools
import importlib
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba.np.numpy_support import as_dtype
from numpy.typing import DTypeLike

from hpcdl.kernels.bind import Kernel, compile_lock, generate, numba_types

# numba-cuda is Numba's CUDA target as a package of its own. It replaces numba.cuda when Python starts, but not if it
# lies in a folder on PYTHONPATH; and it needs numpy's row_stack, which numpy 2.5 no longer has.
os.environ.setdefault("NUMBA_CUDA_ARRAY_INTERFACE_SYNC", "0")
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # noqa: NPY201
with contextlib.suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")
from numba import cuda  # after the lines above, which it needs

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
THREADS = 64 if SIMULATED else 256  # threads of a block; a power of two
LANES = 16 if SIMULATED else 32  # neighbouring columns that a block sums at once; a divisor of THREADS
BLOCKS = 4 if SIMULATED else 1056  # blocks of a grid, at most: 8 for each of an H200's 132 multiprocessors

# The loops around the body of a kernel; bind.LOOPS has those for the CPU. No argument of a body begins with _.
GRIDS = {
    "elementwise": "for _i in range(cuda.grid(1), {first}.size, cuda.gridsize(1)):\n body(_i, {names})",
    # One division for each thread; then (i, j) advances by the grid's size, which is split into rows and columns.
    "rowwise": """_columns = {first}.shape[1]
_i, _j = cuda.grid(1) // _columns, cuda.grid(1) % _columns
_down, _right = cuda.gridsize(1) // _columns, cuda.gridsize(1) % _columns
while _i < {first}.shape[0]:
 body(_i, _j, {names})
 _i, _j = _i + _down, _j + _right
 if _j >= _columns:
  _i, _j = _i + 1, _j - _columns""",
    # Block (tile, chunk) sums LANES columns over its chunk of the rows; partial is (chunks, columns).
    "sums": """_shared = cuda.shared.array(THREADS, T)
_rows, _columns, _chunks = {first}.shape[0], {first}.shape[1], partial.shape[0]
_tiles, _thread = (_columns + LANES - 1) // LANES, cuda.threadIdx.x
for _k in range(cuda.blockIdx.x, _tiles * _chunks, cuda.gridDim.x):
 _chunk, _j = _k // _tiles, _k % _tiles * LANES + _thread % LANES
 _total = T(0)
 if _j < _columns:
  for _i in range(_chunk * _rows // _chunks + _thread // LANES, (_chunk + 1) * _rows // _chunks, THREADS // LANES):
   _total += body(_i, _j, {names})
 _shared[_thread] = _total
 _half = THREADS // 2
 while _half >= LANES:
  cuda.syncthreads()
  if _thread < _half:
   _shared[_thread] += _shared[_thread + _half]
  _half //= 2
 if _thread < LANES and _j < _columns:
  partial[_chunk, _j] = _shared[_thread]
 cuda.syncthreads()""",
}


class CudaKernel:
    """A CUDA kernel, compiled for each element type of its first array; make(T): its function for the Numba type T."""

    def __init__(self, name: str, make: Callable[[Any], Callable], signature: str):
        self.name, self.make, self.signature = name, make, signature
        self.compiled: dict[np.dtype, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, dtype: np.dtype, blocks: int, *args: Any) -> None:
        """Launch `blocks` blocks, at most BLOCKS; every array must have the declared type and be C-contiguous."""
        compiled, types = self.compiled.get(dtype) or self.compile(dtype)
        fitted = [converted(self.name, arg, wanted) for arg, wanted in zip(args, types, strict=True)]
        if blocks > 0:
            compiled[min(int(blocks), BLOCKS), THREADS](*fitted)

    def compile(self, dtype: DTypeLike) -> tuple[Any, tuple[Any, ...]]:
        """Return the version for this element type, compiled or loaded from the cache, and its arguments' types."""
        types = numba_types(self.signature, dtype)
        with compile_lock(self.name):
            compiled = cuda.jit(numba.types.void(*types), cache=not SIMULATED)(self.make(types[0].dtype))
        self.compiled[np.dtype(dtype)] = compiled, types
        return compiled, types


def cuda_kernel(signature: str) -> Callable[[Callable], CudaKernel]:
    """Decorator: make a CUDA kernel; `signature` names the types of its arguments, T the first array's element type.
    The body's global T is that type; functions of this folder that it calls become device functions."""
    return lambda body: CudaKernel(body.__name__, lambda kind: with_device_functions(body, T=kind), signature)


def converted(name: str, arg: Any, wanted: Any) -> Any:
    """Return a number in the wanted type, or the array; TypeError for an array of another type, dimension or layout."""
    if not isinstance(wanted, numba.types.Array):
        return as_dtype(wanted).type(arg)
    if arg.dtype != as_dtype(wanted.dtype) or arg.ndim != wanted.ndim or not arg.flags["C_CONTIGUOUS"]:
        fitting = f"a C-contiguous {wanted.dtype} array of {wanted.ndim} dimensions"
        raise TypeError(f"{name} takes {fitting}, not a {arg.dtype} array of shape {arg.shape}")
    return arg


def with_device_functions(body: Any, space: dict[str, Any] | None = None, **names: Any) -> FunctionType:
    """Return `body` with `names` among its globals, and compiled functions there replaced by device functions. The
    simulator replaces the global `cuda` while a kernel runs, so all functions share the kernel's globals, `space`."""
    space = {} if space is None else space
    for name, value in (body.__globals__ | names).items():
        space.setdefault(name, value)
    for name in {step.argval for step in dis.get_instructions(body) if step.opname == "LOAD_GLOBAL"}:
        value = space.get(name)
        if isinstance(value, numba.core.dispatcher.Dispatcher):
            value = value.py_func  # the compiled function has flags for the CPU
        if isinstance(value, FunctionType) and value.__module__.startswith(__package__):
            space[name] = with_device_functions(value, space) if SIMULATED else device_function(value)
    result = FunctionType(body.__code__, space, body.__name__, body.__defaults__, body.__closure__)
    result.__qualname__ = body.__qualname__
    return result


def device_function(body: Callable) -> Any:
    """Return the body as a CUDA device function."""
    return cuda.jit(device=True)(with_device_functions(body))


def functions(kernel: Kernel) -> list[CudaKernel]:
    """Return the CUDA kernels that a kernel launches, in the order of their launches."""
    if not kernel.launches:
        if kernel.kind == "block":
            room, _, module = kernel.__module__.rpartition(".")
            importlib.import_module(f"{room}.gpu_{module}")
        elif kernel.kind.startswith("sums"):
            kernel.launches = [cuda_sums(kernel.signature)(kernel.body), add_partial]
        else:
            kernel.launches = [looped(kernel.kind, kernel.body, kernel.signature)]
    return kernel.launches


def looped(kind: str, body: Callable, signature: str, more: tuple[str, ...] = (), over: str = "{first}") -> CudaKernel:
    """Return the CUDA kernel that runs a body in the loop GRIDS[kind]; more: names of further arguments of the loop.
    over: the argument whose elements the loop visits, one call of the body for each."""

    def make(element: Any) -> Callable:
        names = {"body": device_function(body), "cuda": cuda, "THREADS": THREADS, "LANES": LANES, "T": element}
        return generate(kind, GRIDS[kind].replace("{first}", over), body, more, **names)

    return CudaKernel(body.__name__, make, signature)


def cuda_sums(signature: str) -> Callable[[Callable], CudaKernel]:
    """Decorator: make a CUDA kernel for `add_column_sums`; body(i, j, ...) returns a number and writes nothing."""
    return lambda body: looped("sums", body, signature + ", T[:, ::1]", more=("partial",))


def cuda_rowwise(signature: str, over: str) -> Callable[[Callable], CudaKernel]:
    """Decorator: make a CUDA kernel that runs body(i, j, ...) for each element of the argument named `over`."""
    return lambda body: looped("rowwise", body, signature, over=over)


@cuda_kernel("T[:, ::1], T[::1]")
def add_partial(partial, into):
    """into[j] += the sum over k of partial[k, j], in the order of k."""
    for j in range(cuda.grid(1), into.size, cuda.gridsize(1)):
        total = T(0)  # noqa: F821 - see cuda_kernel
        for k in range(partial.shape[0]):
            total += partial[k, j]
        into[j] += total


def group_total(value, lanes, largest):
    """Return, to all threads of a group of `lanes` neighbours, the sum or the largest of their float64 values.
    lanes: power of two. largest: 1 for the largest (no NaN), 0 for the sum. All threads of a block must call it."""
    shared = cuda.shared.array(THREADS, numba.float64)
    thread, half = cuda.threadIdx.x, lanes // 2
    shared[thread] = value
    while half > 0:
        cuda.syncthreads()
        if thread % lanes < half:
            mine, other = shared[thread], shared[thread + half]
            shared[thread] = (other if other > mine else mine) if largest else mine + other
        half //= 2
    cuda.syncthreads()
    total = shared[thread - thread % lanes]
    cuda.syncthreads()  # before the next call writes to `shared`
    return total


def group_sum(value, lanes):
    return group_total(value, lanes, 0)


def group_max(value, lanes):
    return group_total(value, lanes, 1)


def block_sum(value):
    """Return, to all threads of a block, the sum of their float64 values; all must call it."""
    return group_sum(value, THREADS)


def lanes_of(columns: int) -> int:
    """Return how many neighbouring threads share a row of `columns` columns: a power of two, 4 columns each or more."""
    lanes = 1
    while lanes < THREADS and 8 * lanes <= columns:
        lanes *= 2
    return lanes


@cuda_kernel("T[:, ::1], T[::1]")
def add_up(partial, result):
    """result[j] = the sum over k of partial[k, j]; launched with one block."""
    for j in range(result.size):
        total = 0.0
        for k in range(cuda.threadIdx.x, partial.shape[0], THREADS):
            total += partial[k, j]
        total = block_sum(total)
        if cuda.threadIdx.x == 0:
            result[j] = total


SCRATCH: dict[np.dtype, Any] = {}


def scratch(dtype: DTypeLike, *shape: int) -> Any:
    """Return an uninitialized device array for a call's partial sums, reused as an allocation waits for the GPU."""
    size = int(np.prod(shape))
    array = SCRATCH.get(np.dtype(dtype))
    if array is None or array.size < size:
        array = SCRATCH[np.dtype(dtype)] = cuda.device_array(max(1024, size), dtype)
    return array[:size].reshape(shape)


def sums_of(kernel: CudaKernel, threads: int, columns: int, array: Any, *rest: Any) -> list[float]:
    """Launch a kernel on `threads` threads; return the sums over its blocks, float64, one for each column.
    Block k of the kernel writes row k of its last argument, partial (blocks, columns)."""
    blocks = min(BLOCKS, -(-threads // THREADS))
    if not blocks:
        return [0.0] * columns
    partial, result = scratch("float64", blocks, columns), cuda.device_array(columns, np.float64)
    kernel(array.dtype, blocks, array, *rest, partial)
    add_up(np.dtype(np.float64), 1, partial, result)
    return result.copy_to_host().tolist()


def launch_rows(kernel: CudaKernel, array: Any, *rest: Any) -> None:
    """Launch a kernel in which `lanes` neighbouring threads share a row of `array`; lanes is its last argument."""
    lanes = lanes_of(array.shape[1])
    kernel(array.dtype, -(-array.shape[0] * lanes // THREADS), array, *rest, lanes)


def rows_twin(kernel: Kernel) -> Callable[[Callable], CudaKernel]:
    """Decorator: make a CUDA kernel for `launch_rows`, and register its launch as the CUDA twin of a block kernel."""

    def register(body: Callable) -> CudaKernel:
        rows = cuda_kernel(kernel.signature + ", int64")(body)
        kernel.device(rows)(functools.partial(launch_rows, rows))
        return rows

    return register


def launch_over(kernel: CudaKernel, over: Any, array: Any, *rest: Any) -> None:
    """Launch a kernel with a thread for each element of the array `over`."""
    kernel(array.dtype, -(-over.size // THREADS), array, *rest)


def add_column_sums(kernel: CudaKernel, array: Any, *rest: Any) -> None:
    """Launch a kernel of `cuda_sums`: add to element j of the last argument the sum of body(i, j, ...) over rows i."""
    rows, columns = array.shape
    chunks = min(64, -(-rows * LANES // (8 * THREADS)))  # a thread sums 8 rows or more, if there are as many
    partial = scratch(array.dtype, max(1, chunks), columns)
    kernel(array.dtype, chunks * -(-columns // LANES), array, *rest, partial)
    if chunks:
        launch_over(add_partial, rest[-1], partial, rest[-1])


def twin(kernel: Kernel, dtype: np.dtype) -> Callable:
    """Return a function of the kernel's arguments that launches its CUDA twin for this element type."""
    first = functions(kernel)[0]
    if kernel.kind == "block":
        return kernel.launch
    if kernel.kind.startswith("sums"):
        return lambda array, *rest: add_column_sums(first, array, *rest)
    return lambda array, *rest: launch_over(first, array, array, *rest)
