"""--respawn: as many ranks as are lost are started anew, in the job, and take their state from the survivors.

    survivors             shrink ---> spawn ----------------------> merge ---> hand the state over, and go on
    a new rank            its program begins, reads its options --> merge ---> takes the others' state

A new rank runs the same command line in a world of its own, and comes last in the merged world. The launcher takes it
for another job; what happens when a new rank is lost, too, depends on the launcher (docs/runs.md). (MPI_Comm_spawn:
MPI: A Message-Passing Interface Standard, version 4.1, 2023, chapter 11)"""

import contextlib
import ctypes
import logging
import os
import sys
from typing import Any

from mpi4py import MPI

from hpcdl.formatting import counted

log = logging.getLogger("hpcdl")
MOST = 8  # largest number of PMIx_Init calls that are undone
mixed: list[MPI.Intracomm] = []  # worlds with new ranks that this process has been in


def is_new() -> bool:
    """True if this process was started by ranks that have lost a rank, to replace it."""
    return MPI.Comm.Get_parent() != MPI.COMM_NULL


def joined() -> MPI.Intracomm:
    """Return the world of this new rank and the ranks that have started it; collective over that world."""
    mixed.append(MPI.Comm.Get_parent().Merge(high=True))
    return mixed[-1]


def brought_back(left: MPI.Intracomm, number: int) -> MPI.Intracomm:
    """Start `number` ranks anew. Return the world of the survivors, `left`, and the new ranks, which come last; `left`
    alone if the launcher starts none. Collective over the survivors."""
    how = MPI.Info.Create({"wdir": os.getcwd()})
    try:
        between: Any = left.Spawn(sys.executable, sys.orig_argv[1:], number, how)
    except MPI.Exception as error:
        log.warning("no lost rank is replaced: %s", error)
        return left
    finally:
        how.Free()
    mixed.append(between.Merge(high=False))
    log.info("%s started anew", counted(number, "rank"))
    left.Free()
    return mixed[-1]


def tell_the_launcher() -> None:
    """Tell the launcher that this process ends normally; MPI_Finalize would, but waits for lost ranks."""
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
