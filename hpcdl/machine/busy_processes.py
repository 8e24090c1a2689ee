"""Busy processes in sessions of their own, as another user's job on the same cores: for measurements beside load.

Linux may share out a core among sessions before it does so among processes (autogroups). A busy process ends by itself
when its parent has ended, also if the parent was killed. It may run on any core, whatever its parent is bound to."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

# Arguments: the parent's number, and how many processes the session has.
SPIN = """
import os, sys
parent, processes = map(int, sys.argv[1:])
if hasattr(os, "sched_setaffinity"):  # Linux
    os.sched_setaffinity(0, range(os.cpu_count()))
for _ in range(processes - 1):
    own = os.getpid()
    if not os.fork():
        parent = own
        break
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy(sessions: int, processes: int = 1) -> Iterator[None]:
    """Context in which so many sessions of so many processes each compute."""
    spin = [sys.executable, "-I", "-S", "-c", SPIN, str(os.getpid()), str(processes)]
    quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    started: list[subprocess.Popen] = []
    try:
        for _ in range(sessions):
            started.append(subprocess.Popen(spin, start_new_session=True, **quiet))
        yield
    finally:
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
