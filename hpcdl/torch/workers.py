"""Processes beside a rank that call a function for it: what makes examples while the rank trains.

A process that has started MPI cannot be forked: its child would share connections with it. So workers are started anew
(spawn), know nothing of the launcher, and get the function pickled; one that imports MPI is a world of its own. The
program's file is imported in them only where what is pickled is defined there; that file then has to keep what it does
under `if __name__ == "__main__":`.

A worker ends when its rank has ended, however that has.
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
        except Exception as error:  # whatever a member's own __reduce__ raises
            raise UsageError(f"workers={count}: the data set cannot be pickled ({reason(error)}); workers=0") from None

    def all(self, arguments: Iterable[tuple]) -> list[Any]:
        """The results; UsageError, one line, of what the function raises, or where a process has gone."""
        try:
            if self.pool is None:
                self.pool = self._started()
            found = list(self.pool.map(_call, arguments))
        except BrokenProcessPool:
            self.pool = None
            hint = 'a program that starts workers keeps what it does under `if __name__ == "__main__":`'
            raise UsageError(f"a worker process has ended by itself; {hint}") from None
        for _, problem in found:
            if problem is not None:
                raise UsageError(problem)
        return [result for result, _ in found]

    def _started(self) -> ProcessPoolExecutor:
        """The processes, all of which are up."""
        pool = ProcessPoolExecutor(self.count, get_context("spawn"), _begin, (self.pickled,))
        with _surroundings(main=b"__main__" in self.pickled):
            for each in [pool.submit(_nothing) for _ in range(self.count)]:
                each.result()
        return pool

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None


@contextlib.contextmanager
def _surroundings(main: bool) -> Iterator[None]:
    """As processes are to find it that are started inside. main: they import the program's file."""
    from hpcdl.comm.launcher import clean_environment  # not above: it starts MPI, which workers do not need

    before, program = dict(os.environ), sys.modules["__main__"]
    become(os.environ, clean_environment() | {"OMP_NUM_THREADS": "1"})
    if not main:
        sys.modules["__main__"] = types.ModuleType("__main__")  # by whose file multiprocessing would find it
    try:
        yield
    finally:
        sys.modules["__main__"] = program
        become(os.environ, before)


def become(one: MutableMapping[str, str], other: dict[str, str]) -> None:
    """Let one hold what the other holds."""
    for name in one.keys() - other.keys():
        del one[name]
    one.update(other)


# -- in a worker

function: Any = None
missing = ""  # why there is none


def _begin(pickled: bytes) -> None:
    """A worker has begun: it has the function, and ends with its rank."""
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
    """The function's result, or what went wrong, in a line."""
    if missing:
        return None, missing
    try:
        return function(*arguments), None
    except UsageError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {reason(error)}"
