"""--survive of local SGD, gossip and federated averaging: a rank is killed, and the others are a smaller world."""

import json
from pathlib import Path

import numpy as np
import pytest
from smaller_world import Gossip, LocalSGD
from survived import EPOCH, KILL, ROUNDS, SGD, STEPS, ULFM, evaluations, losses, with_ulfm, world

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"


def lost(folder, ranks):
    """What the summary says of the one loss; checked: who is gone, and that no step is missing or counted twice."""
    summary = json.loads((folder / "summary.json").read_text())
    (loss,) = summary["losses"]
    assert loss["ranks"] == ranks and summary["ranks"] == loss["left"] and summary["stopped"] == "finished"
    assert sum(leg["steps"] for leg in summary["legs"]) == summary["steps"]
    return loss


@with_ulfm
@pytest.mark.parametrize(
    "step, rank, settings, more",
    [
        pytest.param(30, 2, {"sync_every": 8}, "", id="within a round"),
        pytest.param(EPOCH, 0, {"sync_every": 4, "momentum": "average"}, "--checkpoint-every 5", id="epoch"),
        pytest.param(STEPS, 1, {"sync_every": 5, "outer": "nesterov"}, "--outer nesterov --outer-lr 0.7", id="last"),
    ],
)
def test_local_sgd(step, rank, settings, more, launch, interfere, tmp_path):
    told = {"sync_every": "--sync-every", "momentum": "--local-momentum"}
    how = [str(word) for name, value in settings.items() if name in told for word in (told[name], value)]
    program = interfere(step, rank, KILL, "train_local_sgd")
    done = launch(3, program, *SGD, *how, *more.split(), "--out", "a", "--survive", "1", given=ULFM, check=0)
    loss, every = lost(tmp_path / "a", [rank]), settings["sync_every"]
    assert loss["step"] == (step - 1) // every * every
    wanted = world(LocalSGD, 3, **settings).until(loss["step"])
    wanted.lose([rank])
    wanted.until(STEPS)
    found = Checkpoint.read(tmp_path / "a").vectors
    assert np.abs(found["parameters"] - wanted.mean).max() <= 1e-10
    assert np.abs(found["ranks/replica"] - wanted.w).max() <= 1e-10
    assert list(evaluations(tmp_path / "a")) == [EPOCH, STEPS]
    assert f"rank {rank} is gone after step {loss['step'] + loss['redone']}; 2 ranks go on" in done.stdout


@with_ulfm
def test_one_rank_that_is_left_goes_on_without_the_noise_scale(launch, interfere, tmp_path):
    program = interfere(30, 1, KILL, "train_allreduce")
    launch(2, program, *SGD, "--noise-scale", "--out", "a", "--survive", "1", given=ULFM, check=0)
    lost(tmp_path / "a", [1])


@with_ulfm
@pytest.mark.parametrize(
    "step, rank, method, spec",
    [(17, 0, "adapt-then-combine", "ring"), (EPOCH, 3, "dpsgd", "one-peer"), (30, 1, "gradient-tracking", "hypercube")],
)
def test_gossip(step, rank, method, spec, launch, interfere, tmp_path):
    """Ranks on a graph are at most a step apart: those that were ahead do that one again."""
    program = interfere(step, rank, KILL, "train_gossip")
    how = ["--method", method, "--topology", spec, "--lr", "0.05"]
    launch(4, program, *SGD, *how, "--out", "a", "--survive", "1", given=ULFM, check=0)
    loss = lost(tmp_path / "a", [rank])
    assert loss["step"] == step - 1 and loss["redone"] <= 1
    wanted = world(Gossip, 4, spec=spec, method=method).until(loss["step"])
    wanted.lose([rank])
    wanted.until(STEPS)
    assert np.abs(Checkpoint.read(tmp_path / "a").vectors["ranks/replica"] - wanted.w).max() <= 1e-10
    assert list(evaluations(tmp_path / "a")) == [EPOCH, STEPS]


@with_ulfm
@pytest.mark.parametrize("step, rank, more", [(3, 0, ["--partition", "by-label"]), (6, 1, ["--secure", "--late", "0"])])
def test_federated(step, rank, more, launch, run_on, interfere, tmp_path):
    """The clients of a round are those of the round, wherever they live: to the bit the run that lost nobody."""
    script = SCRIPTS / "train_federated.py"
    run_on(2, script, *ROUNDS, *more, "--out", tmp_path / "whole", check=0)
    program = interfere(step, rank, KILL, "train_federated")
    launch(3, program, *ROUNDS, *more, "--out", "left", "--survive", "1", given=ULFM, check=0)
    whole, left = (Checkpoint.read(tmp_path / name).vectors for name in ("whole", "left"))
    assert whole.keys() == left.keys() and all((whole[name] == left[name]).all() for name in whole)
    for known in (losses, evaluations):
        assert known(tmp_path / "left") == pytest.approx(known(tmp_path / "whole"), rel=1e-12)
    lost(tmp_path / "left", [rank])


@with_ulfm
@pytest.mark.parametrize(
    "script, more, said",
    [
        ("gossip", ["--method", "adpsgd"], "take --method adapt-then-combine, dpsgd or gradient-tracking"),
        ("gossip", ["--method", "detag"], "detag needs all its ranks"),
        ("gossip", ["--topology", "edges"], "edges.txt has weights, and has none for fewer ranks"),
    ],
)
def test_refusals(script, more, said, launch, tmp_path):
    (tmp_path / "edges.txt").write_text("0 1 0.3\n1 2 0.3\n2 3 0.3\n")
    more = [word.replace("edges", "edges.txt") for word in more]
    program = SCRIPTS / f"train_{script}.py"
    done = launch(4, program, *SGD, *more, "--out", "none", "--survive", "1", given=ULFM, check=2)
    assert said in done.stderr and done.stderr.count("error") == 1
