"""A hung job ends, and the report names each rank, its operation and the calling line."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from hpcdl.comm.diagnostics import deadlock
from hpcdl.comm.diagnostics.call_site import place_in, stack_of
from hpcdl.comm.diagnostics.watchdog import Watchdog
from hpcdl.comm.progress import WaitTarget, activity

HANG = """
import sys, time
import numpy as np
from hpcdl.comm import Communicator

comm = Communicator(timeout=1); comm.all_reduce(np.zeros(3))  # compiled from now on

def late():
    time.sleep(30)

if comm.rank == 2:
    late()
elif comm.rank == 1:
    comm.wait(np.zeros(3), source=2)      # line 14
comm.all_reduce(np.zeros(3))              # line 15
"""

TESTS = """
import os, sys, time
import numpy as np
from hpcdl.comm import Communicator

comm = Communicator(timeout=1, allreduce="shared")
if comm.rank == 1 and sys.argv[1] != "stopped":
    time.sleep(30)
if sys.argv[1] == "test":
    request = comm.iall_reduce(np.zeros(3))
    while not request.test():             # line 11
        time.sleep(0.01)
elif sys.argv[1] == "split":
    comm.split(0)                         # line 14
elif sys.argv[1] == "stopped":
    if comm.rank == 0:
        os.kill(os.getpid(), 19)
    comm.wait(source=0)                   # line 18
"""


def test_a_hung_job_ends_with_a_report_of_all_ranks(launch):
    done = launch(3, "-c", HANG)
    assert done.returncode != 0
    report = dict(re.findall(r"hpcdl watchdog: rank (\d): (.*)", done.stderr))
    assert re.search(r"waits in all_reduce for \d\.\d s, called from <string>:15 ", report["0"])
    assert re.search(r"waits in wait for \d\.\d s, called from <string>:14 ", report["1"])
    assert re.search(r"in no communication .*<string>:9 in late", report["2"])
    assert "--timeout 1 s" in done.stderr


@pytest.mark.long
def test_other_ways_to_wait_for_ever(launch):
    """Calling `test` in a loop, calls that make a group, and a rank 0 that no longer answers: at one time."""
    ways = {"test": "all_reduce", "split": "split", "stopped": "wait"}
    with ThreadPoolExecutor() as pool:
        ends = pool.map(lambda how: launch(2 if how != "stopped" else 3, "-c", TESTS, how, timeout=40), ways)
    for words, done in zip(ways.values(), ends, strict=True):
        assert done.returncode != 0
        where = rf"waits in {words} for \d\.\d s, called from <string>:(11|12|14|18) "
        assert re.search(where, done.stderr), done.stderr


def test_computing_after_an_operation_is_no_waiting(launch):
    program = (
        "import time\nfrom hpcdl.comm import Communicator\ncomm = Communicator(timeout=1)\n"
        "comm.barrier()\nrequest = comm.iwait(source=0)\nrequest.test()\ntime.sleep(2.5)\nprint('done')\n"
    )
    assert launch(2, "-c", program, check=0).stdout.count("done") == 2


AT_WORK = """
import sys, time
from mpi4py import MPI
from hpcdl.runs import ownership
from hpcdl.checkpoint.checkpoint_file import Checkpoint

def slow(original, seconds=2.5):
    def call(*arguments, **options):
        time.sleep(seconds * (MPI.COMM_WORLD.rank == 0))
        return original(*arguments, **options)
    return call

if sys.argv[1] == "scores":
    ownership.evaluate = slow(ownership.evaluate)
else:
    Checkpoint.write = slow(Checkpoint.write)
program = __import__(f"hpcdl.scripts.{sys.argv[2]}", fromlist=["main"])
program.main(sys.argv[3:] + ["--timeout", "1", "--epochs", "1", "--progress", "none", "--model", "softmax"])
print("done")
"""


@pytest.mark.long
def test_a_rank_that_all_know_to_be_at_work_is_left_alone(launch, tmp_path):
    """While rank 0 scores or writes a checkpoint for longer than --timeout, others wait; elsewhere, that is a hang."""
    program = tmp_path / "at_work.py"
    program.write_text(AT_WORK)
    asleep = tmp_path / "asleep.py"
    asleep.write_text(
        AT_WORK.replace(
            "evaluate = slow(ownership.evaluate)", "Ownership.horizon = slow(ownership.Ownership.horizon, 30)"
        )
    )
    ways = [
        (asleep, "scores", "train_allreduce"),
        (program, "scores", "train_allreduce"),
        (program, "writes", "train_allreduce", "--out", "a"),
        (program, "scores", "train_parameter_server", "--consistency", "async"),
    ]
    with ThreadPoolExecutor(2) as pool:  # a second is long, but not where eight processes start
        hung, *others = pool.map(lambda way: launch(2, *way), ways)
    assert hung.returncode == 1 and "hpcdl watchdog: rank 1: waits in " in hung.stderr
    for done in others:
        assert done.returncode == 0 and done.stdout.count("done") == 2 and "watchdog" not in done.stderr


SERVES = """
import os, signal, sys, time
import numpy as np
from hpcdl.comm import Communicator

