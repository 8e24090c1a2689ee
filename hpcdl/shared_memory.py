"""Memory that the ranks of a node share: a file in /dev/shm that all of them map and that has no name any more.

Each rank reserves its own part before anybody writes to it, so too little room is one warning and something to fall
back on, where an MPI window of that size would kill the job at the first write. The pages lie near the core that
reserves them and go when the last array over them goes. The name is gone before they are reserved: a killed job leaves
nothing behind, or at worst an empty file.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import re
import uuid
from typing import Any

import numpy as np

log = logging.getLogger("hpcdl")
FOLDER = "/dev/shm"


libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def unname() -> None:
    """Take away the names that MPICH's files in /dev/shm still have, once all ranks of the job have mapped them.

    It does so itself when a job ends in good order; of one that is killed, a MiB for each rank would stay for ever.
    What is mapped stays mapped, and the library asks for these names no more. Open MPI's launcher cleans up after it;
    where that is killed, too, Open MPI's files stay.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in set(re.findall(rf"({FOLDER}/mpich_shm_\w+)$", maps.read(), re.MULTILINE)):
            with contextlib.suppress(OSError):  # another rank has done it
                os.unlink(path)


class Mapping:
    """A file in memory, shared with other processes, for as long as an array over it lives; numpy makes one of it.

    Unlike Python's own it keeps no descriptor of the file: a process has a thousand of those, and vectors without end.
    """

    def __init__(self, file: int, size: int):
        self.size = size
        self.address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        if self.address == ctypes.c_void_p(-1).value:
            number, self.address = ctypes.get_errno(), None
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (self.address, False)}

    def __del__(self) -> None:
        if self.address is not None:
            libc.munmap(self.address, self.size)


def share(node: Any, size: int, what: str, otherwise: str) -> list[np.ndarray] | None:
    """Collective over the ranks of a node: the memory of each rank (bytes, zero), of which it asks for `size` itself.

    None, on all ranks, where there is no room; rank 0 then warns that `what` needs it and what is done `otherwise`.
    Parts begin at whole pages.
    """
    sizes = node.allgather(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    total, start = sum(sizes), sum(sizes[: node.rank])
    path = node.bcast(os.path.join(FOLDER, f"hpcdl-{uuid.uuid4().hex}") if node.rank == 0 else None)
    file, mapped, problem = -1, None, None
    with contextlib.ExitStack() as files:
        with contextlib.ExitStack() as names:
            for turn in (0, 1):  # rank 0 makes the file, then the others open it
                if turn == min(1, node.rank):
                    try:
                        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if turn == 0 else 0), 0o600)
                        files.callback(os.close, file)
                        if turn == 0:
                            names.callback(os.unlink, path)
                            os.ftruncate(file, max(total, 1))
                    except OSError as error:
                        problem = error.strerror
                problem = first(node, problem)
        node.Barrier()  # the name is gone: to reserve much takes long, and a job may be killed for it
        if problem is None:
            try:
                if sizes[node.rank]:
                    os.posix_fallocate(file, start, sizes[node.rank])
                mapped = Mapping(file, max(total, 1))
            except OSError as error:
                problem = error.strerror
            problem = first(node, problem)
    if problem is not None or mapped is None:
        if node.rank == 0:
            log.warning("%s: %s; %s needs %.1f MB there: %s", FOLDER, problem, what, total / 1e6, otherwise)
        return None
    memory, ends = np.asarray(mapped), np.cumsum(sizes)
    return [memory[end - length : end] for end, length in zip(ends, sizes, strict=True)]


def remove_mapped() -> None:
    """Remove the files of shared memory that this process has mapped: for the end of a job that cannot finalize MPI."""
    with open("/proc/self/maps") as maps:
        names = {line.rstrip("\n").partition(f" {FOLDER}/")[2] for line in maps}
    for name in names - {""}:
        with contextlib.suppress(OSError):  # another rank was first
            os.unlink(os.path.join(FOLDER, name))


def first(node: Any, problem: str | None) -> str | None:
    """Collective: the problem of the lowest rank that has one."""
    return next(filter(None, node.allgather(problem)), None)
