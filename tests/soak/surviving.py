"""Ranks that are killed, and outlived in the job: python tests/soak/surviving.py SEED FIRST LAST STRATEGY --respawn

STRATEGY is allreduce (if none is named), local-sgd, gossip or federated; under Open MPI. Run i draws ranks, options,
and which one or two ranks are killed at which steps from (SEED, i): often the first, the last, or the end of an epoch.
With --respawn as many are started anew.
Checked: that no step is missing and none counted twice, which ranks were lost, that no file in /dev/shm is left, and
parameters (float64, to 1e-10) beside the run that lost nobody, with the scores of each evaluation; of replicas beside
the same in one process, in which the world becomes smaller, or other, after the same steps (tests/smaller_world.py).
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from soak import SHARED

sys.path.append(str(Path(__file__).parents[1]))
from smaller_world import Gossip, LocalSGD

from hpcdl.comm.launcher import clean_environment, mpiexec
from hpcdl.data import open_data
from hpcdl.models import for_data
from hpcdl.runs.checkpoint import Checkpoint
from hpcdl.runs.options import Options

SECONDS = 120  # a job that takes longer hangs
OURS = SHARED / f"hpcdl-soak-{os.getpid()}"  # where the library has the memory that ranks share
STEPS, EPOCH = 180, 45
BASE = ["--data", "digits", "--model", "mlp:32", "--dtype", "float64"]
LENGTH = {"federated": ["--rounds", str(STEPS), "--clients", "12", "--fraction", "0.5", "--local-epochs", "1"]}
VARIANTS = {
    "allreduce": [
        [],
        ["--overlap"],
        ["--optimizer", "adam", "--lr", "0.01"],
        ["--checkpoint-every", "7"],
        ["--average", "from=1"],
        ["--allreduce", "ring"],
        ["--placement", "streamed"],
        ["--evaluate-every", "2", "--optimizer", "momentum"],
    ],
    "local-sgd": [
        ["--sync-every", "8"],
        ["--sync-every", "1", "--checkpoint-every", "7"],
        ["--sync-every", "4", "--local-momentum", "average"],
        ["--sync-every", "5", "--local-momentum", "reset", "--local-from", "1"],
    ],
    "gossip": [
        ["--topology", "ring"],
        ["--topology", "complete", "--method", "dpsgd"],
        ["--topology", "one-peer", "--checkpoint-every", "7"],
        ["--topology", "exponential", "--method", "gradient-tracking"],
        ["--topology", "star", "--method", "gradient-tracking"],
    ],
    "federated": [
        [],
        ["--late", "0.2", "--server-optimizer", "adam", "--server-lr", "0.01"],
        ["--secure", "--drop-out", "0.1", "--clients", "4", "--fraction", "1"],
        ["--checkpoint-every", "7", "--partition", "dirichlet:0.3"],
    ],
}


def job(folder, strategy, ranks, *arguments):
    """Train in this folder under a library that hands failures over; returns what it has said."""
    command = [mpiexec(), "--with-ft", "ulfm", "-n", str(ranks), sys.executable, "-m", "hpcdl"]
    command += [f"train-{strategy}", *BASE, *LENGTH.get(strategy, ["--epochs", "4"]), *arguments]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), timeout=SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def known(folder):
    """Parameters, test loss by step, and what the summary says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["test_loss"] for line in lines if "test_loss" in line}
    steps = [line["step"] for line in lines if "test_loss" not in line]
    assert len(steps) == len(set(steps)), "a step counts twice"
    return dict(Checkpoint.read(folder).vectors), scores, json.loads((folder / "summary.json").read_text())


def smaller_world(strategy, ranks, more, losses):
    """The replicas of a run of these options whose world has become smaller so."""
    told = dict(zip(more[::2], more[1::2], strict=True))
    options = Options(epochs=4, dtype="float64", model="mlp:32")
    data = open_data("digits", dtype="float64")
    model = for_data(options.model, data, options.dtype)
    about = ranks, model, data, lambda: options.make_optimizer(model, options.plan(1, data)), options.batch_size
    if strategy == "gossip":
        found = Gossip(*about, spec=told["--topology"], method=told.get("--method", "adapt-then-combine"))
    else:
        first, momentum = EPOCH * int(told.get("--local-from", 0)), told.get("--local-momentum", "keep")
        found = LocalSGD(*about, sync_every=int(told["--sync-every"]), first=first, momentum=momentum)
    for loss in losses:
        found.until(loss["step"]).lose(loss["ranks"])
        found.join(loss.get("respawned", 0))
    return found.until(STEPS)


def one(number, seed, strategy, respawn, wanted, folder):
    """Run number `number`; returns the seconds until the others went on."""
    draw = random.Random(f"{seed} {number}")
    more, ranks = draw.choice(VARIANTS[strategy]), draw.choice([2, 3, 4])
    lost = draw.sample(range(ranks), draw.randint(1, min(2, ranks - 1)))
    where = {rank: draw.choice([draw.randint(1, STEPS), 1, EPOCH, EPOCH + 1, STEPS]) for rank in lost}
    faults = " ".join(f"kill:rank={rank},step={step}" for rank, step in where.items())
    print(f"run {number}: {ranks} ranks, {' '.join(more)}, {faults}", end=" ", flush=True)
    alike = strategy in ("allreduce", "federated")  # the ranks: then it does not matter how many there are
    if alike and tuple(more) not in wanted:
        job(folder, strategy, 2, *more, "--out", f"whole{len(wanted)}")
        wanted[tuple(more)] = known(folder / f"whole{len(wanted)}")
    job(folder, strategy, ranks, *more, "--out", "left", "--force", "--survive", "2", *respawn, "--inject", faults)
    assert not os.listdir(OURS), f"left in {OURS}: {os.listdir(OURS)}"
    mine, found, summary = known(folder / "left")
    losses = summary["losses"]
    if alike:
        vectors, scores, _ = wanted[tuple(more)]
        assert np.abs(mine["parameters"] - vectors["parameters"]).max() <= 1e-10, "other parameters"
        assert scores.keys() == found.keys() and all(abs(scores[step] - found[step]) <= 1e-9 for step in scores)
    else:
        replicas = smaller_world(strategy, ranks, more, losses).w
        assert np.abs(mine["ranks/replica"] - replicas).max() <= 1e-10, "other replicas"
        assert list(found) == [EPOCH, 2 * EPOCH, 3 * EPOCH, STEPS]
    assert sum(leg["steps"] for leg in summary["legs"]) == summary["steps"] == STEPS
    back = sum(each.get("respawned", 0) for each in losses)
    assert sum(len(each["ranks"]) for each in losses) == len(lost) and back == len(lost) * bool(respawn)
    assert summary["ranks"] == ranks - len(lost) + back
    print(", ".join(f"{each['seconds']:.3f} s" for each in losses), flush=True)
    return [each["seconds"] for each in losses]


def main(seed, first, last, strategy="allreduce", *respawn):
    """Runs `first` to `last`, that one left out."""
    wanted, seconds = {}, []
    OURS.mkdir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(first, last):
                seconds += one(number, seed, strategy, respawn, wanted, Path(folder))
    finally:
        shutil.rmtree(OURS)
    print(f"{strategy}: {last - first} runs, {len(seconds)} losses; until the others went on: median ", end="")
    print(f"{statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
