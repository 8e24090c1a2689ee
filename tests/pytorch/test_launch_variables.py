"""torchrun's variables: from each launcher's, kept where they are set, and in a script as torchrun starts it."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")
from hpcdl.torch.launch_variables import TORCH_VARIABLES, set_variables, variables

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "6", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        ({}, ()),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, (5, 8, 1, 4, 1)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (3, 4, 1, 2, 1),
        ),
        (STEP | {"SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, (6, 7, 0, 1, 3)),
    ],
)
def test_of_each_launcher(environ, values):
    assert variables(environ) == dict(zip(NAMES, map(str, values), strict=False))


def test_a_variable_that_is_set_stays_but_not_that_of_a_process_above():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "9"}
    set_variables(environ)
    assert environ["RANK"] == "9" and environ["WORLD_SIZE"] == "2" and "RANK" not in environ[TORCH_VARIABLES].split()
    environ |= {"PMI_RANK": "0", "PMI_SIZE": "3"}  # a job that this process starts
    set_variables(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("9", "3")


def test_a_script_of_torchrun_with_two_changed_lines(launch, tmp_path):
    (tmp_path / "script.py").write_text(
        "import os\nimport torch\nfrom torch import distributed\nimport hpcdl.torch\n"
        "distributed.init_process_group('hpcdl')\n"
        f"one = torch.tensor([int(os.environ[name]) for name in {NAMES}])\n"
        "distributed.all_reduce(one)\n"
        "assert int(os.environ['RANK']) == distributed.get_rank()\n"
        "if distributed.get_rank() == 0:\n    print(one.tolist())\n"
        "distributed.destroy_process_group()\n"
    )
    assert launch(3, "script.py", check=0).stdout.split("\n")[0] == "[3, 9, 3, 9, 0]"


def test_torchrun_is_refused_in_one_line(environment, tmp_path):
    torchrun = {name: "0" for name in NAMES} | {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    command = [sys.executable, "-c", "import hpcdl.torch"]
    done = subprocess.run(command, env=environment | torchrun, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "mpiexec -n N python SCRIPT" in done.stderr
