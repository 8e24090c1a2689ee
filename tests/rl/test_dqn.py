"""DQN: on a chain it finds the values that are known; it is the same to the bit, also when it is gone on with."""

import json

import chains
import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.rl.options import DQN, RLOptions
from hpcdl.rl.training import Learning
from hpcdl.runs.context import RunContext

CHAIN = {
    "env": "chains:chain",
    "model": "mlp:16,dueling",
    "dtype": "float64",
    "gamma": chains.GAMMA,
    "lr": 0.01,
    "target_every": 20,
    "learning_starts": 50,
    "batch_size": 16,
    "replay": 500,
    "train_every": 1,
    "epsilon": "0.5",
    "episodes": 3,
    "evaluate_every": 200,
    "progress": "none",
    "out": "none",
    "trace": 0,
}


def learned(**more):
    """A run on the chain, on one rank, in this process."""
    options = RLOptions(**(CHAIN | more))
    return Learning(DQN).run(MPI.COMM_SELF, options)


@pytest.mark.parametrize(
    "how",
    [
        {"prioritized": True, "n_step": 1},
        {"double": "no", "n_step": 1, "model": "mlp:16", "loss": "squared"},
        {"target_every": 0, "n_step": 1, "envs": 4},
    ],
    ids=["prioritized", "plain", "without a target network"],
)
def test_it_finds_the_values_of_a_chain(how, alone):
    run = learned(env_steps=2400, seed=1, **how)
    network = run.held.network
    found = network.values(run.parameters, np.eye(chains.STATES, dtype=np.float32))
    np.testing.assert_allclose(found, chains.best_values(), atol=0.03)
    assert run.summary["test_return"] == 1.0 and run.stopped == "finished"


def test_n_steps_are_on_policy_and_the_greedy_one_wins(alone):
    assert learned(env_steps=2400, n_step=3, seed=2).summary["test_return_min"] == 1.0


@pytest.mark.parametrize("how", [{}, {"envs": 2, "prioritized": True}, {"envs": 2, "train_every": 4}])
def test_twice_the_same_and_counted(how, alone):
    one, two = (learned(env_steps=400, **how) for _ in range(2))
    np.testing.assert_array_equal(one.parameters, two.parameters)
    assert (one.parameters != learned(env_steps=400, seed=7, **how).parameters).any()
    summary = one.summary
    # the three steps that wait for their returns are not to be drawn from yet
    per_update = how.get("train_every", 1)
    assert summary["environment_steps"] == 400 and abs(summary["updates"] - (400 - 50) / per_update) <= 8
    assert summary["replay_ratio"] == pytest.approx(summary["updates"] * 16 / 400)
    assert summary["steps"] == 400 // max(per_update, how.get("envs", 1))


@pytest.mark.parametrize("how", [{}, {"envs": 2, "prioritized": True}])
def test_gone_on_with_is_as_never_stopped(how, alone, tmp_path):
    how = how | {"save_replay": True, "env_steps": 400, "optimizer": "adam"}
    whole = learned(**how)
    options = RLOptions(**(CHAIN | how | {"out": str(tmp_path / "r")}))
    first = Learning(DQN).run(MPI.COMM_SELF, options, RunContext(pause=1.0))
    assert first.stopped == "paused" and first.step * options.per_step == 200
    rest = learned(**how, out=str(tmp_path / "r"), resume=str(tmp_path / "r"))
    np.testing.assert_array_equal(rest.parameters, whole.parameters)
    names = ("test_return", "episodes", "return_mean", "updates", "environment_steps", "replay_size")
    assert [rest.summary[name] for name in names] == [whole.summary[name] for name in names]
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["environment_steps"] for line in lines if "test_return" in line] == [200, 400]


def test_without_its_replay_memory_it_is_filled_anew(alone, tmp_path):
    options = RLOptions(**(CHAIN | {"env_steps": 400, "out": str(tmp_path / "r")}))
    first = Learning(DQN).run(MPI.COMM_SELF, options, RunContext(pause=1.0))
    rest = learned(env_steps=400, out=str(tmp_path / "r"), resume=str(tmp_path / "r"))
    assert rest.step == 400 and rest.summary["updates"] - first.summary["updates"] <= 200 - 50 + 3
    assert rest.summary["replay_size"] <= 200 and rest.summary["episodes"] > first.summary["episodes"] > 0
