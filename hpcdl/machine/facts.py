"""Facts about a rank's environment: host, cores, threads, /dev/shm, versions, compile cache, GPUs, clock.

`quick_facts` costs a few messages, in every training run; `all_facts` opens files and libraries, for `hpcdl doctor`.
The facts of all ranks are judged together (doctor.py).
"""

import glob
import os
import time
from dataclasses import dataclass, field

import numba
from mpi4py import MPI
from threadpoolctl import threadpool_info

from hpcdl import shared_memory
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.comm.staging import is_cuda_aware
from hpcdl.comm.trace import clock_offset
from hpcdl.errors import UsageError
from hpcdl.kernels.device import open_device
from hpcdl.kernels.shared import all_reduce
from hpcdl.machine.load import load
from hpcdl.machine.threads import Threads
from hpcdl.machine.versions import versions

BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # thread counts; the first one set counts
OLD = 3600  # seconds after which a file in /dev/shm counts as left over
LEFTOVERS = ("mpich_shm_*", "sm_segment.*")  # file names of MPICH and Open MPI


@dataclass
class Facts:
    """The facts of one rank; fields that only `all_facts` fills have defaults. node: equal for the ranks of a host.

    cores: those it may use, of `machine` in all; spare: how many of them other processes leave, if known. blas: threads
    of matrix products, set by `variable`, if any. room: free bytes of /dev/shm; leftovers: bytes of old files there, by
    pattern. cache: the compile cache's folder, its file system, and why it is not writable. clock: seconds that the
    host's clock is ahead of rank 0's.
    """

    rank: int
    node: int
    host: str
    cores: list[int]
    machine: int
    blas: int
    variable: str
    room: int | None
    spare: float | None = None
    leftovers: dict[str, int] = field(default_factory=dict)
    library: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    pools: str = ""
    cache: tuple[str, str, str] = ("", "", "")
    gpus: list[str] = field(default_factory=list)
    no_gpu: str = ""
    cuda_aware: bool = False
    clock: float = 0.0


def quick_facts(comm: MPI.Intracomm) -> Facts:
    """Return the facts that cost almost nothing; collective."""
    node = ranks_of_node(comm)
    first = node.bcast(comm.rank)
    node.Free()
    variable = next((name for name in BLAS if os.environ.get(name, "").isdecimal()), "")
    cores = sorted(os.sched_getaffinity(0))
    machine = os.cpu_count() or len(cores)
    host, room = MPI.Get_processor_name(), free(shared_memory.FOLDER)
    blas = Threads(comm)
    return Facts(comm.rank, first, host, cores, machine, blas.now, variable, room, load.available(blas.share.ranks))


def all_facts(comm: MPI.Intracomm) -> Facts:
    """Return all facts; collective."""
    facts = quick_facts(comm)
    facts.leftovers = leftover_files(shared_memory.FOLDER, time.time())
    facts.library = library_name(MPI.Get_library_version())
    facts.versions = versions()
    pools = sorted({f"{pool['internal_api']} {pool['num_threads']}" for pool in threadpool_info()})
    facts.pools = ", ".join([*pools, f"Numba {numba.config.NUMBA_NUM_THREADS}"])
    facts.cache = compile_cache(all_reduce._cache.cache_path)
    facts.gpus, facts.no_gpu = visible_gpus()
    facts.cuda_aware = bool(facts.gpus) and is_cuda_aware()
    facts.clock = clock_lead(comm)
    return facts


def free(folder: str) -> int | None:
    """Return the free bytes of the folder's file system; None if the folder does not exist."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def leftover_files(folder: str, now: float) -> dict[str, int]:
    """Return the bytes of MPI files in the folder that are older than an hour, by name pattern."""
    found: dict[str, int] = {}
    for pattern in LEFTOVERS:
        for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
            try:
                about = os.stat(path)
            except OSError:  # deleted meanwhile
                continue
            if now - about.st_mtime > OLD:
                found[pattern] = found.get(pattern, 0) + 512 * about.st_blocks
    return found


def library_name(text: str) -> str:
    """Return name and version of an MPI library from its version text."""
    return " ".join(text.strip("\0").split("\n")[0].split(",")[0].replace("Version:", "").split())


def compile_cache(folder: str, mounts: str = "/proc/mounts") -> tuple[str, str, str]:
    """Return the folder, its file system's type, and why it is not writable (empty if it is)."""
    problem, asked = "", os.environ.get("NUMBA_CACHE_DIR", "")
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, f".hpcdl-{os.getpid()}")
        with open(probe, "w"):
            os.unlink(probe)
    except OSError as error:
        problem = error.strerror or "no reason given"
    if asked and not os.path.realpath(folder).startswith(os.path.realpath(asked) + os.sep):
        problem = problem or f"NUMBA_CACHE_DIR={asked} cannot be used"
    return folder, file_system(folder, mounts), problem


def file_system(folder: str, mounts: str = "/proc/mounts") -> str:
    """Return the type of a folder's file system: of the longest mount point above it, the latest of equals."""
    longest, kind, folder = "", "", os.path.realpath(folder)
    try:
        with open(mounts) as file:
            lines = [line.split() for line in file]
    except OSError:
        return ""
    for line in lines:
        place = line[1].encode().decode("unicode_escape")  # a space is escaped as \040
        inside = folder == place or folder.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(longest):
            longest, kind = place, line[2]
    return kind


def visible_gpus() -> tuple[list[str], str]:
    """Return the addresses of usable GPUs, or none and the reason, if the machine has GPUs."""
    if not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg")):
        return [], ""
    try:
        gpu = open_device("cuda")
    except UsageError as error:
        return [], str(error)
    return [gpu.xp.cuda.Device(i).pci_bus_id for i in range(gpu.xp.cuda.runtime.getDeviceCount())], ""


def clock_lead(comm: MPI.Intracomm) -> float:
    """Return the seconds that this host's clock is ahead of rank 0's; collective.

    It is computed from the trace's monotonic clock: its difference to the time of day on each host, and its offset
    between the hosts.
    """
    node = ranks_of_node(comm)
    offset = clock_offset(comm, node)
    node.Free()
    mine = time.time_ns() - time.perf_counter_ns()
    return (mine - offset - comm.bcast(mine)) / 1e9
