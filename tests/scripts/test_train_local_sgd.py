"""The program as its user starts it: what it reaches and writes, how it is gone on with, and what it refuses."""

from pathlib import Path

import pytest
from written_runs import lines, summary

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_local_sgd.py"


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--local-from", "2", "--local-momentum", "average"],
        ["--optimizer", "adamw", "--lr", "0.002", "--outer", "nesterov", "--outer-lr", "0.7"],
    ],
    ids=["local SGD", "post-local SGD", "DiLoCo"],
)
def test_digits_are_learned(run_on, tmp_path, more):
    options = ["--sync-every", "8", "--data", "digits", "--epochs", "9", "--seed", "1", "--out", "a"]
    printed = run_on(4, SCRIPT, *options, *more, check=0).stdout
    found = summary(tmp_path / "a")
    assert found["synchronizations"] == (9 - found["local_from"]) * 45 // 8
    assert f"8 in each of {found['synchronizations']} rounds" in printed and "all-reduce" in printed
    assert ("outer optimizer" in printed) == (found["outer"] != "average")
    assert found["strategy"] == "local_sgd" and found["sync_every"] == 8
    assert found["test_accuracy"] >= 0.93
    assert len(found["replica_test_accuracy"]) == 4 and min(found["replica_test_accuracy"]) > 0.9
    assert found["replicas_agree"] is None and found["consensus_distance"] > 0  # 405 steps are 50 rounds and 5 steps
    assert all(line["consensus_distance"] >= 0 for line in lines(tmp_path / "a") if "test_loss" in line)
