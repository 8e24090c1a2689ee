"""scripts/train_ensemble.py: stopped by a signal or the time limit, or killed, it goes on."""

import json
import signal
from pathlib import Path

import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_ensemble.py"
FEW = ["--data", "few.h5", "--model", "softmax", "--epochs", "2", "--batch-size", "4"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_or_killed_it_goes_on(launch, few, run_on, interfere, number):
    """In the second of two members on one rank; then on two. The end is that of an ensemble that nobody stopped."""
    common = [*FEW, "--members", "2", "--bagging", "--checkpoint-every", "3"]
    program = interfere(5, None, f"os.kill(os.getpid(), {int(number)})", "train_ensemble", "0001")
    ended = launch(1, program, *common, "--out", "e", cwd=few)
    assert (ended.returncode == 85) == (number == signal.SIGTERM) and ended.returncode != 0
    assert not (few / "e/summary.json").exists()
    first = (few / "e/members/0000/checkpoint.h5").stat().st_mtime_ns
    run_on(2, SCRIPT, "--resume", "e", cwd=few, check=0)
    assert (few / "e/members/0000/checkpoint.h5").stat().st_mtime_ns == first
    summary = json.loads((few / "e/members/0001/summary.json").read_text())
    assert len(summary["legs"]) == 2 and summary["steps"] == 10
    run_on(1, SCRIPT, *common, "--out", "alone", cwd=few, check=0)
    one, other = (Checkpoint.read(few / name / "members/0001").vectors["parameters"] for name in ("alone", "e"))
    assert one.tobytes() == other.tobytes()


def test_the_time_limit_ends_it_in_good_order(run_on, few):
    common = [*FEW, "--members", "2", "--epochs", "1000000", "--time-limit", "0.3", "--out", "e"]
    done = run_on(1, SCRIPT, *common, cwd=few)
    assert done.returncode == 85 and "go on with --resume e" in done.stdout
    assert (few / "e/members/0000/checkpoint.h5").exists() and not (few / "e/summary.json").exists()
