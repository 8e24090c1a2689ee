"""--survive with --respawn: a rank is killed, another one is started and joins, and there are as many as before."""

import json
from pathlib import Path

import numpy as np
import pytest
from smaller_world import Gossip, LocalSGD
from survived import KILL, ROUNDS, SGD, STEPS, ULFM, evaluations, with_ulfm, world

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
BACK = ["--survive", "1", "--respawn"]
RING = "--topology ring --lr 0.05"
TRACKING = "--topology hypercube --lr 0.05 --method gradient-tracking"
RECOVERABLE = {"PRTE_MCA_state_base_recoverable": "1"}  # the launcher's, for ranks that were started anew


def losses(folder, ranks):
    """What the summary says of them; checked: how many train at the end, and that each step counts once."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ranks"] == ranks and summary["stopped"] == "finished"
    assert sum(leg["steps"] for leg in summary["legs"]) == summary["steps"]
    assert all(each["respawned"] == 1 for each in summary["losses"])
    return summary["losses"]


@with_ulfm
@pytest.mark.parametrize(
    "step, rank, more",
    [
        pytest.param(30, 2, ["--optimizer", "adam", "--lr", "0.01"], id="any"),
        pytest.param(1, 0, ["--checkpoint-every", "5"], id="first"),
    ],
)
def test_all_reduce_has_as_many_ranks_as_before(step, rank, more, launch, run_on, interfere, tmp_path):
    run_on(2, SCRIPTS / "train_allreduce.py", *SGD, *more, "--out", tmp_path / "whole", check=0)
    program, out = interfere(step, rank, KILL), tmp_path / "back"
    done = launch(3, program, *SGD, *more, "--out", out, *BACK, given=ULFM, check=0)
    whole, back = (Checkpoint.read(tmp_path / name) for name in ("whole", "back"))
    assert whole.vectors.keys() == back.vectors.keys()
    for name, vector in whole.vectors.items():
        assert np.abs(back.vectors[name] - vector).max() <= 1e-12 * np.abs(vector).max()
    assert evaluations(out) == pytest.approx(evaluations(tmp_path / "whole"), rel=1e-10)
    (loss,) = losses(out, 3)
    assert loss["ranks"] == [rank] and loss["left"] == 2
    assert f"rank {rank} is gone after step {loss['step']}; 3 ranks go on, of which 1 is new" in done.stdout


@with_ulfm
def test_a_rank_that_was_started_anew_is_lost_too(launch, run_on, interfere, tmp_path):
    run_on(2, SCRIPTS / "train_allreduce.py", *SGD, "--out", tmp_path / "whole", check=0)
    program = interfere(12, 2, KILL)
    again = (
        "def again(self, loss, batch):\n"
        "    record(self, loss, batch)\n"
        f"    if self.step == 20 and training.is_new() and len(self.survivor.losses) == 1: {KILL}\n"
    )
    program.write_text(program.read_text().replace("run.Run.record = record\n", f"{again}run.Run.record = again\n"))
    more = ["--out", tmp_path / "back", "--survive", "2", "--respawn"]
    launch(3, program, *SGD, *more, given=ULFM, check=0, **RECOVERABLE)
    whole, back = (Checkpoint.read(tmp_path / name).vectors["parameters"] for name in ("whole", "back"))
    assert np.abs(whole - back).max() <= 1e-12
    assert [loss["ranks"] for loss in losses(tmp_path / "back", 3)] == [[2], [2]]


@with_ulfm
@pytest.mark.parametrize(
    "kind, how, settings, step, rank, ranks",
    [
        pytest.param(LocalSGD, "--sync-every 8", {"sync_every": 8}, 30, 2, 3, id="local SGD"),
        pytest.param(Gossip, RING, {"spec": "ring"}, 17, 0, 3, id="gossip"),
        pytest.param(Gossip, TRACKING, {"spec": "hypercube", "method": "gradient-tracking"}, 30, 1, 4, id="tracking"),
    ],
)
def test_a_replica_is_that_of_its_neighbour(kind, how, settings, step, rank, ranks, launch, interfere, tmp_path):
    program = interfere(step, rank, KILL, "train_local_sgd" if kind is LocalSGD else "train_gossip")
    launch(ranks, program, *SGD, *how.split(), "--out", "a", *BACK, given=ULFM, check=0)
    (loss,) = losses(tmp_path / "a", ranks)
    wanted = world(kind, ranks, **settings).until(loss["step"])
    wanted.lose([rank])
    wanted.join(1)
    wanted.until(STEPS)
    assert np.abs(Checkpoint.read(tmp_path / "a").vectors["ranks/replica"] - wanted.w).max() <= 1e-10


@with_ulfm
def test_federated_is_to_the_bit_the_run_that_lost_nobody(launch, run_on, interfere, tmp_path):
    run_on(2, SCRIPTS / "train_federated.py", *ROUNDS, "--out", tmp_path / "whole", check=0)
    launch(3, interfere(3, 0, KILL, "train_federated"), *ROUNDS, "--out", "back", *BACK, given=ULFM, check=0)
    whole, back = (Checkpoint.read(tmp_path / name).vectors for name in ("whole", "back"))
    assert whole.keys() == back.keys() and all((whole[name] == back[name]).all() for name in whole)
    losses(tmp_path / "back", 3)
