"""The MPI launcher that belongs to this Python: for programs that start ranks of their own."""

import os
import shutil
import sys
from pathlib import Path

from hpcdl.errors import UsageError

# Open MPI's launcher asks whether a host that says nothing is there, after seconds and not after five minutes as it
# would: without its answer it waits for the host's daemon also where the job is ended.
ASKS = {f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in (("time", "5"), ("intvl", "1"), ("probes", "3"))}


def mpiexec() -> str:
    """The mpiexec beside this Python (MPI from the registry), or else the one on the PATH (the site's own)."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError("there is no mpiexec; install hpcdl[mpi], or put your site's on the PATH")
    return found


def clean_environment() -> dict[str, str]:
    """This process's environment without what an MPI library has put there, which must not reach a new launcher."""
    ours = ("PMI", "MPI_LOCAL", "HYDRA", "OMPI_COMM_WORLD")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
