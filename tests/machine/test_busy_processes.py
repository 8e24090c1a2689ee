"""Busy processes end with their context, and with a parent that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcdl.machine.busy_processes import busy

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
PARENT = (
    "from hpcdl.machine.busy_processes import busy\nimport time\nwith busy(1, 2): print(flush=True), time.sleep(60)"
)


def running(parent):
    """The sessions of the busy processes that have this parent's number in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            state, *fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"-S" in words and str(parent).encode() in words and state != "Z":
            found.append(int(fields[2]))
    return sorted(found)


def until(count, parent):
    end = time.monotonic() + 20
    while len(running(parent)) != count and time.monotonic() < end:
        time.sleep(0.01)
    return running(parent)


def test_a_session_each():
    with busy(2):
        sessions = until(2, os.getpid())
        assert len(set(sessions)) == 2 and os.getsid(0) not in sessions
    assert not running(os.getpid())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_they_end_with_their_parent(how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    parent.stdout.readline()
    assert len(set(until(2, parent.pid))) == 1  # two processes of one session
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    assert not until(0, parent.pid)
