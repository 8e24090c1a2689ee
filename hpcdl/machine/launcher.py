"""The MPI launcher that belongs to this Python: for programs that start ranks of their own."""

import os
import shutil
import sys
from pathlib import Path

from hpcdl.errors import UsageError

# Open MPI refuses more ranks than cores otherwise, and its ranks keep a core that they share.
OVERSUBSCRIBED = {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE", "OMPI_MCA_mpi_yield_when_idle": "1"}
TORCH_VARIABLES = "HPCDL_TORCH_VARIABLES"  # names of the variables that torch/launch_variables.py has set


def mpiexec() -> str:
    """Return the mpiexec beside this Python (MPI from the registry), or else the one on the PATH (the site's)."""
    beside = Path(sys.executable).with_name("mpiexec")
    if found := str(beside) if beside.exists() else shutil.which("mpiexec"):
        return found
    raise UsageError("no mpiexec beside this Python or on the PATH; pip install 'hpcdl[mpi]', or load your site's MPI")


def clean_environment() -> dict[str, str]:
    """Return this process's environment without its variables as a rank, which a new launcher must not see."""
    ours = ("PMI", "MPI_LOCAL", "HYDRA", "OMPI_COMM_WORLD")
    torch = {TORCH_VARIABLES, *os.environ.get(TORCH_VARIABLES, "").split()}
    return {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in torch}
