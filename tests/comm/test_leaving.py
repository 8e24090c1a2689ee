"""A rank that leaves others waiting ends the job; one that leaves nobody waiting does not."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE

import pytest

from hpcdl.machine.launcher import mpiexec

LEAVES = """
import sys, threading, time
import numpy as np
from hpcdl.comm import Communicator

comm = Communicator(allreduce="ring")
comm.barrier()

def main():
    if comm.rank == int(sys.argv[3]):
        exec(sys.argv[1])
    exec(sys.argv[2])
    print("done")

main()
"""
ENDS = [  # how a rank leaves, what the others do then, and which rank it is
    ("sys.exit(3)", "comm.free()", 1),
    ("sys.exit(0)", "comm.iall_reduce(np.zeros(3)).wait(doze=True)", 1),
    # one waits for one that waits for it
    ("raise SystemExit(3)", "comm.wait(np.zeros(3), {0: 2, 2: 1}[comm.rank])", 1),
    ("sys.exit(0)", "comm.all_reduce(np.zeros(3))", 0),  # the one that asks the others
]


def test_a_rank_that_leaves_others_waiting_is_a_failure(launch):
    """Each way to leave, while others wait for it, or for one that waits for it: one line, no matter how."""
    with ThreadPoolExecutor() as pool:
        ends = pool.map(lambda way: launch(3, "-c", LEAVES, *way), ENDS)
    for way, done in zip(ENDS, ends, strict=True):
        assert done.returncode not in (0, None), way
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        others = r"ranks? (0 and )?1 (and 2 )?ha(s|ve) left the program before its end; ranks? [02]"
        assert re.search(others if way[2] else "rank 0 has left the program .*; ranks 1 and 2", line), (way, line)
        assert re.search(r"would wait for ever: rank \d waits in \w+ for .* called from ", line), (way, line)
        assert "Traceback" not in done.stderr


# A rank that computes, and looks at times for a word of one that has left; and one that ends MPI itself.
POLLS = """
request, until = comm.iwait(source=1, tag=9), time.time() + 8
while time.time() < until and not request.test():
    time.sleep(0.02)  # instead
"""


@pytest.mark.long
def test_who_leaves_nobody_waiting_is_none(launch):
    """An exit in a thread ends that thread; a rank may leave early where nobody waits for it any more."""
    thread = "[threading.Thread(target=end, args=(4,)).start() for end in (sys.exit, exit)]; time.sleep(0.5)"
    ends = '__import__("mpi4py.MPI").MPI.Finalize(); raise SystemExit'
    pair = "comm.rank == 0 and comm.push(np.ones(3), 2); comm.rank == 2 and (time.sleep(2), comm.wait(np.ones(3), 0))"
    ways = [  # what rank 1 does, and what all others do
        (f"{thread}; comm.barrier(); {ends}", "comm.barrier(); time.sleep(1)"),
        ("raise SystemExit", f"{pair}\n{POLLS}"),
    ]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda way: launch(3, "-c", LEAVES, *way, 1, check=0), ways):
            assert done.stdout.count("done") == 2 and done.stderr == ""


SLEEPS = """
import os, time
from hpcdl.comm import Communicator

comm = Communicator()
comm.barrier()
with open(f"rank{comm.rank}", "w") as file:
    file.write(f"{os.getpid()} {os.getppid()}")
time.sleep(600)
"""


def test_ranks_whose_launcher_is_killed_end(environment, tmp_path):
    """The parent of the ranks: of Hydra a process for each host, of Open MPI mpiexec itself."""
    command, written = [mpiexec(), "-n", "2", sys.executable, "-c", SLEEPS], tmp_path.glob
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as job:
        try:
            until(lambda: [path.read_text().count(" ") for path in written("rank*")] == [1, 1])
            ranks, parents = zip(*(map(int, path.read_text().split()) for path in written("rank*")), strict=True)
            os.kill(parents[0], signal.SIGKILL)
            until(lambda: not any(map(runs, ranks)))
        finally:
            for path in written("rank*"):
                kill(int(path.read_text().split()[0]))
            job.kill()


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def until(condition):
    end = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def runs(pid):
    """True if the process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
