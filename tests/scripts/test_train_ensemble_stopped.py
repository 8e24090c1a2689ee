"""scripts/train_ensemble.py: stopped by a signal or the time limit, or killed, it goes on."""

import json
import signal
from pathlib import Path

import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_ensemble.py"
FEW = ["--data", "few.h5", "--model", "softmax", "--epochs", "2", "--batch-size", "4"]


def parameters(folder, number):
    return Checkpoint.read(folder / "members" / f"{number:04d}").vectors["parameters"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_stopped_or_killed_it_goes_on(launch, few, run_on, number):
    """In the second of two members on one rank; then on two. The end is that of an ensemble that nobody stopped."""
    common = [*FEW, "--members", "2", "--bagging", "--checkpoint-every", "3"]
    program = few / "interfere.py"
    program.write_text(
        "import os\n"
        "from hpcdl.scripts import train_ensemble\n"
        "from hpcdl.runs import run\n"
        "def record(self, loss, total, original=run.Run.record):\n"
        "    original(self, loss, total)\n"
        "    if self.step == 5 and '0001' in self.options.out:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "run.Run.record = record\n"
        "train_ensemble.main()\n"
    )
    ended = launch(1, program, *common, "--out", "e", cwd=few)
    assert (ended.returncode == 85) == (number == signal.SIGTERM) and ended.returncode != 0
    assert not (few / "e/summary.json").exists()
    first = (few / "e/members/0000/checkpoint.h5").stat().st_mtime_ns
    run_on(2, SCRIPT, "--resume", "e", cwd=few, check=0)
    assert (few / "e/members/0000/checkpoint.h5").stat().st_mtime_ns == first
    summary = json.loads((few / "e/members/0001/summary.json").read_text())
    assert len(summary["legs"]) == 2 and summary["steps"] == 10
    run_on(1, SCRIPT, *common, "--out", "alone", cwd=few, check=0)
    assert parameters(few / "alone", 1).tobytes() == parameters(few / "e", 1).tobytes()


def test_the_time_limit_ends_it_in_good_order(run_on, few):
    common = [*FEW, "--members", "2", "--epochs", "1000000", "--time-limit", "0.3", "--out", "e"]
    done = run_on(1, SCRIPT, *common, cwd=few)
    assert done.returncode == 85 and "go on with --resume e" in done.stdout
    assert (few / "e/members/0000/checkpoint.h5").exists() and not (few / "e/summary.json").exists()
