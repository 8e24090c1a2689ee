"""Ranks that are killed, and outlived in the job: python tests/soak/surviving.py SEED FIRST LAST (under Open MPI)

Run i draws ranks, options, and which one or two ranks are killed at which steps from (SEED, i): often the first, the
last, or the end of an epoch. Checked against the run that lost nobody: parameters (float64, to 1e-10), scores of each
evaluation, that no step is missing and none counted twice, which ranks were lost, and that no file in /dev/shm is left.
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

from hpcdl.comm.launcher import clean_environment, mpiexec
from hpcdl.runs.checkpoint import Checkpoint

SECONDS = 120  # a job that takes longer hangs
OURS = SHARED / f"hpcdl-soak-{os.getpid()}"  # where the library has the memory that ranks share
STEPS, EPOCH = 180, 45
BASE = ["train-allreduce", "--data", "digits", "--model", "mlp:32", "--dtype", "float64", "--epochs", "4"]
VARIANTS = [
    [],
    ["--overlap"],
    ["--optimizer", "adam", "--lr", "0.01"],
    ["--checkpoint-every", "7"],
    ["--average", "from=1"],
    ["--allreduce", "ring"],
    ["--placement", "streamed"],
    ["--evaluate-every", "2", "--optimizer", "momentum"],
]


def job(folder, ranks, *arguments):
    """Train in this folder under a library that hands failures over; returns what it has said."""
    command = [mpiexec(), "--with-ft", "ulfm", "-n", str(ranks), sys.executable, "-m", "hpcdl", *BASE, *arguments]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), timeout=SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def known(folder):
    """Parameters, test loss by step, and what the summary says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["test_loss"] for line in lines if "test_loss" in line}
    steps = [line["step"] for line in lines if "test_loss" not in line]
    assert len(steps) == len(set(steps)), "a step counts twice"
    return Checkpoint.read(folder).vectors["parameters"], scores, json.loads((folder / "summary.json").read_text())


def one(number, seed, wanted, folder):
    """Run number `number`; returns the seconds until the others went on."""
    draw = random.Random(f"{seed} {number}")
    more, ranks = draw.choice(VARIANTS), draw.choice([2, 3, 4])
    lost = draw.sample(range(ranks), draw.randint(1, min(2, ranks - 1)))
    where = {rank: draw.choice([draw.randint(1, STEPS), 1, EPOCH, EPOCH + 1, STEPS]) for rank in lost}
    faults = " ".join(f"kill:rank={rank},step={step}" for rank, step in where.items())
    print(f"run {number}: {ranks} ranks, {' '.join(more)}, {faults}", end=" ", flush=True)
    if tuple(more) not in wanted:
        job(folder, 2, *more, "--out", f"whole{len(wanted)}")
        wanted[tuple(more)] = known(folder / f"whole{len(wanted)}")
    job(folder, ranks, *more, "--out", "left", "--force", "--survive", "2", "--inject", faults)
    assert not os.listdir(OURS), f"left in {OURS}: {os.listdir(OURS)}"
    (vector, scores, _), (mine, found, summary) = wanted[tuple(more)], known(folder / "left")
    assert np.abs(mine - vector).max() <= 1e-10, "other parameters"
    assert scores.keys() == found.keys() and all(abs(scores[step] - found[step]) <= 1e-9 for step in scores)
    losses = summary["losses"]
    assert sum(leg["steps"] for leg in summary["legs"]) == summary["steps"] == STEPS
    assert sum(len(each["ranks"]) for each in losses) == len(lost) and summary["ranks"] == ranks - len(lost)
    print(", ".join(f"{each['seconds']:.3f} s" for each in losses), flush=True)
    return [each["seconds"] for each in losses]


def main(seed, first, last):
    """Runs `first` to `last`, that one left out."""
    wanted, seconds = {}, []
    OURS.mkdir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(first, last):
                seconds += one(number, seed, wanted, Path(folder))
    finally:
        shutil.rmtree(OURS)
    print(f"{last - first} runs, {len(seconds)} losses; until the others went on: median ", end="")
    print(f"{statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
