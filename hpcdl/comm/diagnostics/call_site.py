"""Call sites: the line of a user's program or a strategy that makes a call, not the layers between it and MPI.

The search starts at the innermost frame. It skips frames of PyTorch and of hpcdl's LOWER_ROOMS, which call on behalf of
others: when a run's ranks agree, the call site is the strategy's `run.boundary()`. Each frame costs 0.1 us."""

import contextlib
import faulthandler
import os
import re
import sys
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from hpcdl import errors, kernels
from hpcdl.comm.diagnostics.call_signature import mismatch_message
from hpcdl.errors import AgreedError

PACKAGE = os.path.dirname(errors.__file__) + os.sep
LOWER_ROOMS = "comm checkpoint faults runs recovery parameter_server data_server launch torch models optim data machine"
SKIPPED_PREFIXES = (
    *(f"{PACKAGE}{room}{os.sep}" for room in LOWER_ROOMS.split()),
    os.path.dirname(kernels.__file__) + os.sep,
    f"{PACKAGE}shared_memory.py",
    contextlib.__file__,
)
PYTORCH = "torch", "typing_extensions", "warnings", "_py_warnings"  # modules with `deprecated`, by version
skipped: dict[str, bool] = {}  # by file name
THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+) ")  # of faulthandler's text, as the next two
LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
HEX = "[0-9a-f]"
ESCAPED = re.compile(rf"\\(?:x({HEX}{{2}})|u({HEX}{{4}})|U(00(?:0{HEX}|10){HEX}{{4}}))")  # characters beyond ASCII


class Place(NamedTuple):
    """A line of a stack, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """The text of `location`."""
        inside = self.file.startswith(PACKAGE)
        name = "hpcdl/" + os.path.relpath(self.file, PACKAGE) if inside else os.path.basename(self.file)
        return f"{name}:{self.line} in {self.function}"


def caller(depth: int = 1) -> FrameType:
    """Return `innermost` of the frame `depth` frames above this function."""
    return innermost(sys._getframe(depth))


def innermost(frame: FrameType) -> FrameType:
    """Return this frame, or the first of its callers that is not skipped (see the module), or else the outermost."""
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        over = skipped.get(file)
        if not (is_skipped(file) if over is None else over):
            break
        frame = frame.f_back
    return frame


def is_skipped(file: str) -> bool:
    """True if the functions of this file call on behalf of others (see the module)."""
    if file not in skipped:  # PyTorch: only imported modules are considered
        folder, *wrappers = (getattr(sys.modules.get(name), "__file__", None) or "" for name in PYTORCH)
        pytorch = file in wrappers or (folder != "" and file.startswith(os.path.dirname(folder) + os.sep))
        skipped[file] = file.startswith(SKIPPED_PREFIXES) or pytorch
    return skipped[file]


def stack_of(thread: int | None) -> list[Place]:
    """Return the stack of another thread, by its identifier: the innermost 100 lines, innermost first. faulthandler
    reads all of it at once; a walk over frames of a running thread may be a segmentation fault (CPython 3.11)."""
    places: list[Place] = []
    with open(os.memfd_create("stacks"), encoding="ascii") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        found = False
        for text in file:
            if head := THREAD.match(text):
                found = int(head[1], 16) == thread
            elif found and (line := LINE.match(text)):
                name, function = (
                    ESCAPED.sub(lambda code: chr(int("".join(code.groups("")), 16)), line[at]) for at in (1, 3)
                )
                places.append(Place(name, int(line[2]), function))
    return places or [Place("an unknown file", 0, "an unknown function")]


def place_in(stack: list[Place]) -> Place:
    """Return `innermost` of a stack."""
    return next((place for place in stack if not is_skipped(place.file)), stack[-1])


def refuse(comm: Any, call: str) -> NoReturn:
    """Raise an AgreedError with every rank's call and call site; collective. call: this rank's call as text."""
    everyone = comm.allgather((call, location(caller())))
    calls, lines = (dict(enumerate(texts)) for texts in zip(*everyone, strict=True))
    raise AgreedError(mismatch_message(calls, lines))


def location(frame: FrameType) -> str:
    """Return the frame's location as text, such as "train.py:15 in main"; files of hpcdl by path in the package."""
    return str(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
