"""Short runs of reinforcement learning, each a job of its own: python tests/soak/acting.py SEED FIRST LAST

Run i draws program, ranks, roles and options from (SEED, i). Its environment raises now and then, or three times in a
row on one rank; some runs are told to stop by a signal, to one rank or to all, or by their time limit; some go on from
there, on the same number of ranks or on another. Checked: a job ends in time, and as it should; it has done its steps,
counted its bytes, and said in a line what went wrong; nothing half-written and no file in /dev/shm is left."""

import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from soak import as_arguments

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.judging import Job, clean

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.runs.signals import STATUS

AGES = 100_000_000  # more environment steps than a run gets to that is stopped
ENVIRONMENT = """
import os, random, signal
from mpi4py import MPI
from chains import Chain

RANK, TAKEN, NOISE = MPI.COMM_WORLD.rank, [0], random.Random(os.getpid())

class Wild(Chain):
    def __init__(self, chance, fails, sends, rank):
        super().__init__()
        self.chance, self.fails, self.sends, self.rank = chance, fails, sends, rank
    def step(self, action):
        TAKEN[0] += 1
        if self.rank == RANK and TAKEN[0] == self.sends and not os.path.exists("sent"):
            open("sent", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
        if (self.rank == RANK and TAKEN[0] >= self.fails > 0) or NOISE.random() < self.chance:
            raise OSError("the emulator is gone")
        return super().step(action)

def wild(chance=0.0, fails=0, sends=0, rank=-1):
    return Wild(chance, fails, sends, rank)
"""


def dqn(one) -> tuple[int, dict, range]:
    """How many ranks, the options of its roles, and which ranks act."""
    return 1, {}, range(1)


def gorila(one) -> tuple[int, dict, range]:
    servers, bundles = one(1, 1, 2), one(True, False)
    how = {"servers": servers, "sync-every": one(1, 4, 16), "outliers": one(0, 1, 5)}
    if bundles:
        ranks = servers + one(1, 2, 3)
        more = {"consistency": one("bsp", "async"), "max-staleness": one(0, 0, 2)}
        return ranks, how | more, range(servers, ranks)
    learners, chunk = one(1, 2), one(1, 4, 16)
    actors = learners + one(0, 1)
    named = one({"learners": learners}, {"learners": learners, "actors": actors})
    ranks = servers + learners + actors
    return ranks, how | named | {"chunk": chunk, "max-staleness": one(0, 2)}, range(servers + learners, ranks)


def apex(one) -> tuple[int, dict, range]:
    learners, replays = one(1, 1, 2), one(0, 1, 2)
    actors = max(learners if replays == 0 else replays, one(1, 2))
    how = {"learners": learners, "replays": replays, "chunk": one(1, 4, 16), "broadcast-every": one(1, 8)}
    how["batch-size"] = one(8, 32)  # of which each learner has a part
    how |= {"uniform": one(True, False), "free": one(True, False, False), "epsilon": one("0.4", "linear:steps=200")}
    ranks = learners + replays + actors
    return ranks, how | one({}, {"actors": actors}), range(learners + replays, ranks)


PROGRAMS = {"train-dqn": dqn, "train-gorila": gorila, "train-apex": apex}
OFTEN = ("train-dqn", *["train-gorila"] * 4, *["train-apex"] * 4)  # how often which


def draw(seed: int, i: int) -> tuple[str, int, dict, dict]:
    """The program of run i, its ranks, its options by name; and how it ends: `end`, and what follows."""
    source = random.Random(f"{seed} {i}")

    def one(*values):
        return values[source.randrange(len(values))]

    program = one(*OFTEN)
    ranks, roles, actors = PROGRAMS[program](one)
    end = one("steps", "steps", "time limit", "signal", "signal to all", "failure")
    every, acting = one(1, 2, 4), len(actors)
    after = source.randint(1, 300)  # of the rank that it happens on
    envs = every * one(1, 2) if one(True, False) else 1
    wild = {"chance": one(0.0, 0.001, 0.005)}  # three times in a row once in millions of steps
    wild |= {"signal": {"sends": after}, "failure": {"fails": after}}.get(end, {})
    if end in ("signal", "failure"):
        wild["rank"] = one(*actors)
    steps = source.randint(20, 100) * 16
    options = {
        **{"env": "wild:wild", "env-options": ",".join(f"{name}={value}" for name, value in wild.items())},
        **{"env-steps": steps if end == "steps" else AGES, "time-limit": 0.5 * (end == "time limit")},
        **{"train-every": every, "envs": envs, "batch-size": one(1, 8, 32), "learning-starts": one(0, 50, 200)},
        **{"replay": 2000, "prioritized": one(True, False), "n-step": one(1, 3), "double": one("yes", "no")},
        **{"target-every": one(0, 10), "model": one("mlp:8", "mlp:8,dueling"), "optimizer": one("sgd", "adam")},
        **{"clip-norm": one(0, 10), "epsilon": one("0.5", "linear:steps=200"), "dtype": one("float32", "float64")},
        **{"evaluate-every": 48 * one(5, 50) * acting, "checkpoint-every": one(0, 48 * acting, 480 * acting)},
        **{"episodes": 2, "save-replay": one(True, False), "seed": i, "lr": 0.001, "progress": "none"},
    } | roles  # fmt: skip
    how = {"end": end, "seconds": source.uniform(0.5, 6), "more": one(0, 480, 960), "elsewhere": one(0, 0, 1)}
    return program, ranks, options, how