comm = Communicator(timeout=1)
comm.barrier()
how, server = sys.argv[1], int(sys.argv[2])
if comm.rank == server:
    asked = comm.iwait(np.zeros(1), source=1 - server)
    comm.wait_until(asked.test, patient=True)
elif how == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    time.sleep(5)
    comm.push(np.zeros(1), server)
comm.free()
print("done")
"""


@pytest.mark.long
def test_a_server_may_wait_for_any_time_while_all_others_are_there(launch):
    """A rank that computes is heard; one that is stopped is not, and would let its server wait for ever."""
    ways = ("computes", 0), ("stopped", 0), ("stopped", 1)
    with ThreadPoolExecutor() as pool:
        computes, *stopped = pool.map(lambda way: launch(2, "-c", SERVES, *way, timeout=40), ways)
    assert computes.returncode == 0 and computes.stdout.count("done") == 2, computes.stderr
    assert all(done.returncode != 0 for done in stopped)
    assert "hpcdl watchdog: rank 1: no answer" in stopped[0].stderr
    assert "rank 0 does not answer" in stopped[1].stderr


def test_a_communicator_may_be_freed_while_its_status_is_asked_for():
    """The thread that answers runs beside the one that frees."""
    group = SimpleNamespace(mpi=MPI.COMM_SELF, sequence=3, name="split")

    class Freeing(dict):
        def get(self, key, default=None):
            found = super().get(key, default)
            watchdog.forget(group)
            return found

    watchdog = Watchdog(MPI.COMM_SELF, 0.0)
    watchdog.watch(group)
    watchdog.keys = Freeing(watchdog.keys)
    with activity.inside("free", WaitTarget(group)):
        status = watchdog.status(None)
    assert status.text.startswith("waits in free")
    assert status.key is None
    watchdog.close()


def test_a_freed_communicator_still_has_its_last_call():
    """Who is still at the end of that call does not wait for who has freed the communicator and goes on."""
    group = SimpleNamespace(mpi=MPI.COMM_SELF, sequence=3, name="trial")
    watchdog = Watchdog(MPI.COMM_SELF, 0.0)
    watchdog.watch(group)
    (key,) = watchdog.groups
    watchdog.forget(group)
    freed = watchdog.status(None)
    assert freed.calls[key] == 3
    wait = freed._replace(waits=(9.0, 1), members=(0, 1), other=deadlock.ALL, together=True)
    gone_on, at_its_end = (
        wait._replace(key="world", call=4, calls={"world": 4} | freed.calls),
        wait._replace(key=key, call=3),
    )
    assert not deadlock.mutual_waits({0: gone_on, 1: at_its_end._replace(calls={"world": 3, key: 3})})
    watchdog.close()


def test_the_stack_of_another_thread():
    """Names beyond ASCII and backslashes included."""
    waits, end = threading.Event(), threading.Event()
    source = "def schläft\U00020000():\n    waits.set()\n    end.wait()\n\n\ndef go():\n    schläft\U00020000()\n"
    names = {"waits": waits, "end": end}
    exec(compile(source, "/tmp/a\\users/мой €.py", "exec"), names)
    thread = threading.Thread(target=names["go"], daemon=True)
    thread.start()
    waits.wait()
    stack = stack_of(thread.ident)
    end.set()
    thread.join()
    mine = [place for place in stack if place.file == "/tmp/a\\users/мой €.py"]
    assert mine == [(mine[0].file, 3, "schläft\U00020000"), (mine[0].file, 7, "go")]
    assert str(mine[1]) == "мой €.py:7 in go"
    assert place_in(mine) is mine[0]
    assert stack_of(0) == [("an unknown file", 0, "an unknown function")]
