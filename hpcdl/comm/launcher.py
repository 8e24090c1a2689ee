"""The MPI launcher that belongs to this Python: for programs that start ranks of their own."""

import os
import shutil
import sys
from pathlib import Path

from hpcdl.errors import UsageError


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
