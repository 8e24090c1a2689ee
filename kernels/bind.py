"""How a loop written in plain Python becomes compiled code: one place for the flags, the cache and its lock.

    @elementwise("T[::1], T[::1], T")       body(i, w, g, rate): one element of a vector
    @rowwise("T[:, ::1], T[::1]")           body(i, j, z, b): one element of a matrix; sums=True: see below
    @block("T[::1]")                        a whole loop, which may return values; its CUDA twin is written apart

Each makes one callable. The kind of its first array chooses what runs: compiled code on the CPU for a numpy array, a
CUDA launch for an array that lies on a GPU (gpu.py). T is the element type of that array, and a kernel compiles itself
for a type (float32, float64, int64, ...) when it is first called with it; a number declared T is narrowed in the call.

                  CPU                                               CUDA, the same body
    elementwise   for i in range(first.size): body(i, ...)          a grid-stride loop over i
    rowwise       for i, for j: body(i, j, ...)                     a grid-stride loop over (i, j)
      sums=True   for i, for j: last[j] += body(i, j, ...)          blocks sum columns, then the blocks' sums are added
    block         body(...)                                         what @name.device(...) decorates, in gpu_MODULE.py

Compiled code is cached on disk beside the module (or in NUMBA_CACHE_DIR). Numba's cache is not safe when processes
compile different types of one function at once (both pick the same file number), and N cold ranks would all compile
the same thing; so compiling happens under a lock on the machine: one process compiles, the others then load.
"""

import ast
import contextlib
import fcntl
import inspect
import os
import tempfile
import zlib
from pathlib import Path

import numba
import numpy as np

# error_model="numpy": a division that could raise keeps LLVM from vectorizing. The flags leave out nnan and ninf, with
# which the compiler may delete every check for a value that is not finite.
OPTIONS = {"error_model": "numpy", "nogil": True}
FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}

# What stands around a body; no argument of a body begins with _.
LOOPS = {
    "elementwise": "for _i in range({first}.size):\n body(_i, {names})",
    "rowwise": "for _i in range({first}.shape[0]):\n for _j in range({first}.shape[1]):\n  body(_i, _j, {names})",
    "sums": """for _i in range({first}.shape[0]):
 for _j in range({first}.shape[1]):
  {last}[_j] += body(_i, _j, {names})""",
    "block": "return body({names})",
}
INDICES = {"elementwise": 1, "rowwise": 2, "sums": 2, "block": 0}  # a body's arguments before the arrays


@contextlib.contextmanager
def compile_lock():
    """Hold this user's lock on this machine; the lock goes with the process, so a killed one leaves none behind."""
    path = os.path.join(tempfile.gettempdir(), f"hpcdl-compile-{os.getuid()}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a temporary folder that cannot be written: compile without a lock
            file = stack.enter_context(open(path, "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stamp() -> int:
    """A number that changes with any file of this folder: the flags lie here, and bodies call functions of others."""
    files = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in Path(__file__).parent.glob("*.py")
    )
    return zlib.crc32(repr(files).encode())


STAMP = stamp()


def numba_types(signature: str, dtype) -> tuple:
    """The Numba types that a signature names when T is this element type."""
    names = dict(vars(numba.types), T=numba.from_dtype(np.dtype(dtype)))
    return eval(f"({signature},)", {"__builtins__": {}}, names)  # our own text, never a user's


def function(body):
    """Decorator: a scalar function that the bodies of kernels call, on CPU and GPU."""
    return numba.njit(fastmath=FASTMATH, **OPTIONS)(body)


def generate(kind: str, text: str, body, more: tuple[str, ...] = (), /, **names):
    """The function of body's arguments that runs the loop `text` around it, as if it stood where the body stands.

    more: arguments after those of the body; names: what the names in the text mean. With the file, line and name of the
    body, Numba's cache finds its folder and is renewed when the file changes; STAMP, of the other files, is in the
    cache's key because a closure's values are.
    """
    arguments = list(inspect.signature(body).parameters)[INDICES[kind] :]
    text = text.format(first=arguments[0], last=arguments[-1], names=", ".join(arguments))
    lines = "\n".join(f"  {line}" for line in ["stamp", *text.split("\n")])
    tree = ast.parse(f"def make(stamp):\n def loop({', '.join([*arguments, *more])}):\n{lines}\n return loop")
    ast.increment_lineno(tree, body.__code__.co_firstlineno - tree.body[0].body[0].lineno)
    space = {"__name__": body.__module__, **names}
    exec(compile(tree, body.__code__.co_filename, "exec"), space)
    made = space["make"](STAMP)
    made.__name__, made.__qualname__, made.__doc__ = body.__name__, body.__qualname__, body.__doc__
    return made


KERNELS = []  # all that were made


class Kernel:
    """A body or loop with one compiled version for each element type of its first array, and its CUDA twin."""

    def __init__(self, kind: str, body, signature: str):
        self.kind, self.body, self.signature = kind, body, signature
        self.__doc__, self.__name__, self.__module__ = body.__doc__, body.__name__, body.__module__
        self.compiled, self.twins = {}, {}
        KERNELS.append(self)
        self.launch, self.launches = None, []  # a block kernel's CUDA twin and the CUDA kernels that it launches
        self.loop = generate(kind, LOOPS[kind], body, body=function(body))
        self.dispatcher = numba.njit(cache=True, fastmath=FASTMATH, **OPTIONS)(self.loop)

    def __call__(self, array, *rest):
        if type(array) is not np.ndarray and hasattr(array, "__cuda_array_interface__"):
            return self.on_device(array, *rest)
        try:
            compiled = self.compiled[array.dtype]
        except KeyError:
            compiled = self.compile(array.dtype)
        return compiled(array, *rest)

    def compile(self, dtype):
        """Compile, or load from the cache, the CPU version for this element type; returns the callable."""
        with compile_lock():
            self.dispatcher.disable_compile(False)
            self.dispatcher.compile(numba_types(self.signature, dtype))
            self.dispatcher.disable_compile()  # what does not fit is an error, not another version behind our back
        self.compiled[np.dtype(dtype)] = self.dispatcher
        return self.dispatcher

    def on_device(self, array, *rest):
        """Launch the CUDA twin."""
        try:
            twin = self.twins[array.dtype]
        except KeyError:
            from hpcdl.kernels import gpu  # imports CUDA, which a machine without a GPU does not need

            twin = self.twins[array.dtype] = gpu.twin(self, array.dtype)
        return twin(array, *rest)

    def device(self, *launches):
        """Decorator: this function, with the same arguments and results, is the CUDA twin; it launches `launches`."""

        def register(launch):
            self.launch, self.launches = launch, list(launches)
            return self

        return register


def elementwise(signature: str):
    """Decorator: bind body(i, ...) of one element to loops; `signature` names the types of its arguments after i."""
    return lambda body: Kernel("elementwise", body, signature)


def rowwise(signature: str, sums: bool = False):
    """Decorator: bind body(i, j, ...) of one element of a matrix to loops.

    sums: the body returns a number, and the last argument, one number for each column, gains the sum over the rows.
    """
    return lambda body: Kernel("sums" if sums else "rowwise", body, signature)


def block(signature: str):
    """Decorator: compile a whole loop."""
    return lambda body: Kernel("block", body, signature)
