"""How a loop written in plain Python becomes compiled code: one place for the flags, the cache and its lock.

    @elementwise("T[::1], T[::1], T")       body(i, w, g, rate): one element of a vector
    @rowwise("T[:, ::1], T[::1]")           body(i, j, z, b): one element of a matrix; sums=True: see below
    @block("T[::1]")                        a whole loop, which may return values; its CUDA twin is written apart

Each makes one callable. The kind of its first array chooses what runs: compiled code on the CPU for a numpy array, a
CUDA launch for an array that lies on a GPU (gpu.py). T is the element type of that array, and a kernel compiles itself
for a type (float32, float64, int64, ...) when it is first called with it; a number declared T is narrowed in the call.
A body uses i and j as indices only (unsigned or signed, as the loop has it), and `function`s for what it calls.

                  CPU                                               CUDA, the same body
    elementwise   for i in range(first.size): body(i, ...)          a grid-stride loop over i
    rowwise       for i, for j: body(i, j, ...)                     a grid-stride loop over (i, j)
      sums=True   for i, for j: last[j] += body(i, j, ...)          blocks sum columns, then the blocks' sums are added
    block         body(...)                                         what @name.device(...) decorates, in gpu_MODULE.py
    on_cpu        body(...)                                         none

Compiled code is cached on disk beside the module (or in NUMBA_CACHE_DIR). Numba's cache is not safe when processes
compile different types of one function at once (both pick the same file number), and N cold ranks would all compile
the same thing; so a kernel is compiled under its lock on the machine: one process compiles, then all others load at
once, and different kernels are compiled by different processes.
"""

import ast
import contextlib
import fcntl
import inspect
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
from numba.core.registry import CPUDispatcher
from numba.np.numpy_support import as_dtype
from numpy.typing import DTypeLike

# error_model="numpy": a division that could raise keeps LLVM from vectorizing. The flags leave out nnan and ninf, with
# which the compiler may delete every check for a value that is not finite.
OPTIONS = {"error_model": "numpy", "nogil": True}
FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}

# Others may write to the folder of the locks: a link that they have left there is not followed, a pipe not waited for.
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# What stands around a body; no argument of a body begins with _. First, the loops over a matrix.
NESTED = {
    "rowwise": """for _i in range({first}.shape[0]):
 for _j in range({first}.shape[1]):
  body(_i, _j, {names})""",
    "sums": """for _i in range({first}.shape[0]):
 for _j in range({first}.shape[1]):
  {last}[_j] += body(_i, _j, {names})""",
    # Four rows at once, so that sums are read and written a fourth as often: for bodies that write nothing.
    "sums only": """_rows = {first}.shape[0] // 4 * 4
for _i in range(0, _rows, 4):
 for _j in range({first}.shape[1]):
  {last}[_j] += (body(_i, _j, {names}) + body(_i + 1, _j, {names})) + (
   body(_i + 2, _j, {names}) + body(_i + 3, _j, {names}))
for _i in range(_rows, {first}.shape[0]):
 for _j in range({first}.shape[1]):
  {last}[_j] += body(_i, _j, {names})""",
}
# One column: a single loop, which vectorizes too; its sum stays in a register.
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
    # To where the first array reaches a cache line; from there on, no store of a vector register crosses one.
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
# A body's arguments before the arrays.
INDICES = {"elementwise": 1, "rowwise": 2, "sums": 2, "sums only": 2, "block": 0}


