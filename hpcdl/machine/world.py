"""World check: does MPI's world contain all processes of the launcher?

    started by                              how many                  which one
    mpiexec of Open MPI                     OMPI_COMM_WORLD_SIZE      OMPI_COMM_WORLD_RANK
    mpiexec of MPICH, srun --mpi=pmi2       PMI_SIZE                  PMI_RANK
    srun                                    SLURM_STEP_NUM_TASKS      SLURM_PROCID
    mpiexec of MPICH, with -pmi-port        MPI_LOCALNRANKS (here)    PMI_ID

A library contacts its launcher by PMI (MPICH and its derivatives) or PMIx (Open MPI). If the launcher offers the other
protocol, or none, the library assumes a process started alone: N processes become N worlds of one rank, which all do
all the work. The library's own variables have precedence: an mpiexec inside a Slurm step starts its own number of
processes. A batch script has SLURM_NTASKS, too, but no step number. (Balaji et al., "PMI: a scalable parallel
process-management interface", 2010; Castain et al., "PMIx: process management for exascale environments", 2017)"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcdl import shared_memory
from hpcdl.errors import AgreedError

if TYPE_CHECKING:
    from mpi4py import MPI  # its import would start MPI

OPEN_MPI = "Open MPI"
FLAVOURS = {OPEN_MPI: "pmix", "MPICH": "pmi2", "Intel MPI": "pmi2", "MVAPICH": "pmi2", "Cray MPICH": "cray_shasta"}
MPICH_ROOM = 1_062_000  # bytes of /dev/shm that it needs for each rank (measured with 5.0.2)
ENLARGE = "in a container: docker run --shm-size=8g; else delete old files there, or mount -o remount,size=8g /dev/shm"
GET_MPI = "pip install 'hpcdl[mpi]', or load the site's MPI module, or set MPI4PY_LIBMPI to the library's file"
NETWORK = "MPIR_CVAR_CH4_NETMOD"  # MPICH's variable for its network library: ucx or ofi
PATIENCE = 2.0  # seconds: Open MPI's mpiexec kills all when one exits, and the reporting one may be late
SPECIAL = 0xFFFFFFF0  # least of the step numbers that Slurm gives batch scripts and interactive shells, without srun


class Launch(NamedTuple):
    """Launch of this process, number `number` of `ranks`. by: mpiexec or srun. variable: the one read for `ranks`."""

    by: str
    ranks: int
    number: int
    variable: str


def launch(environ: Mapping[str, str], library: str) -> Launch | None:
    """Return the launch of this process; None if it was started alone. library: its MPI library."""
    mpiexecs = [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")]
    said = mpiexecs if library == OPEN_MPI else mpiexecs[::-1]
    if in_step(environ):
        said += [("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("SLURM_NTASKS", "SLURM_PROCID")]
    for size, number in [*said, ("MPI_LOCALNRANKS", "PMI_ID")]:
        ranks, which = environ.get(size, ""), environ.get(number, "0")
        if ranks.isdecimal():
            srun = in_step(environ) and (size.startswith("SLURM") or "PMI_JOBID" in environ)
            return Launch("srun" if srun else "mpiexec", int(ranks), int(which) if which.isdecimal() else 0, size)
    return None


def in_step(environ: Mapping[str, str]) -> bool:
    """True if a user's srun has started this process, not an srun by which mpiexec reaches other hosts."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < SPECIAL and "SLURM_EXTERNAL_LAUNCHER" not in environ


def library() -> str:
    """Return the MPI library of this Python: MPICH, Open MPI, Intel MPI, ... ; starts MPI."""
    from mpi4py import MPI  # imported here: the import starts MPI

    return "Cray MPICH" if "CRAY" in MPI.Get_library_version().upper() else MPI.get_vendor()[0]


