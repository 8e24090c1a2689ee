"""Ranks that are killed, and outlived in the job: python tests/soak/surviving.py SEED FIRST LAST STRATEGY [HOW...]

STRATEGY is allreduce (if none is named), local-sgd, gossip, federated or parameter-server; under Open MPI. Run i draws
ranks, options, who is killed, and when, from (SEED, i): one or two ranks. HOW is --respawn, with which as many are
started anew, or --any-moment.

    when            ranks kill themselves at steps, often the first, the last, or the end of an epoch; servers, and in
                    every third run a worker, when they are about to send some message of the store
    --any-moment    kill -9 from outside, after so many lines of metrics.jsonl and a moment more

Checked: each step and each evaluation has one line, and no step is counted twice; which ranks were lost; that no file
in /dev/shm is left; parameters (float64, to 1e-10) beside the run that lost nobody, with the loss of each step and the
scores of each evaluation; of replicas beside the same in one process, in which the world becomes smaller, or other,
after the same steps (tests/smaller_world.py). Parameter servers train a model that counts (tests/counting.py): each row
has been learned from once in each epoch, and all slices have applied the same number of pushes, that of the steps and
workers where no worker was killed. A run may end with status 1 only in the line that says that no worker or no replica
of a slice is left, or that ranks were lost before the first step of those that were left; such runs are counted apart.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from killed import lines_of, rank_of
from soak import SHARED

sys.path.append(str(Path(__file__).parents[1]))
from smaller_world import Gossip, LocalSGD

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.machine.launcher import clean_environment, mpiexec
from hpcdl.models import for_data
from hpcdl.runs.options import Options

SECONDS = 400  # a job that takes longer hangs; new processes start slowly beside other work
COUNTING = Path(__file__).parents[1] / "counting.py"
ROWS, BATCH, EPOCHS = 240, 16, 4  # of the model that counts
PUSHES = ROWS // BATCH * EPOCHS
COUNTED = ["--data", f"counting:rows,count={ROWS}", "--model", f"counting:Counting,rows={ROWS}", "--dtype", "float64"]
COUNTED += ["--optimizer", "sgd", "--lr", "1", "--schedule", "constant", "--batch-size", str(BATCH)]
COUNTED += ["--epochs", str(EPOCHS), "--progress", "none"]
SAID = "no worker is left", "replicas of slice", "before the first step"
MARK = f"HPCDL_SOAK={os.getpid()}"  # in the environment of our jobs
ANY = "--any-moment"
MOMENT = 0.2  # seconds, at most, from a line of metrics.jsonl to the kill
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


def start(folder, ranks, words, strikes=(), draw=None):
    """Run a program under a library that hands failures over, and strike it; returns its end, and how often it was."""
    command = [mpiexec(), "--with-ft", "ulfm", "-n", str(ranks), sys.executable, *words]
    environment = clean_environment() | dict([MARK.split("=")]) | {"PYTHONPATH": str(COUNTING.parent)}
    environment["PRTE_MCA_state_base_recoverable"] = "1"  # for ranks that were started anew
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryDirectory() as temporary:
        environment["TMPDIR"] = temporary  # what a killed launcher has left stops a later one of the same number
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
        try:
            struck = sum([strike(process, folder / "left", *each, draw) for each in strikes])
            process.wait(SECONDS)
        finally:
            process.kill()
        said.seek(0)
        done = subprocess.CompletedProcess(command, process.returncode, said.read())
    return done, struck


def strike(process, run, lines, moment, draw):
    """Kill a rank, any of those that are there, a moment after the run has so many lines; whether there was one."""
    end = time.monotonic() + SECONDS
    while lines_of(run) < lines and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(moment)
    found = []
    for pid in [int(each) for each in os.listdir("/proc") if each.isdigit()]:
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found += [pid] if MARK.encode() in told and rank_of(pid) is not None else []
    if process.poll() is None and found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(sorted(found)), signal.SIGKILL)
            return 1
    return 0


def moments(draw, count, steps):
    """When so many kills strike: after which line, and how much later."""
    return [(each, draw.random() * MOMENT) for each in sorted(draw.randint(1, steps) for _ in range(count))]


def job(folder, strategy, ranks, *arguments, strikes=(), draw=None):
    """Train in this folder; returns how many ranks were killed from outside, None where it could not go on."""
    words = ["-m", "hpcdl", f"train-{strategy}", *BASE, *LENGTH.get(strategy, ["--epochs", "4"]), *arguments]
    done, struck = start(folder, ranks, words, strikes, draw)
    if done.returncode == 1 and len(strikes) > 1 and SAID[-1] in done.stdout:
        return None
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}"
    return struck


def known(folder):
    """Vectors, losses by step, test losses by step, and what the summary says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    scores = [(line["step"], line["test_loss"]) for line in lines if "test_loss" in line]
    losses = [(line["step"], line["train_loss"]) for line in lines if "test_loss" not in line]
    wanted = list(range(1, summary["steps"] + 1))
    assert [step for step, _ in losses] == wanted, f"{len(losses)} lines of {len(wanted)} steps"
    assert len(scores) == len(dict(scores)), "an evaluation counts twice"
    assert sum(leg["steps"] for leg in summary["legs"]) == summary["steps"]
    return dict(Checkpoint.read(folder).vectors), dict(losses), dict(scores), summary


