"""train-gorila goes on after an environment that raises once, and ends after one that raises again and again."""

import pytest
from failing_chains import SCRIPT, SMALL
from written_runs import summary

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
