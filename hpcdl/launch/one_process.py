"""Programs of one process: of those that a launcher has started one does the work; how they end."""

import contextlib
import os
import sys
from collections.abc import Iterator

from hpcdl.errors import LoneError, UsageError, line
from hpcdl.machine.world import launch
from hpcdl.programs import reader_may_leave

TIES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")  # variables by which an MPI library finds its launcher


@contextlib.contextmanager
def one_process(program: str) -> Iterator[None]:
    """The body is the program: a refusal is one line on stderr and status 2; who reads what it prints may leave."""
    alone()
    try:
        with reader_may_leave():
            yield
    except (UsageError, LoneError) as error:
        print(f"{program}: error: {line(error)}", file=sys.stderr)
        sys.exit(2)


def alone() -> None:
    """Of the processes that a launcher has started, all but the first leave; that one forgets it.

    For if it starts MPI later, as a plan does that rehearses, it would wait for those that have left.
    """
    started = launch(os.environ, library="")
    if started is None or started.ranks == 1:
        return
    if started.number > 0:
        sys.exit(0)
    if "mpi4py.MPI" not in sys.modules:
        for name in [name for name in os.environ if name.startswith(TIES)]:
            del os.environ[name]
