"""The kernels on a GPU: the one module that imports Numba's CUDA, imported when an array on a GPU first meets a kernel.

    twin(kernel, dtype)          what bind.py calls: a function that launches the CUDA twin of a kernel
    @cuda_kernel("T[::1]")       a CUDA kernel, for the twins of block kernels (gpu_*.py)
    functions(kernel)            the CUDA kernels behind a kernel
    cuda_kernel.ptx(dtype)       its assembly for sm_90, without a GPU

Grids are one-dimensional, of THREADS threads a block, and every kernel strides over its grid, so any grid is right. The
order of a sum depends on the shape of the arrays only, never on who is first: THREADS partial sums are added as a tree
within a block, then the blocks' sums in their order. So the same call gives the same bits.

Launches go to CUDA's default stream, which is CuPy's too: nothing needs to wait for the other.

With NUMBA_ENABLE_CUDASIM=1, set before Numba is imported, the kernels run in Numba's simulator.
"""

import contextlib
import importlib
import os
from types import FunctionType, SimpleNamespace

import numba
import numpy as np
from numba.np.numpy_support import as_dtype

from hpcdl.kernels.bind import Kernel, compile_lock, generate, numba_types

# numba-cuda is Numba's CUDA target as a package of its own. It puts itself in the place of numba.cuda when Python
# starts, but not from a folder on PYTHONPATH; and it wants numpy's row_stack, which is gone in numpy 2.5.
os.environ.setdefault("NUMBA_CUDA_ARRAY_INTERFACE_SYNC", "0")
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # noqa: NPY201
with contextlib.suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")
from numba import cuda  # after what it needs

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
THREADS = 64 if SIMULATED else 256  # of a block; a power of two
LANES = 16 if SIMULATED else 32  # neighbouring columns that a block sums at once; a divisor of THREADS
BLOCKS = 4 if SIMULATED else 1056  # at most: 8 for each of an H200's 132 multiprocessors

# What stands around the body of a kernel; bind.LOOPS has the same for the CPU.
GRIDS = {
    "elementwise": "for i in range(cuda.grid(1), {first}.size, cuda.gridsize(1)):\n body(i, {names})",
    # One division for each thread; then (i, j) moves on by the grid's size, cut into rows and the rest.
    "rowwise": """columns = {first}.shape[1]
i, j = cuda.grid(1) // columns, cuda.grid(1) % columns
down, right = cuda.gridsize(1) // columns, cuda.gridsize(1) % columns
while i < {first}.shape[0]:
 body(i, j, {names})
 i, j = i + down, j + right
 if j >= columns:
  i, j = i + 1, j - columns""",
    # Block (tile, chunk) sums LANES columns over its chunk of the rows; partial is (chunks, columns).
    "sums": """shared = cuda.shared.array(THREADS, T)
rows, columns, chunks = {first}.shape[0], {first}.shape[1], partial.shape[0]
tiles, thread = (columns + LANES - 1) // LANES, cuda.threadIdx.x
for k in range(cuda.blockIdx.x, tiles * chunks, cuda.gridDim.x):
 chunk, j = k // tiles, k % tiles * LANES + thread % LANES
 total = T(0)
 if j < columns:
  for i in range(chunk * rows // chunks + thread // LANES, (chunk + 1) * rows // chunks, THREADS // LANES):
   total += body(i, j, {names})
 shared[thread] = total
 half = THREADS // 2
 while half >= LANES:
  cuda.syncthreads()
  if thread < half:
   shared[thread] += shared[thread + half]
  half //= 2
 if thread < LANES and j < columns:
  partial[chunk, j] = shared[thread]
 cuda.syncthreads()""",
}


class CudaKernel:
    """A CUDA kernel with one compiled version for each element type of its first array.

    make(T): the Python function, T the Numba type of the elements.
    """

    def __init__(self, name: str, make, signature: str):
        self.name, self.make, self.signature, self.compiled = name, make, signature, {}

    def __call__(self, dtype, blocks: int, *args):
        """Launch so many blocks, at most BLOCKS; every array must be of the declared type and contiguous."""
        try:
            compiled, types = self.compiled[dtype]
        except KeyError:
            compiled, types = self.compile(dtype)
        args = [fitting(self.name, arg, wanted) for arg, wanted in zip(args, types, strict=True)]
        if blocks > 0:
            compiled[min(int(blocks), BLOCKS), THREADS](*args)

    def compile(self, dtype):
        """Compile, or load from the cache, the version for this element type."""
        types = numba_types(self.signature, dtype)
        with compile_lock():
            compiled = cuda.jit(numba.types.void(*types), cache=not SIMULATED)(self.make(types[0].dtype))
        self.compiled[np.dtype(dtype)] = compiled, types
        return compiled, types

    def ptx(self, dtype) -> str:
        """The kernel's assembly for compute capability 9.0; no GPU is needed."""
        types = numba_types(self.signature, dtype)
        with without_a_gpu():
            text, _ = cuda.compile(
                self.make(types[0].dtype), numba.types.void(*types), cc=(9, 0), device=False, abi="numba", output="ptx"
            )
        return text


