"""DQN: on a chain it finds the values that are known; it is the same to the bit, also when it is gone on with."""

import numpy as np
import pytest
from agent_ranks import CHAIN, assert_learned
from agent_ranks import learned_by_dqn as learned
from mpi4py import MPI
from written_runs import lines

from hpcdl.rl.options import DQN, RLOptions
from hpcdl.rl.training import Learning
from hpcdl.runs.context import RunContext


@pytest.mark.long
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
    assert_learned(learned(env_steps=2400, seed=1, **how), 0.03)


def test_n_steps_are_on_policy_and_the_greedy_one_wins(alone):
    assert learned(env_steps=2400, n_step=3, seed=2).summary["test_return_min"] == 1.0


@pytest.mark.parametrize("how", [{"envs": 2, "prioritized": True}, {"envs": 2, "train_every": 4}])
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


def test_gone_on_with_is_as_never_stopped(alone, tmp_path):
    how = {"envs": 2, "prioritized": True, "save_replay": True, "env_steps": 400, "optimizer": "adam"}
    whole = learned(**how)
    options = RLOptions(**(CHAIN | how | {"out": str(tmp_path / "r")}))
    first = Learning(DQN).run(MPI.COMM_SELF, options, RunContext(pause=1.0))
    assert first.stopped == "paused" and first.step * options.per_step == 200
    rest = learned(**how, out=str(tmp_path / "r"), resume=str(tmp_path / "r"))
    np.testing.assert_array_equal(rest.parameters, whole.parameters)
    names = ("test_return", "episodes", "return_mean", "updates", "environment_steps", "replay_size")
    assert [rest.summary[name] for name in names] == [whole.summary[name] for name in names]
    evaluations = [line for line in lines(tmp_path / "r") if "test_return" in line]
    assert [line["environment_steps"] for line in evaluations] == [200, 400]


def test_without_its_replay_memory_it_is_filled_anew(alone, tmp_path):
    options = RLOptions(**(CHAIN | {"env_steps": 400, "out": str(tmp_path / "r")}))
    first = Learning(DQN).run(MPI.COMM_SELF, options, RunContext(pause=1.0))
    rest = learned(env_steps=400, out=str(tmp_path / "r"), resume=str(tmp_path / "r"))
    assert rest.step == 400 and rest.summary["updates"] - first.summary["updates"] <= 200 - 50 + 3
    assert rest.summary["replay_size"] <= 200 and rest.summary["episodes"] > first.summary["episodes"] > 0
