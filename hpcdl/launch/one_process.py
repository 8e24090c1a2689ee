"""Programs of one process: how they end; under a launcher, its first process works, and the others exit."""

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
    """Context of such a program. UsageError: one line on stderr, status 2. stdout may be closed early, as by head."""
    alone()
    try:
        with reader_may_leave():
            yield
    except (UsageError, LoneError) as error:
        print(f"{program}: error: {line(error)}", file=sys.stderr)
        sys.exit(2)


def alone() -> None:
    """Exit, except in a launcher's first process. Hide the launcher there: MPI would wait for all its processes."""
    started = launch(os.environ, library="")
    if started is None or started.ranks == 1:
        return
    if started.number > 0:
        sys.exit(0)
    if "mpi4py.MPI" not in sys.modules:
        for name in [name for name in os.environ if name.startswith(TIES)]:
            del os.environ[name]
