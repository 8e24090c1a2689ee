"""Thousands of random operations, bad inputs, pipelines and runs with parameter servers, in few processes: make soak

tests/soak/collectives.py, pipelines.py, runs.py and acting.py say what is drawn and checked; most runs go one after the
other in one job. A few are whole jobs of the program itself, which end by their time limit or by a signal to one rank,
and so are all those that learn to act. No job leaves a file in /dev/shm. Then the fuzzers of options, data files and
checkpoints (tests/fuzz.py) try new cases.
Another seed: make soak ARGS=2
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm.launcher import clean_environment, mpiexec
from hpcdl.runs.signals import STATUS

RUNS = {5: 96, 4: 40, 3: 24, 2: 16, 7: 16}  # in one job of so many ranks each
WHOLE = 8
ACTING = 100  # jobs of reinforcement learning
COLLECTIVES = {2: 600, 3: 600, 4: 800, 5: 200}  # likewise
TIMES = "10"  # as many cases of each fuzzer as in a run of the tests
PIPELINES = {2: 100, 3: 100, 4: 200, 6: 100}  # likewise
PER_JOB = 32  # of these runs, so that one that fails is soon known
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
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found |= set(re.findall(rf"{SHARED}/(\S+)", (process / "maps").read_text()))
        except OSError:  # a process of another user, or one that has just ended
            continue
    return found


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
    for ranks, cases in COLLECTIVES.items():
        print(f"{ranks} ranks, {cases} times a dozen operations", flush=True)
        launch(ranks, Path(__file__).with_name("collectives.py"), seed, 0, cases)
    print(f"soak: {sum(COLLECTIVES.values())} times a dozen operations were right", flush=True)
    for ranks, cases in PIPELINES.items():
        print(f"{ranks} ranks, {cases} pipelines", flush=True)
        launch(ranks, Path(__file__).with_name("pipelines.py"), seed, 0, cases)
    print(f"soak: {sum(PIPELINES.values())} pipelines ended cleanly in {time.monotonic() - begun:.0f} s", flush=True)
    for ranks, runs in RUNS.items():
        for first in range(0, runs, PER_JOB):
            print(f"{ranks} ranks, runs {first} to {min(runs, first + PER_JOB) - 1}", flush=True)
            launch(ranks, Path(__file__).with_name("runs.py"), seed, first, min(runs, first + PER_JOB))
    with tempfile.TemporaryDirectory() as folder:
        for i in range(WHOLE):
            whole(i, Path(folder, str(i)))
    print(f"soak: {sum(RUNS.values()) + WHOLE} runs ended cleanly in {time.monotonic() - begun:.0f} s", flush=True)
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
