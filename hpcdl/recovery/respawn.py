"""--respawn: as many ranks as are gone are started anew, in the job, and take their state from those that are left.

    those that are left   shrink ---> spawn ----------------------> merge ---> hand the state over, and go on
    a new rank            its program begins, reads its options --> merge ---> takes what the others have

A new rank is the same command line once more, in a world of its own beside that of its job: it comes last in the world
that both make. The launcher takes it for another job: what is to become of that when it loses a rank, too, cannot be
said here (docs/runs.md).

MPI_Comm_spawn: MPI: A Message-Passing Interface Standard, version 4.1, 2023, chapter 11.
"""

import contextlib
import ctypes
import logging
import os
import sys
from typing import Any

from mpi4py import MPI

from hpcdl.formatting import counted

log = logging.getLogger("hpcdl")
MOST = 8  # times that a process has told its launcher that it begins
mixed: list[MPI.Intracomm] = []  # worlds of ranks of several starts, that this process has been in


def is_new() -> bool:
    """Whether this process was started by ranks that have lost one."""
    return MPI.Comm.Get_parent() != MPI.COMM_NULL


def joined() -> MPI.Intracomm:
    """The world that this new rank makes with those that have started it; collective over both."""
    mixed.append(MPI.Comm.Get_parent().Merge(high=True))
    return mixed[-1]


def brought_back(left: MPI.Intracomm, number: int) -> MPI.Intracomm:
    """Start so many ranks anew: a world of those that are left and these, which come last.

    Collective over those that are left. Where the launcher starts none the world is theirs alone.
    """
    how = MPI.Info.Create({"wdir": os.getcwd()})
    try:
        between: Any = left.Spawn(sys.executable, sys.orig_argv[1:], number, how)
    except MPI.Exception as error:
        log.warning("no rank is brought back: %s", error)
        return left
    finally:
        how.Free()
    mixed.append(between.Merge(high=False))
    log.info("%s brought back", counted(number, "rank"))
    left.Free()
    return mixed[-1]


def tell_the_launcher() -> None:
    """That this process ends as it should: MPI_Finalize would, but waits for ranks that are gone."""
    if not mixed:
        return
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "libpmix.so" in line}
        for path in sorted(paths)[:1]:
            library = ctypes.CDLL(path)
            for _ in range(MOST):
                if not library.PMIx_Initialized():
                    break
                library.PMIx_Finalize(None, ctypes.c_size_t(0))