def split_world(size: int, environ: Mapping[str, str], library: str) -> tuple[str, str, int] | None:
    """Return (problem, advice, number of this process) if it is one of several worlds of one rank; else None."""
    found = launch(environ, library)
    if size > 1 or found is None or found.ranks == 1:
        return None
    offered = "PMIx" if "PMIX_RANK" in environ else "PMI" if "PMI_RANK" in environ else "no PMI"
    said = f"{found.by} has started {found.ranks} processes ({found.variable}) and offers {offered}"
    what = f"{said}: {library} finds no other process, and each process is a world of its own"
    return what, launch_advice(library, environ, found.by), found.number


def launch_advice(library: str, environ: Mapping[str, str], by: str = "") -> str:
    """Return advice on starting several ranks of this library here, first with the launcher `by` that was used."""
    own = (path for path, other in mpiexecs() if other and compatible(library, other))
    ways = [next(own, f"the mpiexec of {library}")]
    if "SLURM_JOB_ID" in environ or shutil.which("srun"):
        srun = f"srun --mpi={FLAVOURS.get(library, 'NAME')}" + " (srun --mpi=list)" * (library not in FLAVOURS)
        ways.insert(by == "mpiexec", srun)
    return f"start with {' or with '.join(ways)}"


def alone_in_allocation(size: int, environ: Mapping[str, str], library: str) -> tuple[str, str] | None:
    """Return note and advice if no launcher has started this process in an allocation for several tasks; else None."""
    tasks = environ.get("SLURM_NTASKS", "")
    if size > 1 or launch(environ, library) is not None or "SLURM_JOB_ID" not in environ:
        return None
    if "SLURM_EXTERNAL_LAUNCHER" in environ or not tasks.isdecimal() or int(tasks) < 2:
        return None
    return f"1 rank, started alone in a Slurm allocation of {tasks} tasks", launch_advice(library, environ)


def mpiexecs() -> list[tuple[str, str | None]]:
    """Return (path, library) of the mpiexec on the PATH, then of the one beside Python; library: None if unknown."""
    beside = str(Path(sys.executable).with_name("mpiexec"))
    paths = [path for path in (shutil.which("mpiexec"), beside) if path and os.access(path, os.X_OK)]
    return [(path, library_of(path)) for path in dict.fromkeys(paths)]


def library_of(mpiexec: str) -> str | None:
    """Return the library of an mpiexec by its own output; None if unknown."""
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout + done.stderr
    words = {"Intel(R) MPI": "Intel MPI", "MVAPICH": "MVAPICH", "HYDRA": "MPICH"}
    words |= dict.fromkeys(("Open MPI", "OpenRTE", "PRRTE", "prterun"), OPEN_MPI)
    return next((library for word, library in words.items() if word in text), None)


def compatible(library: str, other: str | None) -> bool:
    """True if launchers of `other` start programs of `library`, or may (None): all but Open MPI derive from MPICH."""
    return other is None or (library == OPEN_MPI) == (other == OPEN_MPI)


def start(status: int = 2) -> None:
    """Start MPI with clear errors; call it before importing mpi4py.MPI, which would start MPI itself.

    Three errors end the process with one line and this status, where the import gives a traceback, an obscure message
    or none: no MPI library; a /dev/shm too small for MPICH, which writes to it without reserving pages (SIGBUS); and a
    launcher that offers only PMIx, which some MPICH builds lack (an MPI session shows it: it returns errors).
    MPICH gets another network library where its addresses could be cut (`addresses_cut`)."""
    import mpi4py

    pmix = "PMIX_RANK" in os.environ and "PMI_RANK" not in os.environ
    small, cut = shm_shortage(os.environ), addresses_cut(os.environ)
    by_hand = (pmix or small or cut) and "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
    if by_hand:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # initialized here; finalized at exit as usual
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        without_library(error, status)
        raise
    if not by_hand:
        return
    session, name = None, library()
    if small and name == "MPICH":
        exit_process(f"{small}; {ENLARGE}", number_on_host(os.environ), status)
    if cut and "ch4:ucx ofi" in MPI.Get_library_version():  # it has both, and takes UCX
        os.environ[NETWORK] = "ofi"
    if pmix and name != OPEN_MPI:
        try:
            about = MPI.Info.Create({"thread_level": "MPI_THREAD_MULTIPLE"})
            session = MPI.Session.Init(about, MPI.ERRORS_RETURN)
        except NotImplementedError:  # the library is older than MPI 4
            pass
        except MPI.Exception:
            by = launch(os.environ, name) or Launch("the launcher", 0, int(os.environ["PMIX_RANK"]), "")
            said = f"{by.by} has started {by.ranks} processes and" if by.ranks else by.by
            advice = launch_advice(name, os.environ, by.by)
            exit_process(f"{said} offers PMIx, which this {name} does not know; {advice}", by.number, status)
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if session is not None:
        session.Finalize()


