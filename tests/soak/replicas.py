"""Servers of replicated slices that are killed: python tests/soak/replicas.py KILLS SEED [FIRST] (under Open MPI)

Runs, until so many servers have been killed. Run i draws from (SEED, i): servers, replicas, workers, consistency, and
who is killed when it is about to send which message: one server or two, and in every third run a worker as well. The
model counts (tests/counting.py). Checked: each row has been learned from once in each epoch, each step is recorded
once, all slices have applied the same number of pushes, which is that of the steps and workers where no worker was
killed. Where several were killed and no replica of a slice was left, or ranks before the first step of those that were
left, the run has to end with the line that says so, and status 1; such runs are counted apart.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hpcdl.comm.launcher import clean_environment, mpiexec
from hpcdl.runs.checkpoint import Checkpoint

SECONDS = 150  # a job that takes longer hangs
PROGRAM = Path(__file__).parents[1] / "counting.py"
ROWS, BATCH, EPOCHS = 240, 16, 4
STEPS = ROWS // BATCH * EPOCHS
BASE = ["--data", f"counting:rows,count={ROWS}", "--model", f"counting:Counting,rows={ROWS}", "--dtype", "float64"]
BASE += ["--optimizer", "sgd", "--lr", "1", "--schedule", "constant", "--batch-size", str(BATCH)]
BASE += ["--epochs", str(EPOCHS), "--progress", "none", "--replicas"]
NOT_STARTED, TRIES = "listener thread failed to start", 3  # what the launcher says now and then of itself
SAID = "replicas of slice", "before the first step"


def one(number, seed, folder):
    """Run number `number`; returns how many servers were killed and outlived, and the seconds until others went on."""
    draw = random.Random(f"{seed} {number}")
    servers, workers = draw.choice([2, 2, 3, 4]), draw.choice([1, 2, 3])
    replicas = draw.choice([2, 2, 3]) if servers > 2 else 2
    how = draw.choice([["bsp"], ["bsp"], ["ssp", "--staleness", "2"], ["async"]])
    lost = draw.sample(range(servers), draw.randint(1, replicas - 1) if draw.random() < 0.7 else min(2, servers - 1))
    killed = {rank: draw.randint(1, 7 * STEPS * workers // (1 + len(lost))) for rank in lost}
    if workers > 1 and draw.random() < 1 / 3:
        killed[servers + draw.randrange(workers)] = draw.randint(1, 3 * STEPS * servers)
    kills = ",".join(f"{rank}:{count}" for rank, count in killed.items())
    print(
        f"run {number}: {servers} servers, {replicas} replicas, {workers} workers, {how[0]}, {kills}",
        end=" ",
        flush=True,
    )
    options = [*BASE, str(replicas), "--servers", str(servers), "--consistency", *how, "--out", "run", "--force"]
    command = [mpiexec(), "--with-ft", "ulfm", "-n", str(servers + workers), sys.executable, str(PROGRAM), kills]
    environment = clean_environment() | {"PYTHONPATH": str(PROGRAM.parent)}
    for _ in range(TRIES):
        done = subprocess.run(
            [*command, *options], cwd=folder, env=environment, timeout=SECONDS, capture_output=True, text=True
        )
        if NOT_STARTED not in done.stderr:
            break
    if done.returncode == 1 and len(killed) > 1 and any(each in done.stderr for each in SAID):
        print("ended: no replica was left", flush=True)
        return 0, []
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    summary = json.loads((folder / "run/summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "test_loss" not in line]
    gone = sum(len(each["ranks"]) for each in summary.get("losses", []))
    visits = -Checkpoint.read(folder / "run").vectors["parameters"]
    assert np.abs(visits - EPOCHS).max() < 1e-9, f"rows were learned from {visits.min()} to {visits.max()} times"
    assert steps == list(range(1, STEPS + 1)), f"{len(steps)} steps are recorded, {len(set(steps))} of them once"
    assert sum(leg["steps"] for leg in summary["legs"]) == summary["steps"] == STEPS
    applied = set(summary["pushes_applied"])
    assert len(applied) == 1
    if all(rank < servers for rank in killed):
        assert applied == {STEPS * (1 if how[0] == "async" else workers)}, applied
    seconds = [each["seconds"] for each in summary.get("losses", [])]
    outlived = servers - len(summary["pushes_applied"])
    print(f"{gone} gone, {applied.pop()} pushes,", ", ".join(f"{each:.3f} s" for each in seconds), flush=True)
    return outlived, seconds


def main(kills, seed, first=0):
    """Runs from `first` on, until so many servers were killed."""
    outlived, seconds, runs, ended = 0, [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while outlived < kills:
            count, took = one(first + runs, seed, Path(folder))
            outlived, runs, ended = outlived + count, runs + 1, ended + (not took and not count)
            seconds += took
    print(f"{runs} runs, {outlived} servers killed and outlived; until the others went on: median ", end="")
    print(
        f"{statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s; {ended} runs lost nobody, or all replicas"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