def smaller_world(strategy, ranks, more, losses):
    """The replicas of a run of these options whose world has become smaller so."""
    told = dict(zip(more[::2], more[1::2], strict=True))
    options = Options(epochs=4, dtype="float64", model="mlp:32")
    data = open_data("digits", dtype="float64")
    model = for_data(options.model, data, options.dtype)
    about = ranks, model, data, lambda: options.make_optimizer(model, 1, data), options.batch_size
    if strategy == "gossip":
        found = Gossip(*about, spec=told["--topology"], method=told.get("--method", "adapt-then-combine"))
    else:
        first, momentum = EPOCH * int(told.get("--local-from", 0)), told.get("--local-momentum", "keep")
        found = LocalSGD(*about, sync_every=int(told["--sync-every"]), first=first, momentum=momentum)
    for loss in losses:
        found.until(loss["step"]).lose(loss["ranks"])
        found.join(loss.get("respawned", 0))
    return found.until(STEPS)


def one(number, seed, strategy, how, wanted, folder):
    """Run number `number`; returns how many ranks were lost, and the seconds until the others went on."""
    draw = random.Random(f"{seed} {number}")
    more, ranks = draw.choice(VARIANTS[strategy]), draw.choice([2, 3, 4])
    lost = draw.sample(range(ranks), draw.randint(1, min(2, ranks - 1)))
    where = {rank: draw.choice([draw.randint(1, STEPS), 1, EPOCH, EPOCH + 1, STEPS]) for rank in lost}
    faults = " ".join(f"kill:rank={rank},step={step}" for rank, step in where.items())
    strikes, respawn = moments(draw, len(lost), STEPS) if ANY in how else [], [each for each in how if each != ANY]
    told = ["--pretend-compute", "4"] if strikes else ["--inject", faults]
    print(f"run {number}: {ranks} ranks, {' '.join(more)}, {strikes or faults}", end=" ", flush=True)
    alike = strategy in ("allreduce", "federated")  # the ranks: then it does not matter how many there are
    if alike and tuple(more) not in wanted:
        job(folder, strategy, 2, *more, "--out", f"whole{len(wanted)}")
        wanted[tuple(more)] = known(folder / f"whole{len(wanted)}")
    shutil.rmtree(folder / "left", ignore_errors=True)
    how_many = ["--out", "left", "--survive", "2", *respawn]
    struck = job(folder, strategy, ranks, *more, *how_many, *told, strikes=strikes, draw=draw)
    assert not os.listdir(OURS), f"left in {OURS}: {os.listdir(OURS)}"
    if struck is None:
        print("ended: lost before the first step", flush=True)
        return 0, []
    mine, steps, found, summary = known(folder / "left")
    losses = summary["losses"]
    if alike:
        vectors, losses_of_all, scores, _ = wanted[tuple(more)]
        assert np.abs(mine["parameters"] - vectors["parameters"]).max() <= 1e-10, "other parameters"
        for these, those in ((steps, losses_of_all), (found, scores)):
            assert these.keys() == those.keys() and all(abs(these[step] - those[step]) <= 1e-9 for step in those)
    else:
        replicas = smaller_world(strategy, ranks, more, losses).w
        assert np.abs(mine["ranks/replica"] - replicas).max() <= 1e-10, "other replicas"
        assert list(found) == [EPOCH, 2 * EPOCH, 3 * EPOCH, STEPS]
    assert summary["steps"] == STEPS
    back, gone = sum(each.get("respawned", 0) for each in losses), sum(len(each["ranks"]) for each in losses)
    assert gone == len(lost) if not strikes else gone <= struck, f"{gone} ranks are told to be lost"  # some too late
    assert back == gone * bool(respawn) and summary["ranks"] == ranks - gone + back
    print(f"{gone} lost,", ", ".join(f"{each['seconds']:.3f} s" for each in losses), flush=True)
    return gone, [each["seconds"] for each in losses]


