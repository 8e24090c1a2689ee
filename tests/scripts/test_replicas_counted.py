"""Ranks that are killed between any two messages: each row is learned from once in each epoch, on all slices."""

from pathlib import Path

import numpy as np
import pytest
from survived import ULFM, with_ulfm
from written_runs import lines, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint

PROGRAM = Path(__file__).parents[1] / "counting.py"
DATA = ["--data", "counting:rows", "--model", "counting:Counting", "--dtype", "float64", "--progress", "none"]
RULE = ["--optimizer", "sgd", "--lr", "1", "--schedule", "constant", "--batch-size", "16", "--epochs", "2"]
STEPS = 30


@pytest.fixture
def train(launch, tmp_path):
    """A function: a run of so many servers and workers of which some are killed; its end, and its summary."""

    def run(servers, workers, kills, *more, check=0):
        told = [*DATA, *RULE, "--servers", str(servers), "--out", "run", *more]
        done = launch(
            servers + workers, PROGRAM, kills, *told, given=ULFM, check=check, timeout=120, PYTHONPATH=PROGRAM.parent
        )
        return done, summary(tmp_path / "run") if check == 0 else None

    return run


@with_ulfm
@pytest.mark.parametrize(
    "servers, workers, kills, how, pushes",
    [
        pytest.param(2, 2, "1:51", ["async"], STEPS, id="async"),
        pytest.param(3, 2, "0:140,4:50", ["ssp", "--staleness", "2"], None, id="ssp"),
    ],
)
def test_each_row_counts_once_in_each_epoch(servers, workers, kills, how, pushes, train, tmp_path):
    _, found = train(servers, workers, kills, "--replicas", "2", "--consistency", *how)
    visits = -Checkpoint.read(tmp_path / "run").vectors["parameters"]
    assert np.abs(visits - 2).max() < 1e-9
    steps = [line["step"] for line in lines(tmp_path / "run") if "test_loss" not in line]
    assert steps == list(range(1, STEPS + 1))
    (applied,) = set(found["pushes_applied"])
    assert applied == pushes if pushes else STEPS <= applied < 2 * STEPS
    assert [rank for each in found["losses"] for rank in each["ranks"]] != []


@with_ulfm
def test_all_replicas_of_a_slice_are_gone(train):
    """One server of two, and when the other holds all alone, that one: a line says so."""
    done, _ = train(2, 1, "1:40,0:80", "--replicas", "2", check=1)
    assert "all replicas of slice 0 of 1 slice are gone: rank 0 is gone; there is no checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
