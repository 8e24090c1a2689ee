"""CUDA kernels: compilation, launches and sums. bind.py imports it when a kernel first gets an array on a GPU.

    twin(kernel, dtype)          return a function that launches the CUDA twin of a kernel, for bind.py
    @cuda_kernel("T[::1]")       make a CUDA kernel, for the twins of block kernels (gpu_*.py)
    functions(kernel)            return the CUDA kernels that a kernel launches
    cuda_kernel.ptx(dtype)       return its assembly for sm_90; no GPU is needed

Only this module imports Numba's CUDA. Grids are one-dimensional, of THREADS threads a block; every kernel strides over
its grid, so any number of blocks is correct. The order of a sum depends only on the shapes of the arrays: THREADS
partial sums are added as a tree within a block, then the blocks' sums in their order. So the same call gives the same
bits; gpu_sparse.py has the one exception.

Launches go to CUDA's default stream, which is CuPy's too: so they run in order, without further synchronization.

With NUMBA_ENABLE_CUDASIM=1, set before Numba is imported, the kernels run in Numba's simulator.
"""

import contextlib
import dis
import importlib
import os
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
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
    """A CUDA kernel with one compiled version for each element type of its first array.

    make(T): the Python function, T the Numba type of the elements.
    """

    def __init__(self, name: str, make: Callable[[Any], Callable], signature: str):
        self.name, self.make, self.signature = name, make, signature
        self.compiled: dict[np.dtype, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, dtype: np.dtype, blocks: int, *args: Any) -> None:
        """Launch `blocks` blocks, at most BLOCKS; every array must have the declared type and be C-contiguous."""
        try:
            compiled, types = self.compiled[dtype]
        except KeyError:
            compiled, types = self.compile(dtype)
        fitted = [converted(self.name, arg, wanted) for arg, wanted in zip(args, types, strict=True)]
        if blocks > 0:
            compiled[min(int(blocks), BLOCKS), THREADS](*fitted)

    def compile(self, dtype: DTypeLike) -> tuple[Any, tuple[Any, ...]]:
        """Return the version for this element type, compiled or loaded from the cache, and its types."""
        types = numba_types(self.signature, dtype)
        with compile_lock(self.name):
            compiled = cuda.jit(numba.types.void(*types), cache=not SIMULATED)(self.make(types[0].dtype))
        self.compiled[np.dtype(dtype)] = compiled, types
        return compiled, types

    def ptx(self, dtype: DTypeLike) -> str:
        """Return the kernel's assembly for compute capability 9.0; no GPU is needed."""
        types = numba_types(self.signature, dtype)
        with without_a_gpu():
            text, _ = cuda.compile(
                self.make(types[0].dtype), numba.types.void(*types), cc=(9, 0), device=False, abi="numba", output="ptx"
            )
        return text


