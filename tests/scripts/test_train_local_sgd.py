"""The program as its user starts it: what it reaches and writes, how it is gone on with, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from written_runs import summary

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_local_sgd.py"
SMALL = ["--data", "digits", "--model", "mlp:16", "--batch-size", "64", "--epochs", "2", "--seed", "1"]
STEPS = 46


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
    scores = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["consensus_distance"] >= 0 for line in scores if "test_loss" in line)


def test_the_bytes_of_one_local_step_divided_by_h(run_on, tmp_path):
    def sent(sync_every):
        out = tmp_path / str(sync_every)
        run_on(4, SCRIPT, *SMALL, "--allreduce", "ring", "--sync-every", sync_every, "--out", out, check=0)
        return np.array([traffic["all_reduce"]["bytes"] for traffic in summary(out)["traffic_per_rank"]])

    every = sent(1)
    assert every.sum() == STEPS * 6 * 4 * summary(tmp_path / "1")["parameters"]  # 2 (N-1) K values of 4 bytes a step
    assert (every == 23 * sent(23)).all()
