"""The program as its user starts it: what it reaches and writes, how it is gone on with, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint

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


def test_gone_on_with_in_the_midst_of_a_round(run_on, tmp_path):
    options = [*SMALL, "--sync-every", "7", "--outer", "nesterov", "--outer-lr", "0.7", "--local-momentum", "reset"]
    run_on(2, SCRIPT, *options, "--out", "a", "--checkpoint-every", "20", "--keep", "3", check=0)
    found = Checkpoint.read(tmp_path / "a")
    step, whole = found.attributes["step"], dict(found.vectors)  # now: the file is replaced
    (tmp_path / "a" / "checkpoint-000000020.h5").replace(tmp_path / "a" / "checkpoint.h5")
    run_on(2, SCRIPT, "--resume", "a", check=0)
    again = Checkpoint.read(tmp_path / "a")
    assert step == again.attributes["step"] == STEPS
    assert {"ranks/replica", "ranks/optimizer/momentum", "outer/start", "outer/momentum"} <= set(whole)
    for name, vector in whole.items():
        assert np.array_equal(again.vectors[name], vector), name
    assert not np.array_equal(*whole["ranks/replica"])  # the last round is not over


@pytest.mark.long
def test_on_a_stand_in_for_a_gpu(simulate, run_on, few):
    options = ["--data", "few.h5", "--model", "mlp:3", "--dtype", "float64", "--batch-size", "8", "--epochs", "3"]
    options += ["--sync-every", "2", "--local-from", "1", "--local-momentum", "average", "--outer", "nesterov"]
    simulate(2, SCRIPT, *options, "--device", "cuda", "--out", "gpu", check=0, STANDIN_GPUS="2")
    run_on(2, SCRIPT, *options, "--out", "cpu", check=0)
    gpu, cpu = (Checkpoint.read(few / name).vectors for name in ("gpu", "cpu"))
    assert set(gpu) == set(cpu)
    for name, vector in cpu.items():
        assert np.abs(gpu[name] - vector).max() <= 1e-10, name
