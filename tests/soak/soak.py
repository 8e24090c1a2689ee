"""Thousands of random operations, bad inputs, pipelines and runs with parameter servers, in few processes: make soak

tests/soak/collectives.py, pipelines.py, runs.py and acting.py say what is drawn and checked; most runs go one after the
other in one job. A few are whole jobs of the program itself, which end by their time limit or by a signal to one rank,
and so are all those that learn to act. No job leaves a file in /dev/shm. Then the fuzzers of options, data files and
checkpoints (tests/fuzz.py) try new cases.
Another seed: make soak ARGS=2"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.machine.launcher import clean_environment, mpiexec
from hpcdl.runs.signals import STATUS

JOBS = (  # program, what it tries, how many of these in a job, and of each number of ranks how many
    ("collectives.py", "cases of a dozen operations", 1000, {2: 600, 3: 600, 4: 800, 5: 200}),
    ("pipelines.py", "pipelines", 1000, {2: 100, 3: 100, 4: 200, 6: 100}),
    ("runs.py", "runs", 32, {5: 96, 4: 40, 3: 24, 2: 16, 7: 16}),  # so that one that fails is soon known
)
WHOLE = 8
ACTING = 100  # jobs of reinforcement learning
TIMES = "10"  # as many cases of each fuzzer as in a run of the tests
SHARED = Path("/dev/shm")
SIGNALLED = """
import os, signal, sys
from hpcdl.scripts import train_parameter_server
from hpcdl.parameter_server.parameter_store import ParameterStore

rank, step = int(sys.argv[1]), int(sys.argv[2])
def pull(self, *arguments, original=ParameterStore.pull):
    if self.clock == step and self.comm.rank == rank:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, *arguments)

ParameterStore.pull = pull
train_parameter_server.main(sys.argv[3:])
"""


def launch(ranks: int, *command, status: int = 0) -> None:
    """Run a job and show what it prints; ends the soak where its status is another, or a file of it is left."""
    arguments = [mpiexec(), "-n", str(ranks), sys.executable, *map(str, command)]
    mark, files = f"HPCDL_SOAK={uuid.uuid4()}", set()
    with subprocess.Popen(arguments, env=clean_environment() | dict([mark.split("=")])) as job:
        while job.poll() is None:
            files |= shared(mark)
            time.sleep(0.2)
    what = " ".join(map(str, command[-40:]))
    if job.returncode != status:
        sys.exit(f"soak: status {job.returncode}, not {status}: {what}")
    left = files & set(os.listdir(SHARED))
    if left:
        sys.exit(f"soak: left in {SHARED}: {', '.join(sorted(left))}: {what}")


def shared(mark: str) -> set[str]:
    """The files in /dev/shm that are in the memory of processes whose environment has this mark."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of another user, or one that has just ended
            if mark.encode() in (process / "environ").read_bytes():
                found |= set(re.findall(rf"{SHARED}/(\S+)", (process / "maps").read_text()))
    return found


def as_arguments(options: dict) -> list[str]:
    """Options by name as a command line has them; True stands for a switch, False for none."""
    values = {f"--{name}": value for name, value in options.items() if value is not False}
    return [str(each) for pair in values.items() for each in pair if each is not True]


def whole(i: int, folder: Path) -> None:
    """A job of its own: bsp, ssp or async, ended by a signal to one of its workers, or by its time limit."""
    consistency = [("bsp", 0), ("ssp", 2), ("async", 0)][i % 3]
    options = ["--consistency", consistency[0], "--staleness", consistency[1], "--servers", 1 + i % 2]
    options += ["--straggler", "random:0.1:4", "--pretend-compute", 1, "--steps", 1_000_000, "--out", folder]
    if i % 2:
        launch(5, "-c", SIGNALLED, 2 + i % 3, 10 * i, *options, status=STATUS)
    else:
        launch(5, "-m", "hpcdl", "train-parameter-server", *options, "--time-limit", 1)
    assert 0 < Checkpoint.read(folder).attributes["step"] < 1_000_000


def main(seed: str = "1") -> None:
    begun = time.monotonic()
    for program, what, per_job, jobs in JOBS:
        for ranks, count in jobs.items():
            for first in range(0, count, per_job):
                print(f"{ranks} ranks, {what} {first} to {min(count, first + per_job) - 1}", flush=True)
                launch(ranks, Path(__file__).with_name(program), seed, first, min(count, first + per_job))
        print(f"soak: {sum(jobs.values())} {what} were right in {time.monotonic() - begun:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(WHOLE):
            whole(i, Path(folder, str(i)))
    print(f"soak: {WHOLE} whole jobs ended cleanly in {time.monotonic() - begun:.0f} s", flush=True)
    acting = [sys.executable, Path(__file__).with_name("acting.py"), seed, "0", str(ACTING)]
    if subprocess.run(acting).returncode:
        sys.exit("soak: acting.py has found something")
    print(f"soak: {ACTING} jobs that act ended as they should in {time.monotonic() - begun:.0f} s", flush=True)
    fuzzers = Path(__file__).parents[1] / "faults" / "fuzzers.py"
    if subprocess.run([sys.executable, fuzzers, seed, TIMES]).returncode:
        sys.exit("soak: a fuzzer has found something")
    print(f"soak: all in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
