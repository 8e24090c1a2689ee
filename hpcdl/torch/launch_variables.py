"""The variables that torchrun sets for its processes, set from those of mpiexec or srun on `import hpcdl.torch`.

    RANK, WORLD_SIZE                this process's number, and how many there are
    LOCAL_RANK, LOCAL_WORLD_SIZE    the same among those of its host: a GPU's number is LOCAL_RANK
    GROUP_RANK                      its host's number; mpiexec says none, so hosts count as filled in turn, alike

A script that was written for torchrun reads them, and runs with two changed lines: the import, and the backend's name.
A variable that is set already stays, unless this module has set it in a process that has started this one."""

import os
import re
from collections.abc import Mapping, MutableMapping

from hpcdl.machine.launcher import TORCH_VARIABLES
from hpcdl.machine.world import exit_process, in_step, launch, number_on_host, ranks_on_host

ALONE = "torchrun starts processes that MPI does not connect: start the script by mpiexec -n N python SCRIPT, or srun"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the variables; none in a process that was started alone."""
    found = launch(environ, library="")
    if found is None:
        return {}
    size, rank, host = ranks_on_host(environ), number_on_host(environ), -1
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        size, rank = (int(environ[f"OMPI_COMM_WORLD_LOCAL_{what}"]) for what in ("SIZE", "RANK"))
    elif in_step(environ) and "SLURM_NODEID" in environ:
        host = int(environ["SLURM_NODEID"])
        listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # as 2(x3),1
        sizes = [int(each) for each, times in listed for _ in range(int(times or 1))]
        size = sizes[host] if host < len(sizes) else size
    values = {"RANK": found.number, "WORLD_SIZE": found.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    values["GROUP_RANK"] = host if host >= 0 else found.number // size
    return {name: str(value) for name, value in values.items()}


def set_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that are missing. A process of torchrun, which MPI does not connect to others, ends."""
    values = variables(environ)
    if not values and "TORCHELASTIC_RUN_ID" in environ:
        exit_process(ALONE, int(environ.get("RANK", "0")), 2)
    before = environ.get(TORCH_VARIABLES, "").split()
    ours = [name for name in values if name in before or name not in environ]
    environ.update({name: values[name] for name in ours})
    if ours:
        environ[TORCH_VARIABLES] = " ".join(ours)