def job(ranks: int, arguments: list[str], folder: Path, after: float = 0.0) -> Job:
    """Run it, and send all ranks a signal after so many seconds; Wrong where it hangs, or leaves what it should not."""

    def strike(running: Job) -> None:
        time.sleep(after)
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGUSR1)

    done = Job(ranks, arguments, folder, strike=strike if after else None)
    clean(done, folder)
    return done


def check(done: Job, program: str, options: dict, how: dict, folder: Path) -> int:
    """Whether it has ended as it should; returns its last environment step, or 0 where it cannot be gone on with."""
    said, status = done.text, done.status
    assert "Traceback" not in said, said
    if how["end"] == "failure":
        assert status == 1, f"status {status}\n{said}"
        lines = [line for line in said.splitlines() if "wild" in line]
        assert len(lines) == 1 and "has raised three times in a row: OSError: the emulator" in lines[0], said
        return 0
    if how["end"] == "signal to all" and status != STATUS:
        assert not folder.exists(), f"status {status}\n{said}"
        return 0  # the signal was there before the program
    assert status == (STATUS if "signal" in how["end"] else 0), f"status {status}\n{said}"
    step = Checkpoint.read(folder).attributes["step"]
    if status == STATUS:
        return step
    found = json.loads((folder / "summary.json").read_text())
    assert found["steps"] == step and found["stopped"] == {"steps": "finished"}.get(how["end"], how["end"])
    if how["end"] == "steps":
        assert found["environment_steps"] >= options["env-steps"], found["environment_steps"]
    if program != "train-dqn" and len(found["legs"]) == 1:
        kinds = [sum(each.values()) for each in found["bytes_by_kind_per_rank"]]
        assert kinds == found["bytes_sent_per_rank"], f"{kinds} of {found['bytes_sent_per_rank']} bytes have a kind"
    return found["environment_steps"]


def main(seed: int, first: int, last: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        for i in range(first, last):
            program, ranks, options, how = draw(seed, i)
            begun, top, folder = time.monotonic(), Path(own, str(i)), Path(own, str(i), "run")
            top.mkdir()
            (top / "wild.py").write_text(ENVIRONMENT)
            print(f"run {i}: {how['end']}, {ranks} ranks: {program} {' '.join(as_arguments(options))}", flush=True)
            after = how["seconds"] if how["end"] == "signal to all" else 0.0
            done = job(ranks, [program, *as_arguments(options), "--out", str(folder)], top, after)
            step = check(done, program, options, how, folder)
            if step and how["more"]:
                fixed = program == "train-dqn" or "actors" in options or options.get("consistency") == "bsp"
                ranks += 0 if fixed else how["elsewhere"]
                summary = folder / "summary.json"
                reached = json.loads(summary.read_text())["environment_steps"] if summary.exists() else 0
                more = {"env-steps": 4 * step * ranks + reached + how["more"], "time-limit": 1.0}
                more["evaluate-every"] = options["evaluate-every"] * 12
                more["checkpoint-every"] = options["checkpoint-every"] * 12
                done = job(ranks, [program, *as_arguments(more), "--resume", str(folder), "--trust", str(folder)], top)
                assert done.status == 0, f"gone on with: {done.status}\n{done.text}"
                legs = json.loads(summary.read_text())["legs"]
                assert len(legs) == 2 and legs[1]["ranks"] == ranks, [leg["ranks"] for leg in legs]
            print(f"run {i}: status {done.status}, {step} steps, {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
