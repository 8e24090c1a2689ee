"""Worker processes of a rank that call a function for it: they make examples while the rank trains.

A process that has started MPI must not be forked, since its child would share connections with it. So workers are
spawned, know nothing of the launcher, and receive the function pickled; a worker that imports MPI is a world of its
own. Workers import the program's file only if the function is defined there; such a file has to protect its main part
by `if __name__ == "__main__":`. A worker ends when its rank has ended, in any way."""

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

from hpcdl.errors import UsageError, blamed_on, reason
from hpcdl.machine.launcher import clean_environment


class Workers:
    """`count` processes that call a function. Raises UsageError if the function cannot be pickled."""

    def __init__(self, function: Callable, count: int):
        self.count = count
        self.pool: ProcessPoolExecutor | None = None
        with blamed_on(f"workers={count} cannot pickle the data set; take workers=0, or correct the error"):
            self.pickled = pickle.dumps(function)

    def all(self, arguments: Iterable[tuple]) -> list[Any]:
        """Return function(*each) for each of the arguments, in order. UsageError if a call raises, or a worker died."""
        try:
            if self.pool is None:
                self.pool = self._started()
            results = list(self.pool.map(_call, arguments))
        except BrokenProcessPool:
            self.pool = None
            hint = 'put the main part of the program under `if __name__ == "__main__":`'
            raise UsageError(f"a worker process has ended by itself; {hint}") from None
        for _, problem in results:
            if problem is not None:
                raise UsageError(problem)
        return [result for result, _ in results]

    def _started(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(self.count, get_context("spawn"), _begin, (self.pickled,))
        with _surroundings(main=b"__main__" in self.pickled):
            for each in [pool.submit(os.getpid) for _ in range(self.count)]:
                each.result()
        return pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None


@contextlib.contextmanager
def _surroundings(main: bool) -> Iterator[None]:
    """Context that gives processes spawned in it their environment. main: True if they import the program's file."""
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
    """Initialize a worker: unpickle the function; start a thread that ends the worker when its rank ends."""
    global function, missing
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    try:
        function = pickle.loads(pickled)
    except Exception as error:
        missing = f"a worker process cannot unpickle the data set: {type(error).__name__}: {reason(error)}"
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)


def _end_with(parent: Any) -> None:
    connection.wait([parent.sentinel])
    os._exit(1)


def _call(arguments: tuple) -> tuple[Any, str | None]:
    if missing:
        return None, missing
    try:
        return function(*arguments), None
    except UsageError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {reason(error)}"
