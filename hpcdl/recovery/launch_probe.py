"""Find the hosts and the number of ranks on which a launcher can still start a job, after a loss of some of them.

    hosts    start a trivial program on each host of the list, in parallel; leave out the hosts where it fails
    ranks    try all ranks; if they cannot be started, find the largest number that can, by bisection from a minimum

A probe uses the launcher itself, with the job's own options: whatever the launcher needs to reach a host must work."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from hpcdl.errors import reason
from hpcdl.formatting import counted
from hpcdl.recovery.launch_command import JobLine

PROBE = 60.0  # seconds within which a launcher must start a trivial program
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class GivenUp(Exception):
    """Raised if a job is not restarted; the text says why."""


def startable(told: JobLine, least: int, say: Callable[[str], object]) -> JobLine:
    """Return the line `told` on the hosts that answer, with the most ranks that can be started; unchanged if `least` is
    0. Raises GivenUp if fewer than `least` ranks can be started. say: prints a text."""
    if not least or told.ranks is None:
        return told
    line, hosts = told, told.hosts
    there = hosts
    if len(hosts) > 1:
        answers = ended_well([told.on_hosts([host]).with_ranks(1).starting("true") for host in hosts])
        there = [host for host, answer in zip(hosts, answers, strict=True) if answer]
    if len(there) < len(hosts):
        gone = ", ".join(host.name for host in hosts if host not in there)
        if not there:
            raise GivenUp(f"none of the hosts answers ({gone})")
        say(f"hosts that do not answer: {gone}")
        line = line.on_hosts(there)
    most = line.ranks or 0
    if most >= least and starts(line):
        return line
    if most <= least or not starts(line.with_ranks(least)):
        raise GivenUp(f"{counted(least, 'rank')} cannot be started any more, and --min-ranks allows no fewer")
    low, high = least, most  # the first can be started, the last cannot
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts(line.with_ranks(middle)) else (low, middle)
    return line.with_ranks(low)


def starts(line: JobLine) -> bool:
    """True if the launcher can start a trivial program on the ranks of this line."""
    return ended_well([line.starting("true")])[0]


def ended_well(lines: list[list[str]]) -> list[bool]:
    """Run the commands side by side; return for each if it ends with status 0 in time. GivenUp if one cannot start."""
    quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        started = [subprocess.Popen(each, start_new_session=True, preexec_fn=follow_us, **quiet) for each in lines]
    except OSError as error:
        raise GivenUp(f"{lines[0][0]} cannot be started any more: {reason(error)}") from None
    end, found = time.monotonic() + PROBE, []
    for each in started:
        try:
            found.append(each.wait(max(0.01, end - time.monotonic())) == 0)
        except subprocess.TimeoutExpired:
            found.append(False)
            with contextlib.suppress(OSError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    return found


def follow_us() -> None:
    """Ask the kernel, in a child before its exec, to send this child SIGTERM if the supervisor ends, even if killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of processes that a launcher leaves on this host, so that `end_orphans` finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(others: set[int]) -> None:
    """Kill this process's children except `others`, and their children: a launcher leaves its links to lost hosts."""
    while found := children() - others:
        for each in found:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)


def children() -> set[int]:
    """Return the process ids of this process's children."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]  # a name may have blanks and parentheses
            found |= {int(name)} if int(parent) == os.getpid() else set()
    return found
