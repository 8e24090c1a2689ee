"""On how many ranks, and on which hosts, a launcher can still start a job that may have lost some of them.

    hosts of its list        each is asked, side by side, for a trivial program; those that do not run it are left out
    ranks                    all are tried; else the most that can be started are found by halving, not below a least

Who is asked is the launcher itself, with the job's own options: whatever it needs to reach a host (ssh, Slurm, a
daemon) has to work.
"""

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
from hpcdl.recovery.launch_command import Host, JobLine

PROBE = 60.0  # seconds in which a launcher starts a trivial program, or is taken to be unable to
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class GivenUp(Exception):
    """Why a job is not started again."""


def startable(told: JobLine, least: int, say: Callable[[str], object]) -> JobLine:
    """The line on the hosts that are there, with the most ranks that can be started; least 0: as it was told.

    Raises GivenUp where these are fewer than `least`.
    """
    if not least or told.ranks is None:
        return told
    line, hosts = told, told.hosts
    there = answering(told, hosts) if len(hosts) > 1 else hosts
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
        raise GivenUp(f"{counted(least, 'rank')} cannot be started any more (--min-ranks)")
    low, high = least, most  # the first can be started, the last cannot
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts(line.with_ranks(middle)) else (low, middle)
    return line.with_ranks(low)


def starts(line: JobLine) -> bool:
    """Whether the launcher can start a trivial program on these ranks."""
    return ended_well([line.starting("true")])[0]


def answering(line: JobLine, hosts: list[Host]) -> list[Host]:
    """The hosts on which the launcher can start a trivial program."""
    lines = [line.on_hosts([host]).with_ranks(1).starting("true") for host in hosts]
    return [host for host, well in zip(hosts, ended_well(lines), strict=True) if well]


def ended_well(lines: list[list[str]]) -> list[bool]:
    """Which of some commands end with status 0 in time; they run side by side. Raises GivenUp where there is none."""
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
    """In the process that becomes the launcher: SIGTERM when the supervisor is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def adopt_orphans() -> None:
    """What a launcher leaves behind here becomes this process's own, by which `end_orphans` knows it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(others: set[int]) -> None:
    """End all children of this process but `others`, and theirs: a launcher leaves what reaches hosts that are lost."""
    while found := children() - others:
        for each in found:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)


def children() -> set[int]:
    """The processes whose parent this one is."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]  # a name may have blanks and parentheses
            found |= {int(name)} if int(parent) == os.getpid() else set()
    return found
