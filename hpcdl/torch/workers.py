"""Worker processes of a rank that call a function for it: they make examples while the rank trains.

A process that has started MPI must not be forked, since its child would share connections with it. So workers are
spawned, know nothing of the launcher, and receive the function pickled; a worker that imports MPI is a world of its
own. Workers import the program's file only if the function is defined there; such a file has to protect its main part
by `if __name__ == "__main__":`.

A worker ends when its rank has ended, in whatever way.
"""

import contextlib
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import Any

from hpcdl.errors import UsageError, reason


class Workers:
    """`workers.all(arguments)`: function(*each) for each of the arguments, by `count` processes, in their order."""

    def __init__(self, function: Callable, count: int):
        self.count = count
        self.pool: ProcessPoolExecutor | None = None
        try:
            self.pickled = pickle.dumps(function)
        except Exception as error:  # a member's own __reduce__ may raise anything
            raise UsageError(f"workers={count}: the data set cannot be pickled ({reason(error)}); workers=0") from None

    def all(self, arguments: Iterable[tuple]) -> list[Any]:
        """Return the results; UsageError, one line, if the function raises, or a process has died."""
        try:
            if self.pool is None:
                self.pool = self._started()
            results = list(self.pool.map(_call, arguments))
        except BrokenProcessPool:
            self.pool = None
            hint = 'a program that starts workers keeps what it does under `if __name__ == "__main__":`'
            raise UsageError(f"a worker process has ended by itself; {hint}") from None
        for _, problem in results:
            if problem is not None:
                raise UsageError(problem)
        return [result for result, _ in results]

    def _started(self) -> ProcessPoolExecutor:
        """Return the pool with all of its processes running."""
        pool = ProcessPoolExecutor(self.count, get_context("spawn"), _begin, (self.pickled,))
        with _surroundings(main=b"__main__" in self.pickled):
            for each in [pool.submit(_nothing) for _ in range(self.count)]:
                each.result()
        return pool

    def close(self) -> None:
        """Stop the processes."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None


@contextlib.contextmanager
def _surroundings(main: bool) -> Iterator[None]:
    """Context with the environment for processes that are spawned inside. main: they import the program's file."""
    from hpcdl.comm.launcher import clean_environment  # not above: it starts MPI, which workers do not need

    before, program = dict(os.environ), sys.modules["__main__"]
    replace_contents(os.environ, clean_environment() | {"OMP_NUM_THREADS": "1"})
    if not main:
        sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocessing would import its file
    try:
        yield
    finally:
        sys.modules["__main__"] = program
        replace_contents(os.environ, before)


def replace_contents(one: MutableMapping[str, str], other: dict[str, str]) -> None:
    """Make the mapping `one` equal to `other`."""
    for name in one.keys() - other.keys():
        del one[name]
    one.update(other)


# -- in a worker

function: Any = None
missing = ""  # why the function is missing


def _begin(pickled: bytes) -> None:
    """Initialize a worker: unpickle the function, and end with the rank."""
    global function, missing
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    try:
        function = pickle.loads(pickled)
    except Exception as error:
        missing = f"a worker process cannot make the data set anew: {type(error).__name__}: {reason(error)}"
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)


def _end_with(parent: Any) -> None:
    connection.wait([parent.sentinel])
    os._exit(1)


def _nothing() -> None:
    pass


def _call(arguments: tuple) -> tuple[Any, str | None]:
    """Return the function's result, or an error message."""
    if missing:
        return None, missing
    try:
        return function(*arguments), None
    except UsageError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {reason(error)}"
