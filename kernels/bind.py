"""Decorators that compile loops written in plain Python for CPU and GPU; the one place of flags, cache and its lock.

    @elementwise("T[::1], T[::1], T")       body(i, w, g, rate): one element of a vector
    @rowwise("T[:, ::1], T[::1]")           body(i, j, z, b): one element of a matrix; sums=True: see below
    @block("T[::1]")                        a whole loop, which may return values; its CUDA twin is written separately

Each makes a callable, a kernel. Its first array selects what runs: compiled code for a numpy array, a CUDA launch for
an array on a GPU (gpu.py). T is the element type of that array. A kernel compiles itself for a type (float32, float64,
int64, ...) at its first call with that type; numbers declared as T are narrowed to T in the call. A body uses i and j
as indices only (they are signed in some loops, unsigned in others), and calls functions made by `function`.

                  CPU                                               CUDA, the same body
    elementwise   for i in range(first.size): body(i, ...)          a grid-stride loop over i
    rowwise       for i, for j: body(i, j, ...)                     a grid-stride loop over (i, j)
      sums=True   for i, for j: last[j] += body(i, j, ...)          blocks sum columns, then the blocks' sums are added
    block         body(...)                                         what @name.device(...) decorates, in gpu_MODULE.py
    on_cpu        body(...), in which no operation is reordered     none

Compiled code is cached on disk beside the module (or in NUMBA_CACHE_DIR). Numba's cache is not safe if processes
compile different types of one function at once: both pick the same file number. And N ranks with an empty cache would
each compile every kernel. So a kernel has a lock on this machine: one process compiles it, then all others load it."""

import contextlib
import fcntl
import os
import stat
import tempfile
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.np.numpy_support import as_dtype
from numpy.typing import DTypeLike

# error_model="numpy": LLVM does not vectorize a division that may raise. The flags leave out nnan and ninf, with which
# the compiler may delete every check for NaN and infinity.
OPTIONS = {"error_model": "numpy", "nogil": True}
FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}

# Other users may write to the folder of the locks: their links are not followed, and their pipes do not block.
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# The loops around a body; no argument of a body begins with _. First, the loops over a matrix.
NESTED = {
    "rowwise": """for _i in range({first}.shape[0]):
 for _j in range({first}.shape[1]):
  body(_i, _j, {names})""",
    "sums": """for _i in range({first}.shape[0]):
 for _j in range({first}.shape[1]):
  {last}[_j] += body(_i, _j, {names})""",
    # For bodies that write nothing: four rows at once, so that a sum is read and written once for four rows.
    "sums only": """_rows = {first}.shape[0] // 4 * 4
for _i in range(0, _rows, 4):
 for _j in range({first}.shape[1]):
  {last}[_j] += (body(_i, _j, {names}) + body(_i + 1, _j, {names})) + (
   body(_i + 2, _j, {names}) + body(_i + 3, _j, {names}))
for _i in range(_rows, {first}.shape[0]):
 for _j in range({first}.shape[1]):
  {last}[_j] += body(_i, _j, {names})""",
}
# A matrix of one column: a single loop, which vectorizes too; its sum stays in a register.
COLUMN = {
    "rowwise": """for _i in range({first}.shape[0]):
 body(_i, 0, {names})""",
    "sums": """_total = {last}[0]
for _i in range({first}.shape[0]):
 _total += body(_i, 0, {names})
{last}[0] = _total""",
}
COLUMN["sums only"] = COLUMN["sums"]
LOOPS = {
    # The first loop ends where a cache line of the first array begins: no vector store of the second crosses two lines.
    "elementwise": """_past = np.int64({first}.ctypes.data % np.uintp(64))
_head = min({first}.size, (64 - _past) % 64 // {first}.itemsize)
for _i in range(_head):
 body(_i, {names})
for _i in range(_head, {first}.size):
 body(np.uintp(_i), {names})""",
    "block": "return body({names})",
}
for kind, nested in NESTED.items():
    column, nested = textwrap.indent(COLUMN[kind], " "), textwrap.indent(nested, " ")
    LOOPS[kind] = f"if {{first}}.shape[1] == 1:\n{column}\nelse:\n{nested}"
# Number of index arguments, which come before the arrays.
INDICES = {"elementwise": 1, "rowwise": 2, "sums": 2, "sums only": 2, "block": 0}


@contextlib.contextmanager
def compile_lock(name: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold this user's lock of the kernel `name` on this machine; the system frees it when the process ends.
    kind: LOCK_EX (one process) to compile, or LOCK_SH (many processes) to load. Kernels share 16 lock files."""
    user = os.geteuid()
    path = os.path.join(tempfile.gettempdir(), f"hpcdl-compile-{user}-{zlib.crc32(name.encode()) % 16}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a temporary folder that cannot be written: compile without a lock
            lock = os.open(path, LOCK_FLAGS, 0o600)
            stack.callback(os.close, lock)
            status = os.fstat(lock)
            if stat.S_ISREG(status.st_mode) and status.st_uid == user:  # another user could lock their file for ever
                os.fchmod(lock, 0o600)
                fcntl.flock(lock, kind)
        yield


def stamp() -> int:
    """Return a checksum of names, sizes and times of this folder's files: a kernel may call functions of any file."""
    files = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in Path(__file__).parent.glob("*.py")
    )
    return zlib.crc32(repr(files).encode())