def cuda_kernel(signature: str) -> Callable[[Callable], CudaKernel]:
    """Decorator: a CUDA kernel; `signature` names the types of its arguments, T the first array's element type.

    The body's global T is that type; functions of this folder that it calls become device functions.
    """
    return lambda body: CudaKernel(body.__name__, lambda kind: with_device_functions(body, T=kind), signature)


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Let Numba compile without a GPU: it would ask the current device for its compute capability."""
    dispatcher: Any = importlib.import_module("numba.cuda.dispatcher")
    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
    try:
        yield
    finally:
        dispatcher.get_current_device = before


def no_compiler() -> str:
    """Return why kernels cannot be compiled for a GPU here (NVIDIA's libnvvm is missing), or "" if they can."""
    try:
        importlib.import_module("numba.cuda.cudadrv.nvvm").NVVM()
    except ImportError as error:  # Numba's NvvmSupportError is one
        return " ".join(str(error).split())
    return ""


def converted(name: str, arg: Any, wanted: Any) -> Any:
    """Return the argument with the wanted type; TypeError for an array of another type, dimension or layout."""
    if not isinstance(wanted, numba.types.Array):
        return as_dtype(wanted).type(arg)
    if arg.dtype != as_dtype(wanted.dtype) or arg.ndim != wanted.ndim or not arg.flags["C_CONTIGUOUS"]:
        raise TypeError(f"{name} takes a C-contiguous array of {wanted.ndim} dimensions of {wanted.dtype} here")
    return arg


def with_device_functions(body: Any, space: dict[str, Any] | None = None, **names: Any) -> FunctionType:
    """Return the function with `names` among its globals and CUDA device functions in place of compiled functions.

    The simulator replaces the global `cuda` while a kernel runs; so there all share the kernel's globals, `space`.
    """
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
        else:
            kernel.launches = generated(kernel)
    return kernel.launches


def generated(kernel: Kernel) -> list[CudaKernel]:
    """Return the CUDA kernels made of the body of an elementwise or rowwise kernel."""
    if kernel.kind.startswith("sums"):
        return [cuda_sums(kernel.signature)(kernel.body), add_partial]
    return [looped(kernel.kind, kernel.body, kernel.signature)]


def looped(kind: str, body: Callable, signature: str, more: tuple[str, ...] = (), over: str = "{first}") -> CudaKernel:
    """Return the CUDA kernel that runs a body in the loop GRIDS[kind]; over: the argument whose elements it visits."""

    def make(element: Any) -> Callable:
        names = {"body": device_function(body), "cuda": cuda, "THREADS": THREADS, "LANES": LANES, "T": element}
        return generate(kind, GRIDS[kind].replace("{first}", over), body, more, **names)

    return CudaKernel(body.__name__, make, signature)


def cuda_sums(signature: str) -> Callable[[Callable], CudaKernel]:
    """Decorator: a CUDA kernel for `add_column_sums` of body(i, j, ...), which returns a number and writes nothing."""
    return lambda body: looped("sums", body, signature + ", T[:, ::1]", more=("partial",))


def cuda_rowwise(signature: str, over: str) -> Callable[[Callable], CudaKernel]:
    """Decorator: a CUDA kernel that runs body(i, j, ...) for every element of the matrix named `over`, an argument."""
    return lambda body: looped("rowwise", body, signature, over=over)


@cuda_kernel("T[:, ::1], T[::1]")
def add_partial(partial, into):
    """into[j] += the sum over k of partial[k, j], in the order of k."""
    for j in range(cuda.grid(1), into.size, cuda.gridsize(1)):
        total = T(0)  # noqa: F821 - see cuda_kernel
        for k in range(partial.shape[0]):
            total += partial[k, j]
        into[j] += total


def group_sum(value, lanes):
    """Return, to all threads of a group of `lanes` neighbours, the sum of their float64 values.

    lanes: a power of two. All threads of the block must call it.
    """
    shared = cuda.shared.array(THREADS, numba.float64)
    thread, half = cuda.threadIdx.x, lanes // 2
    shared[thread] = value
    while half > 0:
        cuda.syncthreads()
        if thread % lanes < half:
            shared[thread] += shared[thread + half]
        half //= 2
    cuda.syncthreads()
    total = shared[thread - thread % lanes]
    cuda.syncthreads()  # before the next call writes to `shared`
    return total


def group_max(value, lanes):
    """Return, to all threads of a group of `lanes` neighbours, the largest of their float64 values, none NaN."""
    shared = cuda.shared.array(THREADS, numba.float64)
    thread, half = cuda.threadIdx.x, lanes // 2
    shared[thread] = value
    while half > 0:
        cuda.syncthreads()
        if thread % lanes < half and shared[thread + half] > shared[thread]:
            shared[thread] = shared[thread + half]
        half //= 2
    cuda.syncthreads()
    top = shared[thread - thread % lanes]
    cuda.syncthreads()  # before the next call writes to `shared`
    return top


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
    """Return a reused, uninitialized device array for partial sums of one call: an allocation waits for the GPU."""
    size = int(np.prod(shape))
    array = SCRATCH.get(np.dtype(dtype))
    if array is None or array.size < size:
        array = SCRATCH[np.dtype(dtype)] = cuda.device_array(max(1024, size), dtype)
    return array[:size].reshape(shape)


def total_of(partial: Any) -> np.ndarray:
    """Return the column sums of float64 partial sums (blocks, columns) on the host; zeros if no block ran."""
    if not partial.shape[0]:
        return np.zeros(partial.shape[1])
    result = cuda.device_array(partial.shape[1], np.float64)
    add_up(np.dtype(np.float64), 1, partial, result)
    return result.copy_to_host()


def add_column_sums(kernel: CudaKernel, array: Any, *rest: Any) -> None:
    """Add to the last argument the sums over the rows of the body's results for each element of `array`."""
    rows, columns = array.shape
    chunks = min(64, -(-rows * LANES // (8 * THREADS)))  # a thread sums 8 rows or more, if there are as many
    partial = scratch(array.dtype, max(1, chunks), columns)
    kernel(array.dtype, chunks * -(-columns // LANES), array, *rest, partial)
    if chunks:
        add_partial(array.dtype, -(-columns // THREADS), partial, rest[-1])


def twin(kernel: Kernel, dtype: np.dtype) -> Callable:
    """Return a function of the kernel's arguments that launches its CUDA twin for this element type."""
    first = functions(kernel)[0]
    if kernel.kind == "block":
        return kernel.launch
    if kernel.kind.startswith("sums"):
        return lambda array, *rest: add_column_sums(first, array, *rest)
    return lambda array, *rest: first(dtype, -(-array.size // THREADS), array, *rest)
