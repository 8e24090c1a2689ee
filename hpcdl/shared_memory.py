"""Shared memory of the ranks of a node: an unlinked file in /dev/shm that all of them map.

Each rank reserves its own part before any write, so a lack of room gives one warning and a fall-back; an MPI window
would kill the job at the first write. The pages lie in the memory of the core that reserves them, and are freed with
the last array over them. The file is unlinked before pages are reserved: a killed job leaves an empty file at most."""

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


def unlink_mapped(names: str = r"mpich_shm_\w+") -> None:
    """Unlink the files in /dev/shm that this process has mapped and whose names match `names`; the mappings stay valid.
    MPICH unlinks its files (mpich_shm_...) only at a regular end; a killed job would leave a MiB for each rank. So call
    this when all ranks of the job have mapped the files, which MPICH does not open again. A job that is to end without
    MPI_Finalize calls it for all names. Open MPI's launcher removes its files, unless the launcher is killed, too."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in set(re.findall(rf" ({FOLDER}/{names})$", maps.read(), re.MULTILINE)):
            with contextlib.suppress(OSError):  # another rank has unlinked it
                os.unlink(path)


class Mapping:
    """A shared mapping of a file. The mapping lives as long as a numpy array over it.
    It keeps no file descriptor, unlike Python's mmap; a process has only a thousand descriptors."""

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
    """Return an array of zero bytes for each rank of a node, of at least that rank's `size`; collective over `node`.
    Without room: None on all ranks; rank 0 warns that `what` needs room, and names the fall-back, `otherwise`."""
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


def first_problem(node: Any, problem: str | None) -> str | None:
    """Return the problem of the lowest rank that has one, or None; collective."""
    return next(filter(None, node.allgather(problem)), None)
