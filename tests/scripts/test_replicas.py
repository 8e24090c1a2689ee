"""--replicas: servers and workers are killed, and the steps are those of a run that lost nobody."""

import json
from pathlib import Path

import numpy as np
import pytest
from survived import SGD, STEPS, ULFM, evaluations, with_ulfm

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_parameter_server.py"


@pytest.mark.long
def test_nobody_is_gone(run_on, tmp_path):
    """Two copies of each slice: the bits of one; and what outlives nobody says so."""
    run_on(4, SCRIPT, *SGD, "--servers", "2", "--out", "one", check=0)
    done = run_on(4, SCRIPT, *SGD, "--servers", "2", "--replicas", "2", "--out", "two", check=0)
    assert done.stderr.count("ends all ranks when one is lost. To outlive a rank, take Open MPI from 5.0 on") == 1
    one, two = (Checkpoint.read(tmp_path / name) for name in ("one", "two"))
    assert np.array_equal(one.vectors["parameters"], two.vectors["parameters"])
    assert evaluations(tmp_path / "one") == evaluations(tmp_path / "two")
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["pushes_applied"] == [2 * STEPS] * 2 and summary["replicas"] == 2
    alone = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["bytes_sent_per_rank"][2:] == alone["bytes_sent_per_rank"][2:]


@with_ulfm
@pytest.mark.parametrize(
    "ranks, fault, more, gone",
    [
        pytest.param(4, "kill:rank=1,step=90", ["--optimizer", "adam", "--lr", "0.01"], [1], id="server"),
        pytest.param(5, "kill:rank=0,step=23", ["--checkpoint-every", "5", "--servers", "3"], [0], id="rank 0"),
        pytest.param(4, "kill:rank=3,step=20", ["--optimizer", "momentum"], [3], id="worker", marks=pytest.mark.long),
    ],
)
def test_the_steps_are_those_of_a_run_that_lost_nobody(ranks, fault, more, gone, launch, run_on, tmp_path):
    """Where servers are gone to the bit; where a worker is, to rounding: fewer shares of the same batches."""
    options = [*SGD, "--servers", "2", *more]
    run_on(ranks, SCRIPT, *options, "--out", tmp_path / "whole", check=0)
    left = launch(
        ranks, SCRIPT, *options, "--replicas", "2", "--out", "left", "--inject", fault, given=ULFM, check=0, timeout=120
    )
    whole, found = (Checkpoint.read(tmp_path / name) for name in ("whole", "left"))
    assert found.attributes["step"] == STEPS
    for name, vector in whole.vectors.items():
        assert np.abs(found.vectors[name] - vector).max() <= (1e-12 if gone == [3] else 0)
    assert evaluations(tmp_path / "left") == pytest.approx(evaluations(tmp_path / "whole"), rel=1e-10)
    summary = json.loads((tmp_path / "left" / "summary.json").read_text())
    (loss,) = summary["losses"]
    assert loss["ranks"] == gone and loss["left"] == ranks - 1 and summary["stopped"] == "finished"
    workers = ranks - (3 if "3" in more else 2)
    before = loss["step"] if gone == [3] else STEPS
    assert set(summary["pushes_applied"]) <= {workers * before + STEPS - before + extra for extra in (0, 1)}
    assert len(summary["pushes_applied"]) == loss["servers"] == (2 if gone == [3] or "3" in more else 1)
    assert sum(leg["steps"] for leg in summary["legs"]) == STEPS
    assert f"rank {gone[0]} is gone after step {loss['step']}; {ranks - 1} ranks go on" in left.stdout
