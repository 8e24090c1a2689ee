"""The first signal is noted; a second one that asks to end ends the process at once."""

import os
import signal
import subprocess
import sys

import pytest

from hpcdl.runs import signals

PROGRAM = """
import os, signal, sys, time
from hpcdl.runs import signals
signals.install()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), {first})
print(signals.received, flush=True)
os.kill(os.getpid(), {second})
print("still here")
"""


def run(first, second):
    program = PROGRAM.format(first=int(first), second=int(second))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))


@pytest.mark.parametrize("number", signals.HANDLED)
def test_the_first_one_is_noted(monkeypatch, number):
    """Each by the same handler, so that one of them shows what a run does then (test_interrupted.py)."""
    before = [signal.getsignal(each) for each in signals.HANDLED]
    monkeypatch.setattr(signals, "received", [])
    monkeypatch.setattr(signals, "own", [])
    try:
        signals.install()
        os.kill(os.getpid(), number)
        assert signals.received == [number.name]
    finally:
        for each, handler in zip(signals.HANDLED, before, strict=True):
            signal.signal(each, handler)


def test_a_second_one_ends_at_once():
    done = run(signal.SIGUSR1, signal.SIGINT)
    assert done.returncode == 128 + signal.SIGINT and "still here" not in done.stdout
    assert "['SIGUSR1', 'SIGUSR1']" in done.stdout


def test_usr1_never_does():
    assert "still here" in run(signal.SIGUSR1, signal.SIGUSR1).stdout
