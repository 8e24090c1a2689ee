"""--survive beside --data-servers: a server is killed, or a worker, and the batches stay what they were."""

import json
from pathlib import Path

import numpy as np
import pytest
from survived import SGD, STEPS, ULFM, with_ulfm

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"
pytestmark = with_ulfm


@pytest.fixture(scope="module")
def known_whole():
    """What is found only once."""
    return {}


@pytest.fixture
def whole(run_on, known_whole, tmp_path):
    """The parameters of the run that lost nobody, and had no data server."""
    if not known_whole:
        run_on(2, SCRIPT, *SGD, "--out", tmp_path / "whole", check=0)
        known_whole["parameters"] = Checkpoint.read(tmp_path / "whole").vectors["parameters"]
    return known_whole["parameters"]


@pytest.mark.parametrize(
    "ranks, servers, rank, more",
    [
        pytest.param(5, 2, 0, [], id="a server of two"),
        pytest.param(3, 1, 0, [], id="the only server"),
        pytest.param(4, 1, 1, ["--placement", "streamed"], id="the first worker"),
    ],
)
def test_a_server_or_a_worker_is_gone(ranks, servers, rank, more, launch, whole, tmp_path):
    """Who is left of the servers serves all workers; where none is, they read the rows themselves."""
    kill = ["--data-servers", servers, "--survive", "1", "--inject", f"kill:rank={rank},step=25"]
    done = launch(ranks, SCRIPT, *SGD, *more, *kill, "--out", "a", given=ULFM, check=0)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    (loss,) = summary["losses"]
    assert loss["ranks"] == [rank] and summary["ranks"] == ranks - 1
    left = servers - (rank < servers)
    assert summary["workers"] == ranks - 1 - left and summary["options"]["data_servers"] == left
    assert sum(leg["steps"] for leg in summary["legs"]) == summary["steps"] == STEPS
    assert ("read the rows themselves" in done.stdout) == (left == 0)
    ours = [line for line in done.stderr.splitlines() if "pmix_" not in line]  # Open MPI's launcher misses the rank
    assert len(ours) == 1  # what --inject says, and no traceback
    if not more:  # streamed, rows come in another order
        found = Checkpoint.read(tmp_path / "a").vectors["parameters"]
        assert np.abs(found - whole).max() <= 1e-12


def test_no_worker_is_left(launch):
    kill = ["--data-servers", "1", "--survive", "1", "--inject", "kill:rank=1,step=9"]
    done = launch(2, SCRIPT, *SGD, *kill, "--out", "none", given=ULFM, check=1)
    assert "no rank that trains is left, only data servers" in done.stderr and "Traceback" not in done.stderr


def test_who_is_left_says_what_ends_the_run(launch, interfere, tmp_path):
    """Rank 0 is gone, and cannot say it."""
    kill = ["--survive", "1", "--inject", "kill:rank=0,step=9 kill:rank=1,step=30"]
    done = launch(3, SCRIPT, *SGD, *kill, "--out", "a", given=ULFM, check=1)
    assert "train-allreduce: error: rank 0 is gone: 2 in all, more than --survive 1" in done.stderr


def test_rows_of_a_server_alone_are_refused(launch):
    more = ["--data-servers", "1", "--placement", "partitioned", "--survive", "1", "--out", "none"]
    done = launch(3, SCRIPT, *SGD, *more, given=ULFM, check=2)
    assert "the rows of a lost rank would be lost, too" in done.stderr and done.stderr.count("error") == 1
