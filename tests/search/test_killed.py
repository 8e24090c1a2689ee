"""A search that is killed at any moment and goes on with other numbers of ranks: each job has ended exactly once."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from mpi4py import MPI
from searching import ends, events, key

from hpcdl.search import search
from hpcdl.search.journal import NAME

SPACE = ["x=log:0.001..1", "y=1|2|3"]
HOW = {"trials": 48, "points": 16, "seeds": 2, "seed": 3, "least": 1, "most": 9}
RANKS = (2, 1, 3, 5, 4)
PROGRAM = """
import sys, time
sys.path.insert(0, {here!r})
from test_killed import HOW, MPI, SPACE, objective, search
ranks = int(sys.argv[2])
own = "own" if MPI.COMM_WORLD.size > ranks and sys.argv[3] == "own" else "shared"
search(MPI.COMM_WORLD, SPACE, objective, sys.argv[1], **HOW, ranks_per_trial=ranks, controller=own, folder="found",
       resume=True)
"""


def objective(trial, comm):
    time.sleep(1e-3)
    return comm.allreduce(
        trial["x"] * trial["y"] / comm.size + trial.seed if trial.number != 5 else 1 / (comm.size - comm.size)
    )


def processes(token):
    """Those that bear it in their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token in (path / "environ").read_bytes():
                yield int(path.name)


def kill(token):
    """The whole job at once, and no other; when this returns, nothing of it is left."""
    while found := list(processes(token)):
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.01)


@pytest.mark.parametrize(
    "method",
    ["random", pytest.param("grid", marks=pytest.mark.exhaustive), pytest.param("asha", marks=pytest.mark.exhaustive)],
)
@pytest.mark.long
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments(launch, environment, tmp_path, kills, method):
    luck, journal, token = random.Random(kills), tmp_path / "found" / NAME, uuid.uuid4().hex
    (tmp_path / "search.py").write_text(PROGRAM.format(here=str(Path(__file__).parent)))
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    settings = environment | {"HPCDL_TEST_JOB": token, "PYTHONPATH": path}
    jobs = 2 * 48 if method != "asha" else 120
    command = [sys.executable, tmp_path / "search.py", method]
    killed, finished = 0, set()
    for leg, size in enumerate(itertools.cycle(RANKS)):
        more = [str(1 + (leg % 3 == 2 and size > 2)), "own" if leg % 2 else "shared"]
        job = subprocess.Popen(
            [launch.mpiexec, "-n", str(size), *command, *more], env=settings, cwd=tmp_path, stdin=subprocess.DEVNULL
        )
        lines = lines_of(journal) + luck.randint(0, 3 * jobs // kills)
        while job.poll() is None and (killed == kills or lines_of(journal) < lines):
            time.sleep(2e-3)
        if job.poll() is not None:
            assert job.returncode == 0
            break
        time.sleep(luck.random() / 100)
        kill(token.encode())
        job.wait()
        killed += 1
        now = ends(whole(journal))
        assert finished <= set(now), "what had ended is lost"
        finished = set(now)
    check(events(journal), method, killed)


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def whole(path):
    """The events of a journal whose last line may be torn."""
    if not path.exists():
        return []
    data = path.read_bytes()
    copy = path.with_name("copy")
    copy.write_bytes(data[: data.rfind(b"\n") + 1])
    return events(copy)


def check(found, method, killed):
    """Each job has begun once and ended once, with the results of a search that nothing has disturbed."""
    begun = [key(event) for event in found if event["event"] == "begin"]
    ended = [key(event) for event in found if event["event"] == "end"]
    assert len(set(begun)) == len(begun) and sorted(begun) == sorted(ended)
    legs = sum(event["event"] == "leg" for event in found)
    assert killed >= 3 and 2 <= legs <= killed + 1
    alone = search(MPI.COMM_SELF, SPACE, objective, method, **HOW)
    if method != "asha":
        scores = {
            (*row.task[:1], row.task.rung, seed): each.score
            for row in alone.rows
            for seed, each in enumerate(row.results)
        }
        assert ends(found) == scores, "to the bit"
        values = {key(event): event["values"] for event in found if event["event"] == "begin"}
        assert all(values[row.task.trial, 0, 1] == row.task.values for row in alone.rows)
