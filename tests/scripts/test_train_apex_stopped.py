"""train-apex is stopped by a signal to any rank, by time and by environments that raise, and gone on with."""

import pytest
from odd_chains import LONG, SCRIPT, SMALL, odd
from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint


def so_far(folder):
    """Of a checkpoint: after which step it is, and how many environment steps and updates there were by then."""
    found = Checkpoint.read(folder)
    return found.attributes["step"], found.vectors["actor/totals"][0], found.attributes["updates"]


@pytest.mark.parametrize(
    ("ranks", "to", "kept", "later"),
    [
        pytest.param(3, 1, ["--save-replay"], 3, id="to the memory, which is kept"),
        pytest.param(3, 2, [], 5, id="to an actor", marks=pytest.mark.long),
        pytest.param(5, 3, ["--save-replay"], 6, id="to one of several", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_to_one_rank_ends_it_and_it_goes_on(launch, run_on, folder, ranks, to, kept, later):
    """All end, with 85; as many actors go on, or more."""
    stopped = launch(ranks, SCRIPT, *LONG, *odd(rank=ranks - 1, at=60, to=to), *kept, "--out", "r")
    assert stopped.returncode == 85 and "--resume r" in stopped.stdout, stopped.stdout + stopped.stderr
    assert "Traceback" not in stopped.stderr
    at, seen, updates = so_far(folder / "r")
    assert 20 < at < 100_000 and seen >= at and updates == at - 19
    assert (folder / "r/replay/0001.h5").exists() == bool(kept)
    run_on(later, SCRIPT, "--resume", "r", "--trust", "r", "--env-steps", at + 100, check=0)
    found = summary(folder / "r")
    assert [leg["steps"] for leg in found["legs"]] == [at, 100] and found["stopped"] == "finished"
    assert [leg["ranks"] for leg in found["legs"]] == [ranks, later]
    assert found["episodes"] > at / 20 and found["environment_steps"] >= seen + 100
    # A memory that was kept is there at once, for as many copies of the environment; else it is filled anew first.
    assert found["updates"] - updates == (100 if kept and ranks == later else 81)
    again = run_on(later, SCRIPT, "--resume", "r", "--trust", "r", check=0).stdout
    assert "nothing is left to do" in again


@pytest.mark.long
def test_an_environment_that_raises_is_made_anew(run_on, folder):
    """Once, on one actor; the others do not notice."""
    run_on(5, SCRIPT, *SMALL, *odd(rank=3, at=20), "--env-steps", 200, "--out", "r", check=0)
    assert summary(folder / "r")["environment_restarts"] == 1 and (folder / "happened-0").exists()


@pytest.mark.long
def test_one_that_raises_three_times_in_a_row_ends_the_run(launch, folder):
    done = launch(3, SCRIPT, *LONG, *odd(rank=2, at=60, often=3), "--out", "r")
    assert done.returncode == 1 and done.stderr.count("three times in a row") == 1, done.stderr
    assert "environment 0, episode" in done.stderr and "the arm is stuck" in done.stderr


@pytest.mark.long
def test_a_time_limit(run_on, folder):
    done = run_on(5, SCRIPT, *LONG, "--time-limit", 1, "--out", "t", check=0)
    assert summary(folder / "t")["stopped"] == "time limit" and "time limit" in done.stdout