STAMP = stamp()


def numba_types(signature: str, dtype: DTypeLike) -> tuple[Any, ...]:
    """Return the Numba types that a signature names, where T is the element type `dtype`."""
    names = dict(vars(numba.types), T=numba.from_dtype(np.dtype(dtype)))
    return eval(f"({signature},)", {"__builtins__": {}}, names)  # the signatures of this folder, never a user's text


def function(body: Callable) -> Any:
    """Decorator: compile a scalar function that the bodies of kernels call, on CPU and GPU."""
    return numba.njit(fastmath=FASTMATH, forceinline=True, **OPTIONS)(body)  # a loop with a call does not vectorize


def exact(body: Callable) -> Any:
    """Decorator: compile a function without reordering its operations; it gives the same bits in every kernel."""
    # fastmath=False is needed: without it, Numba takes over the flags of the caller.
    return numba.njit(fastmath=False, forceinline=True, **OPTIONS)(body)


def arguments_of(kind: str, body: Callable) -> list[str]:
    """Return the names of the body's arguments after its indices. kind: a key of INDICES."""
    return list(body.__code__.co_varnames[INDICES[kind] : body.__code__.co_argcount])


def generate(kind: str, text: str, body: Callable, more: tuple[str, ...] = (), /, **names: Any) -> Callable:
    """Return a function of the body's arguments that runs the loop `text` around the body. kind: a key of INDICES.
    more: names of further arguments. names: the text's globals. The function has the body's file and name, so Numba's
    cache lies beside that file. Its closure, a part of Numba's cache key, holds STAMP, which stands for all files."""
    arguments = arguments_of(kind, body)
    text = text.format(first=arguments[0], last=arguments[-1], names=", ".join(arguments))
    lines = "\n".join(f"  {line}" for line in ["stamp", *text.split("\n")])
    above = "\n" * (body.__code__.co_firstlineno - 1)  # so that line numbers are those of the file
    source = f"{above}def make(stamp):\n def loop({', '.join([*arguments, *more])}):\n{lines}\n return loop"
    space: dict[str, Any] = {"__name__": body.__module__, **names}
    exec(compile(source, body.__code__.co_filename, "exec"), space)
    generated = space["make"](STAMP)
    generated.__name__, generated.__qualname__, generated.__doc__ = body.__name__, body.__qualname__, body.__doc__
    generated.__module__ = body.__module__
    return generated


def converted(arg: Any, wanted: Any) -> Any:
    """Return the argument in the wanted type: a number converted, an array as a read-only view if the type says so."""
    if not isinstance(wanted, numba.types.Array):
        return as_dtype(wanted).type(arg)
    if isinstance(arg, np.ndarray) and not wanted.mutable:
        arg = arg.view()
        arg.flags.writeable = False
    return arg


def narrowing_lines(kind: str, body: Callable, signature: str) -> str:
    """Return lines of code that narrow to T the float64 numbers that the signature declares as T.
    Callers pass Python's numbers, which are float64, and Numba is fastest if no argument needs a conversion."""
    names = arguments_of(kind, body)
    pairs = zip(names, numba_types(signature, "float32"), numba_types(signature, "float64"), strict=True)
    numbers = [name for name, a, b in pairs if a != b and not isinstance(a, numba.types.Array)]
    return "".join(f"{name} = {names[0]}.dtype.type({name})\n" for name in numbers)


KERNELS: list["Kernel"] = []  # all kernels of the process


class LoopCache(FunctionCache):
    """Numba's cache of a function; it loads code without the tables of all functions that Numba can compile.
    Only compiling needs the tables. Filling them takes a third of a start, and imports scipy.linalg."""

    def load_overload(self, types: Any, target: Any) -> Any:
        rtsys.initialize(target)  # the functions of Numba's runtime, to which loaded code is linked
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(types, target)
            if found is not None:
                return found
        return super().load_overload(types, target)


class Loop(CPUDispatcher):
    """A compiled loop, cached on disk; a dispatcher of Numba's, whose call costs as little as a numpy function's."""

    def __init__(self, loop: Callable, **flags: Any):
        super().__init__(loop, targetoptions={"nopython": True, "boundscheck": None, **OPTIONS, **flags})
        self._cache = LoopCache(self.py_func)  # as enable_caching() sets Numba's own

    def compile(self, types: Any) -> Any:
        """Compile the version for these Numba types, or load it; Numba replaces the cache's index atomically."""
        key = self._cache._index_key(types, self.targetctx.codegen())
        cached = key in self._cache._cache_file._load_index()
        with compile_lock(self.__name__, fcntl.LOCK_SH if cached else fcntl.LOCK_EX):
            return super().compile(types)