def without_library(error: ImportError | RuntimeError, status: int = 2) -> None:
    """Exit with one line if the import of mpi4py.MPI failed because there is no MPI library."""
    text = str(error)
    if "MPI library" in text or "libmpi" in text:  # not found at run time; built for a missing one
        found = launch(os.environ, "")
        said = f"mpi4py finds no MPI library ({text.splitlines()[-1]}); {GET_MPI}"
        exit_process(said, found.number if found else 0, status)


def addresses_cut(environ: Mapping[str, str]) -> bool:
    """True if Slurm's PMI may cut the addresses of ranks on several nodes, and the user has named no network library.

    For UCX, MPICH (5.0) publishes 4,096 bytes from the address on: what follows it in memory, too. Slurm's pmi2 reads
    lines of at most 1,024 bytes, so that a start can fail, or wait for ever, by what lies there. Addresses of libfabric
    (`ofi`) are short."""
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    several = nodes.isdecimal() and int(nodes) > 1
    return several and in_step(environ) and "PMI_JOBID" in environ and NETWORK not in environ


def shm_shortage(environ: Mapping[str, str], folder: str = shared_memory.FOLDER) -> str:
    """Return the shortage of /dev/shm for MPICH as text; "" if the room suffices, or other hosts' ranks would wait in
    vain. A lone process checks the free bytes; one of several checks the total, which does not change meanwhile."""
    here, found = ranks_on_host(environ), launch(environ, "MPICH")
    try:
        about = os.statvfs(folder)
    except OSError:  # MPICH uses another folder
        return ""
    room = about.f_frsize * (about.f_bavail if here == 1 else about.f_blocks)
    if room >= here * MPICH_ROOM or (found and found.ranks > here):
        return ""
    kind = "free" if here == 1 else "in all"
    takes = f"which takes {MPICH_ROOM / 1e6:.2f} MB for each rank ({here} here)"
    return f"{folder} has {room / 1e6:.2f} MB {kind}, and MPICH, {takes}, would be killed (SIGBUS)"


def ranks_on_host(environ: Mapping[str, str]) -> int:
    """Return the number of ranks on this host, or by Slurm's list on the host with most ranks; 1 if unknown."""
    said = environ.get("MPI_LOCALNRANKS", "") or environ.get("SLURM_STEP_TASKS_PER_NODE", "") * in_step(environ)
    return max(map(int, re.findall(r"(?<!x)\b\d+", said)), default=1)  # Slurm's form is 2(x3),1


def number_on_host(environ: Mapping[str, str]) -> int:
    """Return the launcher's number of this process on its host; 0 if unknown."""
    said = environ.get("MPI_LOCALRANKID", "") or environ.get("SLURM_LOCALID", "") * in_step(environ)
    return int(said) if said.isdecimal() else 0


def exit_process(line: str, number: int, status: int) -> None:
    """Exit this process, which has no contact with others; the process with number 0 prints the line."""
    if number:
        time.sleep(PATIENCE)
    else:
        print(f"hpcdl: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def check_world(world: "MPI.Intracomm") -> None:
    """Raise AgreedError if this is a world of one rank and the launcher has started several.
    Every process detects it and exits; the launcher's number 0 prints the message."""
    problem = split_world(world.size, os.environ, library())
    if problem is not None:
        found, advice, number = problem
        if number:
            time.sleep(PATIENCE)
        error = AgreedError(f"{found}; {advice}")
        error.speaker = 0 if number == 0 else None
        raise error
