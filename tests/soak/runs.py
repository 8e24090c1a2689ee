"""Short runs with parameter servers, one after the other: mpiexec -n 5 python tests/soak/runs.py SEED FIRST LAST

Run i draws its options from (SEED, i), the number of ranks included, and is checked: it ends as it should, after the
right number of steps; nothing that was pushed is lost and no message is left over; the bound of the staleness holds and
the replicas agree. Some are told to stop by a signal to any rank, or by their time limit; some go on from their last
checkpoint."""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from mpi4py import MPI
from soak import as_arguments

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm.compression import codecs
from hpcdl.comm.progress import activity
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.roles import divide
from hpcdl.parameter_server.slice_server import SliceServer
from hpcdl.random import Random
from hpcdl.runs import signals
from hpcdl.scripts import train_parameter_server
from hpcdl.strategies.parameter_server import PULLED

WORLD = MPI.COMM_WORLD
AGES = 1_000_000  # more steps than a run gets to that is stopped
pushes = []  # of this rank in the run under way


def draw(seed: int, i: int) -> tuple[dict, dict]:
    """The options of run i, by name; and how it ends: `end`, `more` steps after that, the `roles` of the ranks."""
    random = Random(seed)("soak", i, WORLD.size)

    def one(*values):
        return values[random.integers(len(values))]

    consistency, staleness = one(("bsp", 0), ("ssp", 0), ("ssp", 1), ("ssp", 2), ("ssp", 4), ("async", 0))
    end = one("steps", "steps", "steps", "time limit", "signal")
    on_workers, assistants = one(True, False, False), one(0, 0, int(WORLD.size > 2))
    servers = 0 if on_workers else int(random.integers(1, min(3, WORLD.size - assistants - 1) + 1))
    roles = divide(WORLD.size, servers, assistants)
    options = {
        "servers-on-workers": on_workers,
        "servers": servers or 1,
        "data-servers": assistants,
        "consistency": consistency,
        "staleness": staleness,
        "broadcast-every": one(0, int(random.integers(1, 5 if consistency == "async" else staleness + 2))),
        "fixed-delay": 0 if consistency == "ssp" else one(0, 0, 1, 3),
        "staleness-aware": one(False, True),
        "straggler": one("random:0.1:4", "random:0.3:10", f"{WORLD.size - 1}:5", ""),
        "pretend-compute": one(0.0, 0.5, 2.0),
        "steps": int(random.integers(1, 40)) if end == "steps" else AGES,
        "time-limit": 0.3 if end == "time limit" else 0.0,
        "batch-size": one(5, 16, 32),
        "lr": 0.01,
        "optimizer": one("sgd", "momentum", "adam"),
        "clip-norm": one(0.0, 1.0),
        "accumulate": one(1, 2),
        "model": one("softmax", "mlp:7", "mlp:200"),
        "dtype": one("float32", "float64"),
        "placement": one("shared", "streamed"),
        "evaluate-every": one(1, 3),
        "seed": i,
    }
    options["compress"] = one("none", "none", *codecs())
    options["compress-pull"] = "none" if options["broadcast-every"] else one("none", "none", *PULLED)
    options["checkpoint-every"] = 0 if options["fixed-delay"] else one(0, 1, 7)
    signalled = roles.servers if one(True, False) and not on_workers else roles.workers
    after = int(random.integers(1, 30)), signalled[random.integers(len(signalled))]
    return options, {"end": end, "more": one(0, 0, int(random.integers(1, 20))), "roles": roles, "signal": after}


def watch() -> None:
    """Count the pushes of this rank, and look for messages that are left when a store is given back."""
    push, free = ParameterStore.push, ParameterStore.free

    def counting(self, *arguments, **options):
        pushes.append(self.clock)
        push(self, *arguments, **options)

    def looking(self):
        for request in list(activity.in_flight):
            request.test()
        self.comm.mpi.Barrier()
        assert not self.comm.mpi.Iprobe(), "a message is left"
        assert not [each for each in activity.in_flight if each.communicator is self.comm], "a request is left"
        free(self)

    ParameterStore.push, ParameterStore.free = counting, looking


class Interrupt:
    """A signal to this process at the n-th request that it sends, or answers, in the run under way."""

    def __init__(self):
        self.left = 0
        handle, pull = SliceServer.handle, ParameterStore.pull
        SliceServer.handle = lambda *arguments: (self.count(), handle(*arguments))[1]
        ParameterStore.pull = lambda *arguments: (self.count(), pull(*arguments))[1]

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train(arguments: list[str]) -> int:
    """One run; its exit status."""
    pushes.clear()
    try:
        train_parameter_server.main([*arguments, "--progress", "none", "--timeout", "120"])
    except SystemExit as ended:
        return ended.code
    finally:
        signals.received.clear()
        signals.own.clear()
    return 0


def check(status: int, folder: Path, options: dict, how: dict, start: int) -> int:
    """Compare what a run has left with what it should have; returns its last step, on rank 0."""
    signalled = how["end"] == "signal"
    assert status == (signals.STATUS if signalled else 0), f"status {status}"
    made = WORLD.gather(len(pushes))
    if WORLD.rank > 0:
        return 0
    step = Checkpoint.read(folder).attributes["step"]
    workers = len(how["roles"].workers)
    done = (step - start) * (1 if options["consistency"] == "async" else workers)
    assert sum(made) == done, f"{sum(made)} pushes for steps {start} to {step}"
    if how["end"] == "steps":
        assert step == options["steps"], f"{step} steps of {options['steps']}"
    assert start < step < AGES
    if not signalled:
        summary = json.loads((folder / "summary.json").read_text())
        histogram = summary["staleness_histogram"]
        assert summary["steps"] == step and summary["replicas_agree"]
        assert summary["stopped"] == {"steps": "finished"}.get(how["end"], how["end"])
        assert sum(histogram) == done, f"{sum(histogram)} of {done} pushes in the histogram"
        if options["consistency"] != "async":
            assert len(histogram) - 1 <= max(options["staleness"], options["fixed-delay"])
    assert not [path for path in folder.iterdir() if path.suffix == ".part"]
    return step


def main(seed: int, first: int, last: int) -> None:
    watch()
    interrupt = Interrupt()
    with tempfile.TemporaryDirectory() as own:
        top = Path(WORLD.bcast(own))
        for i in range(first, last):
            (options, how), folder, begun = draw(seed, i), top / str(i), time.perf_counter()
            if WORLD.rank == 0:
                print(f"run {i}: {how['end']} {how['more']} {' '.join(as_arguments(options))}", flush=True)
            after, rank = how["signal"]
            interrupt.left = after if how["end"] == "signal" and rank == WORLD.rank else 0
            step = check(train([*as_arguments(options), "--out", str(folder)]), folder, options, how, 0)
            step = WORLD.bcast(step)
            if how["more"]:
                options |= {"steps": step + how["more"], "time-limit": 0.0}
                resumed = how | {"end": "steps"}
                check(train([*as_arguments(options), "--resume", str(folder)]), folder, options, resumed, step)
            if WORLD.rank == 0:
                print(f"run {i}: {step} steps, {time.perf_counter() - begun:.1f} s", flush=True)
        WORLD.Barrier()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
