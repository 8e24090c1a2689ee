"""Programs in the process of the tests, on one rank, for those that start many; a case that takes too much fails."""

import contextlib
import importlib
import io
import resource
import signal

from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.errors import LONGEST_LINE, LoneError, TrainingError, UsageError

SECONDS = 10.0  # of processor time, for what takes some hundredths, or longer where a kernel has yet to be compiled
BESIDE = ": warning: ", ": goes on from a run of "  # in lines that are no errors
ROOM = 2**30  # bytes, beside those that are in use


@contextlib.contextmanager
def limited():
    """No more memory than a little, and no more time; a case that takes them fails."""

    def late(*_):
        raise AssertionError(f"it takes more than {SECONDS} s")

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, handler)


@contextlib.contextmanager
def freed():
    """Give back what a program that was refused has not: MPI has no more than some thousands of communicators."""
    opened, original = [], Communicator._open

    def note(self, *arguments):
        original(self, *arguments)
        opened.append(self)

    Communicator._open = note
    try:
        yield
    finally:
        Communicator._open = original
        for each in reversed(opened):
            if each.mpi != MPI.COMM_NULL:
                each.free()


def ends(program, given):
    """How the program ends: its status and what it says of it."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said), freed():
        try:
            importlib.import_module(f"hpcdl.scripts.{program}").main(given)
        except SystemExit as end:
            return end.code, said.getvalue()
        except (UsageError, TrainingError, LoneError) as error:  # of one rank: failure.py prints it
            return 1, f"{error}\n"
    return 0, ""


def assert_ends(program, given):
    """It ends well, or with one line that a terminal can print, beside warnings; it takes no more than there is."""
    with limited():
        status, said = ends(program, given)
    lines = said.splitlines()
    assert status in (0, 1, 2), status
    assert len([line for line in lines if not any(each in line for each in BESIDE)]) == (status != 0), said
    assert all(line.isprintable() and len(line) < LONGEST_LINE + 100 for line in lines), said
    return status


@contextlib.contextmanager
def room(size):
    """No file grows beyond so many bytes; Python ignores the signal that comes of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