def cuda_kernel(signature: str):
    """Decorator: a CUDA kernel; `signature` names the types of its arguments, T the first array's element type.

    It may use cuda, THREADS, and T, which is put among its globals.
    """
    return lambda body: CudaKernel(body.__name__, lambda kind: adapted(body, T=kind), signature)


@contextlib.contextmanager
def without_a_gpu():
    """Let Numba compile for a GPU that is not there: it asks the current device what it can do."""
    dispatcher = importlib.import_module("numba.cuda.dispatcher")
    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
    try:
        yield
    finally:
        dispatcher.get_current_device = before


def fitting(name: str, arg, wanted):
    """The argument as the compiled kernel takes it; TypeError for an array that does not fit."""
    if not isinstance(wanted, numba.types.Array):
        return as_dtype(wanted).type(arg)
    if arg.dtype != as_dtype(wanted.dtype) or arg.ndim != wanted.ndim or not arg.flags["C_CONTIGUOUS"]:
        raise TypeError(f"{name} takes a C-contiguous array of {wanted.ndim} dimensions of {wanted.dtype} here")
    return arg


def adapted(body, **names):
    """The function with other values for some of its globals: `names`, and CUDA device functions for compiled ones."""
    space = dict(body.__globals__)
    for name in body.__code__.co_names:
        value = space.get(name)
        if isinstance(value, numba.core.dispatcher.Dispatcher):  # as it is, its CPU flags would come along
            space[name] = device_function(value.py_func)
    made = FunctionType(body.__code__, space | names, body.__name__, body.__defaults__, body.__closure__)
    made.__qualname__ = body.__qualname__
    return made


def device_function(body):
    """The body as a CUDA device function."""
    return cuda.jit(device=True)(adapted(body))


def functions(kernel: Kernel) -> list[CudaKernel]:
    """The CUDA kernels behind a kernel, in the order of their launches."""
    if not kernel.launches:
        if kernel.kind == "block":
            room, _, module = kernel.__module__.rpartition(".")
            importlib.import_module(f"{room}.gpu_{module}")
        else:
            kernel.launches = generated(kernel)
    return kernel.launches


def generated(kernel: Kernel) -> list[CudaKernel]:
    """The CUDA kernels around an element's body."""
    sums = kernel.kind == "sums"

    def make(kind):
        names = {"body": device_function(kernel.body), "cuda": cuda, "THREADS": THREADS, "LANES": LANES, "T": kind}
        return generate(kernel.kind, GRIDS[kernel.kind], kernel.body, ("partial",) if sums else (), **names)

    first = CudaKernel(kernel.__name__, make, kernel.signature + (", T[:, ::1]" if sums else ""))
    return [first, add_partial] if sums else [first]


@cuda_kernel("T[:, ::1], T[::1]")
def add_partial(partial, into):
    """into[j] += the sum over k of partial[k, j], in the order of k."""
    for j in range(cuda.grid(1), into.size, cuda.gridsize(1)):
        total = T(0)  # noqa: F821 - see cuda_kernel
        for k in range(partial.shape[0]):
            total += partial[k, j]
        into[j] += total


SCRATCH = {}


def scratch(dtype, *shape: int):
    """A device array with unspecified contents, for the partial sums of one call: allocating would wait for the GPU."""
    size = int(np.prod(shape))
    kept = SCRATCH.get(np.dtype(dtype))
    if kept is None or kept.size < size:
        kept = SCRATCH[np.dtype(dtype)] = cuda.device_array(max(1024, size), dtype)
    return kept[:size].reshape(shape)


def twin(kernel: Kernel, dtype):
    """A function of the kernel's arguments that launches its CUDA twin for this element type."""
    launches = functions(kernel)
    if kernel.kind == "block":
        return kernel.launch
    first = launches[0]
    if kernel.kind != "sums":
        return lambda array, *rest: first(dtype, -(-array.size // THREADS), array, *rest)

    def sums(array, *rest):
        rows, columns = array.shape
        chunks = min(64, -(-rows * LANES // (8 * THREADS)))  # a thread sums at least 8 rows, where there are as many
        partial = scratch(dtype, max(1, chunks), columns)
        first(dtype, chunks * -(-columns // LANES), array, *rest, partial)
        if chunks:
            launches[1](dtype, -(-columns // THREADS), partial, rest[-1])

    return sums