def served(number, seed, strategy, how, wanted, folder):
    """Likewise, of parameter servers whose slices have replicas."""
    draw = random.Random(f"{seed} {number}")
    servers, workers = draw.choice([2, 2, 3, 4]), draw.choice([1, 2, 3])
    replicas = draw.choice([2, 2, 3]) if servers > 2 else 2
    rule = draw.choice([["bsp"], ["bsp"], ["ssp", "--staleness", "2"], ["async"]])
    lost = draw.sample(range(servers), draw.randint(1, replicas - 1) if draw.random() < 0.7 else min(2, servers - 1))
    killed = {rank: draw.randint(1, 7 * PUSHES * workers // (1 + len(lost))) for rank in lost}
    if workers > 1 and draw.random() < 1 / 3:
        killed[servers + draw.randrange(workers)] = draw.randint(1, 3 * PUSHES * servers)
    kills = ",".join(f"{rank}:{count}" for rank, count in killed.items())
    strikes = moments(draw, min(2, len(killed)), PUSHES) if ANY in how else []
    print(f"run {number}: {servers} servers, {replicas} replicas, {workers} workers, {rule[0]}, {strikes or kills}",
          end=" ", flush=True)  # fmt: skip
    words = [str(COUNTING), "" if strikes else kills, *COUNTED, "--replicas", str(replicas), "--servers", str(servers)]
    words += ["--consistency", *rule, "--out", "left", *(["--pretend-compute", "12"] if strikes else [])]
    shutil.rmtree(folder / "left", ignore_errors=True)
    done, _ = start(folder, servers + workers, words, strikes, draw)
    ends = SAID if len(killed) > 1 else SAID[:1] if workers == 1 else ()
    if done.returncode == 1 and any(each in done.stdout for each in ends):
        print("ended: no worker was left, no replica, or before the first step", flush=True)
        return 0, []
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}"
    vectors, _, _, summary = known(folder / "left")
    losses, visits = summary.get("losses", []), -vectors["parameters"]
    assert np.abs(visits - EPOCHS).max() < 1e-9, f"rows were learned from {visits.min()} to {visits.max()} times"
    assert summary["steps"] == PUSHES
    applied, gone = set(summary["pushes_applied"]), sum(len(each["ranks"]) for each in losses)
    assert len(applied) == 1, f"slices have applied {applied} pushes"
    if len(summary["pushes_applied"]) == servers - gone:  # no worker was lost
        assert applied == {PUSHES * (1 if rule[0] == "async" else workers)}, applied
    seconds = [each["seconds"] for each in losses]
    print(f"{gone} lost, {applied.pop()} pushes,", ", ".join(f"{each:.3f} s" for each in seconds), flush=True)
    return gone, seconds


def main(seed, first, last, strategy="allreduce", *how):
    """Runs `first` to `last`, that one left out."""
    wanted, seconds, losses, ended = {}, [], 0, 0
    run = served if strategy == "parameter-server" else one
    OURS.mkdir()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(first, last):
                gone, took = run(number, seed, strategy, how, wanted, Path(folder))
                losses, seconds, ended = losses + gone, seconds + took, ended + (not took)
    finally:
        shutil.rmtree(OURS)
    print(f"{strategy}: {last - first} runs, {losses} ranks lost; until the others went on: median ", end="")
    print(f"{statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s; {ended} runs lost nobody, or ended")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
