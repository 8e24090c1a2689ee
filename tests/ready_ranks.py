"""Ranks that stay up and run one program after another (tests/standin/rank.py).

A page's commands run on them, too (printed.py), unless HPCDL_TESTS=long: then they start ranks, as for a reader."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcdl.machine.launcher import clean_environment, mpiexec

RANK = Path(__file__).parent / "standin/rank.py"
MOST = 20  # ranks that are up at once
ready = {}  # groups that are up, by their number of ranks and environment; the last used is last


class Ranks:
    """A group of ranks that is up, and a line to each."""

    busy = 0.0  # seconds of processors taken by ranks that are up; of those that have ended, os.times knows

    def __init__(self, ranks: int, environment: dict[str, str]):
        self.folder, self.lines, self.busy = tempfile.TemporaryDirectory(), [], 0.0
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{self.folder.name}/door")
            door.listen(ranks)
            door.settimeout(60)
            self.process = subprocess.Popen(
                [mpiexec(), "-n", str(ranks), sys.executable, RANK, self.folder.name],
                env=clean_environment() | environment | {"TMPDIR": self.folder.name},
                stdin=subprocess.DEVNULL,
            )
            while len(self.lines) < ranks:
                self.lines.append(door.accept()[0])

    def run(self, order, timeout):
        """The script, arguments and folder in `order`, on all ranks; returns the status and all that they print."""
        deadline, statuses = time.monotonic() + timeout, set()
        for line in self.lines:
            line.sendall(f"{json.dumps(order)}\n".encode())
        for line in self.lines:
            line.settimeout(max(0.1, deadline - time.monotonic()))
            status, _, busy = line.recv(40).decode().partition(" ")
            statuses.add(status)
            self.take(float(busy or 0))
        if "" in statuses:  # a rank has ended the job
            statuses = {self.process.wait(timeout=10)}
        said = [
            "".join(path.read_text() for path in sorted(Path(self.folder.name).glob(end))) for end in ("*.out", "*.err")
        ]
        assert len(statuses) == 1, f"the ranks leave with statuses {statuses}\n{''.join(said)}"
        return subprocess.CompletedProcess(order, int(statuses.pop()), *said)

    def take(self, seconds):
        self.busy += seconds
        Ranks.busy += seconds

    def end(self):
        """Let them go, or end them where they are still in a program."""
        self.take(-self.busy)
        for line in self.lines:
            line.close()
        for stop in (self.process.poll, self.process.terminate, self.process.kill):
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
                break
        self.folder.cleanup()


def run(ranks, script, arguments, folder, timeout, environment):
    """Run a script on so many ranks, in a folder and with these variables beside a clean environment's."""
    which = ranks, *sorted(environment.items())
    while which not in ready and ready and ranks + sum(number for number, *_ in ready) > MOST:
        ready.pop(next(iter(ready))).end()
    group = ready.pop(which, None) or Ranks(ranks, environment)
    try:
        done = group.run([str(script), [*map(str, arguments)], str(folder)], timeout)
    except BaseException:
        group.end()
        raise
    if group.process.poll() is None:
        ready[which] = group
    else:
        group.end()
    return done


def end():
    for group in ready.values():
        group.end()
