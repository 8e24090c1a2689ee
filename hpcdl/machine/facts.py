"""Facts about a rank's environment: host, cores, threads, /dev/shm, versions, compile cache, GPUs, clock."""

import contextlib
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
from hpcdl.machine.file_systems import file_system
from hpcdl.machine.load import load
from hpcdl.machine.threads import Threads
from hpcdl.machine.versions import versions

OLD = 3600  # seconds after which a file in /dev/shm counts as left over
LEFTOVERS = ("mpich_shm_*", "sm_segment.*")  # file names of MPICH and Open MPI


@dataclass
class Facts:
    """The facts of one rank; `leftovers` and later: by `all_facts` only. node: equal for ranks of a host. cores: usable
    ones of `machine` cores. spare: cores that other processes leave; None: unknown. blas: threads of matrix products.
    variable: environment variable that sets blas, or "". room: free bytes of /dev/shm; None: missing. leftovers: bytes
    of old files there. cache: compile cache's folder, file system, problem. clock: seconds ahead of rank 0's."""

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
    """Return the facts that every training run collects, which cost a few messages; collective."""
    node = ranks_of_node(comm)
    first = node.bcast(comm.rank)
    node.Free()
    cores = sorted(os.sched_getaffinity(0))
    machine = os.cpu_count() or len(cores)
    host, room = MPI.Get_processor_name(), free(shared_memory.FOLDER)
    blas = Threads(comm)
    spare = load.available(blas.share.ranks)
    return Facts(comm.rank, first, host, cores, machine, blas.now, blas.share.fixed, room, spare)


def all_facts(comm: MPI.Intracomm) -> Facts:
    """Return all facts, for `hpcdl doctor`; opens files and libraries; collective."""
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
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return None


def leftover_files(folder: str, now: float) -> dict[str, int]:
    """Return the bytes of MPI files in the folder that are older than an hour, by name pattern."""
    found: dict[str, int] = {}
    for pattern in LEFTOVERS:
        for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
            with contextlib.suppress(OSError):  # deleted meanwhile
                about = os.stat(path)
                if now - about.st_mtime > OLD:
                    found[pattern] = found.get(pattern, 0) + 512 * about.st_blocks
    return found


def library_name(text: str) -> str:
    """Return name and version of an MPI library from its version text."""
    return " ".join(text.strip("\0").split("\n")[0].split(",")[0].replace("Version:", "").split())


def compile_cache(folder: str, mounts: str = "/proc/mounts") -> tuple[str, str, str]:
    """Return the folder, its file system's type, and its problem: not writable, or not in NUMBA_CACHE_DIR; else ""."""
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


def visible_gpus() -> tuple[list[str], str]:
    """Return (PCI addresses of usable GPUs, why no GPU of this machine is usable). "": one is, or there is no GPU."""
    if not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg")):
        return [], ""
    try:
        gpu = open_device("cuda")
    except UsageError as error:
        return [], str(error)
    return [gpu.xp.cuda.Device(i).pci_bus_id for i in range(gpu.xp.cuda.runtime.getDeviceCount())], ""


def clock_lead(comm: MPI.Intracomm) -> float:
    """Return the seconds that this host's clock is ahead of rank 0's; collective. It is d - (d of rank 0) - (offset of
    the monotonic clocks), with d = time of day - monotonic clock."""
    node = ranks_of_node(comm)
    offset = clock_offset(comm, node)
    node.Free()
    mine = time.time_ns() - time.perf_counter_ns()
    return (mine - offset - comm.bcast(mine)) / 1e9
