"""How a loop written in plain Python becomes compiled code: one place for the flags, the cache and its lock.

    @cpu("T[::1], T[::1]")
    def add_into(into, values): ...

gives a kernel that compiles itself for the element type of its first array (float32, float64, int64, ...) when it is
first called with it, T standing for that type. Compiled code is cached on disk beside the module (or in
NUMBA_CACHE_DIR). Numba's cache is not safe when processes compile different types of one function at once (both pick
the same file number), and N cold ranks would all compile the same thing; so compiling happens under a lock on the
machine: one process compiles, the others then load.
"""

import contextlib
import fcntl
import os
import tempfile

import numba
import numpy as np

# error_model="numpy": a division that could raise keeps LLVM from vectorizing. The flags leave out nnan and ninf, with
# which the compiler may delete every check for a value that is not finite.
OPTIONS = {"error_model": "numpy", "nogil": True, "cache": True}
FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}


@contextlib.contextmanager
def compile_lock():
    """Hold this user's lock on this machine; the lock goes with the process, so a killed one leaves none behind."""
    path = os.path.join(tempfile.gettempdir(), f"hpcdl-compile-{os.getuid()}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a temporary folder that cannot be written: compile without a lock
            file = stack.enter_context(open(path, "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Kernel:
    """A loop with one compiled version for each element type of its first array."""

    def __init__(self, function, signature: str):
        self.function, self.signature = function, signature
        self.__doc__, self.__name__, self.__module__ = function.__doc__, function.__name__, function.__module__
        self.compiled = {}
        self.dispatcher = numba.njit(fastmath=FASTMATH, **OPTIONS)(function)

    def __call__(self, array, *rest):
        try:
            compiled = self.compiled[array.dtype]
        except KeyError:
            compiled = self.compile(array.dtype)
        return compiled(array, *rest)

    def compile(self, dtype):
        """Compile, or load from the cache, the version for this element type; returns the callable."""
        names = dict(vars(numba.types), T=numba.from_dtype(np.dtype(dtype)))
        arguments = eval(f"({self.signature},)", {"__builtins__": {}}, names)  # our own text, never a user's
        with compile_lock():
            self.dispatcher.disable_compile(False)
            self.dispatcher.compile(arguments)
            self.dispatcher.disable_compile()  # what does not fit is an error, not another version behind our back
        self.compiled[np.dtype(dtype)] = self.dispatcher
        return self.dispatcher


def cpu(signature: str):
    """Decorator: bind a loop to compiled CPU code; `signature` names its arguments' Numba types, T the element type."""
    return lambda function: Kernel(function, signature)