class Kernel(Loop):
    """A loop with a compiled version for each element type of its first array, and its CUDA twin.
    Numba calls `_compile_for_args` if no version fits the arguments: the type is new, or the array lies on a GPU."""

    def __init__(self, kind: str, body: Callable, signature: str):
        text = narrowing_lines(kind, body, signature) + LOOPS[kind]
        super().__init__(generate(kind, text, body, body=function(body), np=np), fastmath=FASTMATH)
        self.kind, self.body, self.signature = kind, body, signature
        self.compiled: dict[np.dtype, Kernel] = {}
        self.twins: dict[np.dtype, Callable] = {}
        self.launch: Any = None  # a block kernel's CUDA twin ...
        self.launches: list[Any] = []  # ... and the CUDA kernels that it launches
        KERNELS.append(self)

    def __get__(self, instance: Any, owner: Any = None) -> "Kernel":
        return self  # an attribute of a class is not bound as a method

    def types(self, dtype: DTypeLike) -> tuple[Any, ...]:
        """Return the Numba types of the CPU version's arguments, for this element type of the first array."""
        pairs = zip(numba_types(self.signature, dtype), numba_types(self.signature, "float64"), strict=True)
        return tuple(a if isinstance(a, numba.types.Array) else wide for a, wide in pairs)

    def compile(self, dtype: DTypeLike) -> "Kernel":
        """Compile the CPU version for this element type, or load it from the cache; return the kernel."""
        super().compile(self.types(dtype))
        self.compiled[np.dtype(dtype)] = self
        return self

    def version(self, dtype: DTypeLike) -> Any:
        """Return the CPU version for this element type, compiled if need be; calls take a third less than the kernel's.
        The version checks no types: the caller passes the signature's types, and writable arrays if it writes them."""
        if np.dtype(dtype) not in self.compiled:
            self.compile(dtype)
        return self.get_overload(self.types(dtype))

    def typeof_pyval(self, value: Any) -> Any:
        """Return Numba's type of an argument; pyobject for an array on a GPU, which no CPU version accepts."""
        if hasattr(value, "__cuda_array_interface__"):
            return numba.types.pyobject
        return super().typeof_pyval(value)

    def _compile_for_args(self, *args: Any) -> Callable:
        """Return the callable for arguments that no version accepts; TypeError if they do not fit the signature."""
        array = args[0]
        if hasattr(array, "__cuda_array_interface__"):
            return self.on_device
        if array.dtype not in self.compiled:
            return self.compile(array.dtype)
        types = self.types(array.dtype)
        fitted = [converted(arg, wanted) for arg, wanted in zip(args, types, strict=True)]
        if any(numba.typeof(arg) != wanted for arg, wanted in zip(fitted, types, strict=True)):
            given = ", ".join(str(numba.typeof(arg)) for arg in args)
            raise TypeError(f"{self.__name__} takes {', '.join(map(str, types))}, not {given}")
        return lambda *args: self(*fitted)

    def on_device(self, array: Any, *rest: Any) -> Any:
        """Launch the CUDA twin; for a meta array, which has no memory, compute nothing."""
        if hasattr(array, "outlined"):  # hpcdl/models/meta_arrays.py
            return array.outlined
        if array.dtype not in self.twins:
            from hpcdl.kernels import gpu  # imports CUDA, which a machine without a GPU does not need

            self.twins[array.dtype] = gpu.twin(self, array.dtype)
        return self.twins[array.dtype](array, *rest)

    def device(self, *launches: Any) -> Callable[[Callable], "Kernel"]:
        """Decorator: register a function of the kernel's arguments and results as twin; launches: its CUDA kernels."""

        def register(launch: Callable) -> Kernel:
            self.launch, self.launches = launch, list(launches)
            return self

        return register


def on_cpu(body: Callable) -> Any:
    """Decorator: compile a loop for host arrays; it reorders no operation, has no CUDA twin, and releases the GIL."""
    return Loop(generate("block", LOOPS["block"], body, body=exact(body)))


def prepare(loop: Any, *like: Any) -> Any:
    """Compile a loop of `on_cpu` before a run's clock starts; return it. like: arguments, or their Numba types."""
    loop.compile(tuple(each if isinstance(each, numba.types.Type) else numba.typeof(each) for each in like))
    return loop


def elementwise(signature: str) -> Callable[[Callable], Kernel]:
    """Decorator: make a kernel of body(i, ...), which computes element i; `signature` names the types after i."""
    return lambda body: Kernel("elementwise", body, signature)


def rowwise(signature: str, sums: bool | str = False) -> Callable[[Callable], Kernel]:
    """Decorator: make a kernel of body(i, j, ...), which computes element (i, j) of a matrix. signature: types after j.
    sums: True if the body's result is added to element j of the last argument; "only" if it also writes nothing."""
    return lambda body: Kernel({False: "rowwise", True: "sums", "only": "sums only"}[sums], body, signature)


def block(signature: str) -> Callable[[Callable], Kernel]:
    """Decorator: make a kernel of a whole loop; `signature` names the types of its arguments."""
    return lambda body: Kernel("block", body, signature)
