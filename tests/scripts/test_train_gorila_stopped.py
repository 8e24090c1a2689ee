"""train-gorila is stopped, by signals and time, and gone on with."""

import pytest
from failing_chains import SCRIPT, SMALL
from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint


def logs(folder):
    return "".join(path.read_text() for path in (folder / "logs").iterdir())


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(3, ["--save-replay"], id="bundles", marks=pytest.mark.exhaustive),
        pytest.param(4, ["--learners", "1", "--save-replay"], id="apart", marks=pytest.mark.long),
        pytest.param(3, ["--consistency", "bsp"], id="rounds", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_ends_it_in_good_order_and_it_goes_on(launch, run_on, folder, ranks, more):
    """SIGTERM to one rank, the last; also on another number of ranks, whose memories are filled anew."""
    sends = ["--env", "mychains:failing", "--env-options", "sends=40"]
    stopped = launch(
        ranks, SCRIPT, *SMALL, *sends, *more, "--env-steps", "1200", "--evaluate-every", "1200", "--out", "r"
    )
    assert stopped.returncode == 85 and "--resume r" in stopped.stdout, stopped.stdout + stopped.stderr
    assert (folder / "sent").exists() and "Traceback" not in stopped.stderr
    at = Checkpoint.read(folder / "r").attributes["step"]
    assert 0 < at < 1200
    own = sorted(path.name for path in (folder / "r").glob("replay/*"))
    assert own == ([] if "bsp" in more else ["0001.h5"] if "--learners" in more else ["0001.h5", "0002.h5"])
    run_on(ranks, SCRIPT, "--resume", "r", "--trust", "r", "--env-steps", "1600", "--evaluate-every", "1600", check=0)
    assert "filled anew" not in logs(folder / "r")
    first = summary(folder / "r")
    per_step = 2 if "bsp" in more else 1
    assert first["steps"] == 1600 / per_step and first["legs"][0]["steps"] == at and len(first["legs"]) == 2
    assert first["episodes"] > 100
    if "bsp" not in more:
        run_on(ranks + 1, SCRIPT, "--resume", "r", "--trust", "r", "--env-steps", "1900", check=0)
        assert "filled anew" in logs(folder / "r")
        last = summary(folder / "r")
        assert last["steps"] == 1900 and last["episodes"] > first["episodes"]
        assert last["updates"] > first["updates"]
        assert [leg["ranks"] for leg in last["legs"]] == [ranks, ranks, ranks + 1]
