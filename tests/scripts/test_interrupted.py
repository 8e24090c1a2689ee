"""A run that is ended by a signal or its launcher, gone on with, or repeated; what it writes, and where."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from curves import OPTIONS, PARAMETERS, curve

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.exhaustive)])
def test_a_signal_to_one_rank_saves_and_exits_with_85(launch, interfere, tmp_path, number):
    program = interfere(5, 1, f"os.kill(os.getpid(), {int(number)})")
    done = launch(2, program, *OPTIONS, "--epochs", "100000", "--out", tmp_path / "a", check=85)
    step = Checkpoint.read(tmp_path / "a").attributes["step"]
    assert 5 <= step < 100_000 * 23
    assert f"stopped by a signal after step {step}" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_config_of_a_run_repeats_it(run_on, tmp_path):
    run_on(2, SCRIPT, *OPTIONS, "--lr", "0.03", "--batch-size", "50", "--out", tmp_path / "a", check=0)
    run_on(2, SCRIPT, "--config", tmp_path / "a" / "config.yaml", "--out", tmp_path / "b", check=0)
    assert np.array_equal(curve(tmp_path / "a"), curve(tmp_path / "b"))
    text = (tmp_path / "a" / "config.yaml").read_text()
    assert "# launch: 2 ranks: " in text and "# commit: " in text and "# numpy: " in text


def test_without_out_a_folder_is_made_and_with_none_nothing_is_written(run_on, tmp_path):
    run_on(2, SCRIPT, *OPTIONS, "--epochs", "1", check=0)
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("all_reduce-") and (made / "summary.json").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    run_on(2, SCRIPT, *OPTIONS, "--epochs", "1", "--out", "none", check=0, cwd=empty)
    assert not list(empty.iterdir())


def test_ranks_that_are_ended_by_the_launcher_leave(launch, tmp_path):
    """mpiexec itself is told to stop, as a scheduler does: the ranks save and leave."""
    options = [*OPTIONS, "--epochs", "100000", "--out", tmp_path / "a"]
    command = [launch.mpiexec, "-n", "2", sys.executable, SCRIPT, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "a" / "best.h5").exists():  # the run is under way
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert Checkpoint.read(tmp_path / "a" / "best.h5").vectors["parameters"].size == PARAMETERS
    assert not [name for name in os.listdir(tmp_path / "a") if name.endswith(".part")]
