"""train-gorila is ended, by signals to all, by time and by environments that raise."""

import signal
import subprocess
import sys
import time

import pytest
from failing_chains import SCRIPT, SMALL
from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm.launcher import clean_environment

KINDS = pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="bundles"),
        pytest.param(["--learners", "1"], id="apart", marks=pytest.mark.long),
        pytest.param(["--consistency", "bsp"], id="bsp", marks=pytest.mark.long),
    ],
)


@KINDS
def test_an_environment_that_raises_once_is_made_anew(run_on, folder, more):
    raises = ["--env", "mychains:failing", "--env-options", "raises=30"]
    run_on(3, SCRIPT, *SMALL, *raises, *more, "--env-steps", "480", "--out", "r", check=0)
    found = summary(folder / "r")
    assert found["environment_restarts"] == 1 and found["stopped"] == "finished"


@KINDS
def test_one_that_raises_three_times_in_a_row_ends_the_run(launch, folder, more):
    """On one rank: it says which environment, and what it has raised where; all ranks are gone."""
    raises = ["--env", "mychains:failing", "--env-options", "raises=30,always=True"]
    done = launch(3, SCRIPT, *SMALL, *raises, *more, "--env-steps", "100000", "--out", "r", timeout=40)
    lines = [line for line in done.stderr.splitlines() if "mychains" in line]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert "has raised three times in a row: OSError: the emulator at step 32 is gone (mychains.py, line" in lines[0]
    assert not (folder / "r/summary.json").exists() and "Traceback" not in done.stderr


@pytest.mark.long
def test_a_signal_to_all(launch, folder):
    """As a batch system sends it: to mpiexec, which hands it on."""
    command = [launch.mpiexec, "-n", "3", sys.executable, str(SCRIPT), *SMALL, "--env-steps", "100000000"]
    with subprocess.Popen(
        [*command, "--evaluate-every", "100000000", "--out", "r"],
        cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        deadline = time.monotonic() + 60
        metrics = folder / "r/metrics.jsonl"
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        said, wrong = job.communicate(timeout=60)
    assert job.returncode == 85 and "--resume r" in said, said + wrong
    assert Checkpoint.read(folder / "r").attributes["step"] > 0


@pytest.mark.long
def test_a_time_limit(run_on, folder):
    given = [*SMALL, "--env-steps", "100000000", "--evaluate-every", "100000000", "--time-limit", "1", "--out", "t"]
    done = run_on(4, SCRIPT, *given, "--learners", "1", check=0)
    assert summary(folder / "t")["stopped"] == "time limit" and "time limit" in done.stdout
