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

BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # what says how many threads, the first of them
OLD = 3600  # seconds after which a file in /dev/shm is taken for left behind
LEFTOVERS = ("mpich_shm_*", "sm_segment.*")  # names that MPICH and Open MPI give


@dataclass
class Facts:
    """What one rank sees; what only `all_facts` looks at has defaults. node: a number that the ranks of one host share.

    cores: those it may use, of `machine` in all; spare: how many of them others leave it, where that is known. blas:
    threads of its matrix products, as `variable` says, if any does. room: free bytes of /dev/shm; left: names and bytes
    of old files there. cache: the compile cache's folder, its file system, and why it cannot be written. clock: seconds
    that the host's clock is ahead of that of rank 0's.
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
    """What costs nothing to find; collective."""
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
    """All that a rank sees; collective."""
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
    """Bytes that may still be written there; None where there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def leftover_files(folder: str, now: float) -> dict[str, int]:
    """Bytes of what MPI libraries left there, by the pattern of its name, where it is older than an hour."""
    found: dict[str, int] = {}
    for pattern in LEFTOVERS:
        for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
            try:
                about = os.stat(path)
            except OSError:  # gone meanwhile
                continue
            if now - about.st_mtime > OLD:
                found[pattern] = found.get(pattern, 0) + 512 * about.st_blocks
    return found


def library_name(text: str) -> str:
    """Name and version of an MPI library, from all that it says of itself."""
    return " ".join(text.strip("\0").split("\n")[0].split(",")[0].replace("Version:", "").split())


def compile_cache(folder: str, mounts: str = "/proc/mounts") -> tuple[str, str, str]:
    """The folder, the type of its file system, and why it cannot be written: nothing where it can."""
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
    """The type of the file system that holds a folder: of the longest mount point above it, the latest if several."""
    longest, kind, folder = "", "", os.path.realpath(folder)
    try:
        with open(mounts) as file:
            lines = [line.split() for line in file]
    except OSError:
        return ""
    for line in lines:
        place = line[1].encode().decode("unicode_escape")  # a space is \040 there
        inside = folder == place or folder.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(longest):
            longest, kind = place, line[2]
    return kind


def visible_gpus() -> tuple[list[str], str]:
    """The addresses of the GPUs that this process may use; or none, and why, where the machine has some."""
    if not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg")):
        return [], ""
    try:
        gpu = open_device("cuda")
    except UsageError as error:
        return [], str(error)
    return [gpu.xp.cuda.Device(i).pci_bus_id for i in range(gpu.xp.cuda.runtime.getDeviceCount())], ""


def clock_lead(comm: MPI.Intracomm) -> float:
    """Seconds that the clock of this rank's host is ahead of that of rank 0; collective.

    Another clock than that of the trace, which counts from the start of a machine: the difference of the two on each
    host, and the offset between the hosts, give it.
    """
    node = ranks_of_node(comm)
    offset = clock_offset(comm, node)
    node.Free()
    mine = time.time_ns() - time.perf_counter_ns()
    return (mine - offset - comm.bcast(mine)) / 1e9