@contextlib.contextmanager
def compile_lock(name: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold this user's lock of a kernel on this machine; it goes with the process, so a killed one leaves none behind.

    name: the kernel's; some share a lock, so that there are no more than 16 files of locks.
    kind: LOCK_EX to compile, alone, or LOCK_SH to load, many at a time.
    """
    user = os.geteuid()
    path = os.path.join(tempfile.gettempdir(), f"hpcdl-compile-{user}-{zlib.crc32(name.encode()) % 16}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a temporary folder that cannot be written: compile without a lock
            lock = os.open(path, LOCK_FLAGS, 0o600)
            stack.callback(os.close, lock)
            about = os.fstat(lock)
            if stat.S_ISREG(about.st_mode) and about.st_uid == user:  # others could keep theirs for ever
                os.fchmod(lock, 0o600)
                fcntl.flock(lock, kind)
        yield


def stamp() -> int:
    """A number that changes with any file of this folder: the flags lie here, and bodies call functions of others."""
    files = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in Path(__file__).parent.glob("*.py")
    )
    return zlib.crc32(repr(files).encode())


STAMP = stamp()


def numba_types(signature: str, dtype: DTypeLike) -> tuple[Any, ...]:
    """The Numba types that a signature names when T is this element type."""
    names = dict(vars(numba.types), T=numba.from_dtype(np.dtype(dtype)))
    return eval(f"({signature},)", {"__builtins__": {}}, names)  # our own text, never a user's


def function(body: Callable) -> Any:
    """Decorator: a scalar function that the bodies of kernels call, on CPU and GPU."""
    return numba.njit(fastmath=FASTMATH, forceinline=True, **OPTIONS)(body)  # a loop with a call does not vectorize


def exact(body: Callable) -> Any:
    """Decorator: a function that kernels call, whose operations stay as they are written: the same bits in each."""
    # Said, not left out: what is left out is taken over from whoever calls it.
    return numba.njit(fastmath=False, forceinline=True, **OPTIONS)(body)


def generate(kind: str, text: str, body: Callable, more: tuple[str, ...] = (), /, **names: Any) -> Callable:
    """The function of body's arguments that runs the loop `text` around it, as if it stood where the body stands.

    more: arguments after those of the body; names: what the names in the text mean. With the file, line and name of the
    body, Numba's cache finds its folder and is renewed when the file changes; STAMP, of the other files, is in the
    cache's key because a closure's values are.
    """
    arguments = list(inspect.signature(body).parameters)[INDICES[kind] :]
    text = text.format(first=arguments[0], last=arguments[-1], names=", ".join(arguments))
    lines = "\n".join(f"  {line}" for line in ["stamp", *text.split("\n")])
    tree = ast.parse(f"def make(stamp):\n def loop({', '.join([*arguments, *more])}):\n{lines}\n return loop")
    (make,) = tree.body
    ast.increment_lineno(tree, body.__code__.co_firstlineno - make.body[0].lineno)  # type: ignore[attr-defined]
    space: dict[str, Any] = {"__name__": body.__module__, **names}
    exec(compile(tree, body.__code__.co_filename, "exec"), space)
    made = space["make"](STAMP)
    made.__name__, made.__qualname__, made.__doc__ = body.__name__, body.__qualname__, body.__doc__
    made.__module__ = body.__module__
    return made


def fitting(arg: Any, wanted: Any) -> Any:
    """The argument as the type that is wanted, where nothing is lost by it: an integer as float64, an array to read."""
    if not isinstance(wanted, numba.types.Array):
        return as_dtype(wanted).type(arg)
    if isinstance(arg, np.ndarray) and not wanted.mutable:
        arg = arg.view()
        arg.flags.writeable = False
    return arg


def narrowing(kind: str, body: Callable, signature: str) -> str:
    """The lines that turn the numbers which the signature calls T from float64, as they are passed, to the type T.

    Numba finds a compiled version fastest when the types are those of the call, and Python's numbers are float64.
    """
    names = list(inspect.signature(body).parameters)[INDICES[kind] :]
    pairs = zip(names, numba_types(signature, "float32"), numba_types(signature, "float64"), strict=True)
    numbers = [name for name, a, b in pairs if a != b and not isinstance(a, numba.types.Array)]
    return "".join(f"{name} = {names[0]}.dtype.type({name})\n" for name in numbers)


KERNELS: list["Kernel"] = []  # all that were made


class Kernel(CPUDispatcher):
    """A body or loop with one compiled version for each element type of its first array, and its CUDA twin.

    As a dispatcher of Numba's it is called as fast as a numpy function. Numba asks `_compile_for_args` when no version
    fits the arguments: there a version is compiled, or the array is found to lie on a GPU.
    """

    def __init__(self, kind: str, body: Callable, signature: str):
        text = narrowing(kind, body, signature) + LOOPS[kind]
        options = {"nopython": True, "boundscheck": None, "fastmath": FASTMATH, **OPTIONS}
        super().__init__(generate(kind, text, body, body=function(body), np=np), targetoptions=options)
        self.enable_caching()
        self.kind, self.body, self.signature = kind, body, signature
        self.compiled: dict[np.dtype, Kernel] = {}
        self.twins: dict[np.dtype, Callable] = {}
        self.launch: Any = None  # a block kernel's CUDA twin ...
        self.launches: list[Any] = []  # ... and the CUDA kernels that it launches
        KERNELS.append(self)

    def __get__(self, instance: Any, owner: Any = None) -> "Kernel":
        return self  # no method, where it is kept in a class

    def types(self, dtype: DTypeLike) -> tuple[Any, ...]:
        """The Numba types of the CPU version's arguments for this element type of the first array."""
        pairs = zip(numba_types(self.signature, dtype), numba_types(self.signature, "float64"), strict=True)
        return tuple(a if isinstance(a, numba.types.Array) else wide for a, wide in pairs)

    def compile(self, dtype: DTypeLike) -> "Kernel":
        """Compile, or load from the cache, the CPU version for this element type; returns the callable."""
        types = self.types(dtype)
        with compile_lock(self.__name__, fcntl.LOCK_SH if self.cached(types) else fcntl.LOCK_EX):
            super().compile(types)
        self.compiled[np.dtype(dtype)] = self
        return self

    def version(self, dtype: DTypeLike) -> Any:
        """The CPU version for this element type, compiled or loaded where it is not; it is called a third faster.

        It looks at no types: arguments are as the signature says, and arrays that it writes to can be written to.
        """
        if np.dtype(dtype) not in self.compiled:
            self.compile(dtype)
        return self.get_overload(self.types(dtype))

    def cached(self, types: tuple[Any, ...]) -> bool:
        """Whether the version for these types is in the cache on disk; Numba's index of it is always whole."""
        key = self._cache._index_key(types, self.targetctx.codegen())
        return key in self._cache._cache_file._load_index()

    def typeof_pyval(self, value: Any) -> Any:
        """Numba's type of an argument: none for an array on a GPU, so that no CPU version fits."""
        if hasattr(value, "__cuda_array_interface__"):
            return numba.types.pyobject
        return super().typeof_pyval(value)

    def _compile_for_args(self, *args: Any) -> Callable:
        """What to call for these arguments, which no version fits."""
        array = args[0]
        if hasattr(array, "__cuda_array_interface__"):
            return self.on_device
        if array.dtype not in self.compiled:
            return self.compile(array.dtype)
        types = self.types(array.dtype)
        fitted = [fitting(arg, wanted) for arg, wanted in zip(args, types, strict=True)]
        if any(numba.typeof(arg) != wanted for arg, wanted in zip(fitted, types, strict=True)):
            found = ", ".join(str(numba.typeof(arg)) for arg in args)
            raise TypeError(f"{self.__name__} takes {', '.join(map(str, types))}, not {found}")
        return lambda *args: self(*fitted)

    def on_device(self, array: Any, *rest: Any) -> Any:
        """Launch the CUDA twin. Of an array that is an outline, without memory, it is nothing that is computed."""
        if hasattr(array, "outlined"):  # hpcdl/planning/meta_arrays.py
            return array.outlined
        try:
            twin = self.twins[array.dtype]
        except KeyError:
            from hpcdl.kernels import gpu  # imports CUDA, which a machine without a GPU does not need

            twin = self.twins[array.dtype] = gpu.twin(self, array.dtype)
        return twin(array, *rest)

    def device(self, *launches: Any) -> Callable[[Callable], "Kernel"]:
        """Decorator: this function, with the same arguments and results, is the CUDA twin; it launches `launches`."""

        def register(launch: Callable) -> Kernel:
            self.launch, self.launches = launch, list(launches)
            return self

        return register


def on_cpu(body: Callable) -> Any:
    """Decorator: a loop for threads of a rank, or for what lies on the host anyway: it has no CUDA twin.

    Its operations stay as they are written, and it needs nothing of the interpreter. `prepare` compiles it.
    """
    return numba.njit(cache=True, **OPTIONS)(generate("block", LOOPS["block"], body, body=exact(body)))


def prepare(loop: Any, *like: Any) -> Any:
    """Compile a loop of `on_cpu`, or load it from the cache, for arguments like these, or of these types of Numba.

    Before any clock runs, for the first call would do it in its time; one process of this machine at a time does.
    """
    with compile_lock(loop.__name__):
        loop.compile(tuple(each if isinstance(each, numba.types.Type) else numba.typeof(each) for each in like))
    return loop


def elementwise(signature: str) -> Callable[[Callable], Kernel]:
    """Decorator: bind body(i, ...) of one element to loops; `signature` names the types of its arguments after i."""
    return lambda body: Kernel("elementwise", body, signature)


def rowwise(signature: str, sums: bool | str = False) -> Callable[[Callable], Kernel]:
    """Decorator: bind body(i, j, ...) of one element of a matrix to loops.

    sums: the body returns a number, and the last argument, one number for each column, gains the sum over the rows;
    "only": the body does nothing else.
    """
    return lambda body: Kernel({False: "rowwise", True: "sums", "only": "sums only"}[sums], body, signature)


def block(signature: str) -> Callable[[Callable], Kernel]:
    """Decorator: compile a whole loop."""
    return lambda body: Kernel("block", body, signature)
