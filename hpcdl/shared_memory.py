"""Shared memory of the ranks of a node: an unlinked file in /dev/shm that all of them map.

Each rank reserves its own part before any write, so a lack of room gives one warning and a fall-back, whereas an MPI
window of that size would kill the job at the first write. The pages lie in the memory of the core that reserves them,
and are freed with the last array over them. The file is unlinked before the pages are reserved: a killed job leaves at
worst an empty file.
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


def unlink_mpich_files() -> None:
    """Unlink MPICH's files in /dev/shm, after all ranks of the job have mapped them.

    MPICH unlinks them itself only at a regular end; a killed job would leave a MiB for each rank for ever. The mappings
    stay valid, and the library does not open the names again. Open MPI's launcher removes its files; they stay only if
    the launcher is killed, too.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in set(re.findall(rf"({FOLDER}/mpich_shm_\w+)$", maps.read(), re.MULTILINE)):
            with contextlib.suppress(OSError):  # another rank has unlinked it
                os.unlink(path)


class Mapping:
    """A shared mapping of a file that lives as long as a numpy array over it.

    Unlike Python's mmap it keeps no file descriptor: a process has a thousand descriptors, but any number of vectors.
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
    """Return the memory of each rank of a node (zero bytes), `size` for this one; collective over the node.

    None, on all ranks, if there is no room; rank 0 then warns that `what` needs it, and of the fall-back `otherwise`.
    Parts are aligned to pages.
    """
    sizes = node.allgather(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    total, start = sum(sizes), sum(sizes[: node.rank])
    path = node.bcast(os.path.join(FOLDER, f"hpcdl-{uuid.uuid4().hex}") if node.rank == 0 else None)
    file, mapped, problem = -1, None, None
    with contextlib.ExitStack() as files:
        with contextlib.ExitStack() as names:
            for turn in (0, 1):  # rank 0 creates the file, then the others open it
                if turn == min(1, node.rank):
                    try:
                        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if turn == 0 else 0), 0o600)
                        files.callback(os.close, file)
                        if turn == 0:
                            names.callback(os.unlink, path)
                            os.ftruncate(file, max(total, 1))
                    except OSError as error:
                        problem = error.strerror
                problem = first_problem(node, problem)
        node.Barrier()  # the file is unlinked: reserving may take long, and a job may be killed in it
        if problem is None:
            try:
                if sizes[node.rank]:
                    os.posix_fallocate(file, start, sizes[node.rank])
                mapped = Mapping(file, max(total, 1))
            except OSError as error:
                problem = error.strerror
            problem = first_problem(node, problem)
    if problem is not None or mapped is None:
        if node.rank == 0:
            log.warning("%s: %s; %s needs %.1f MB there: %s", FOLDER, problem, what, total / 1e6, otherwise)
        return None
    memory, ends = np.asarray(mapped), np.cumsum(sizes)
    return [memory[end - length : end] for end, length in zip(ends, sizes, strict=True)]


def remove_mapped() -> None:
    """Unlink the shared-memory files that this process has mapped, for a job that ends without MPI_Finalize."""
    with open("/proc/self/maps") as maps:
        names = {line.rstrip("\n").partition(f" {FOLDER}/")[2] for line in maps}
    for name in names - {""}:
        with contextlib.suppress(OSError):  # another rank has unlinked it
            os.unlink(os.path.join(FOLDER, name))


def first_problem(node: Any, problem: str | None) -> str | None:
    """Return the problem of the lowest rank that has one, or None; collective."""
    return next(filter(None, node.allgather(problem)), None)
