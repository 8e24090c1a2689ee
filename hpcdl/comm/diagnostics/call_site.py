"""The line of a program that makes a call: of a user's own, or of a strategy; not of what lies between it and MPI.

Frames are looked at from the innermost on. Those of hpcdl's lower rooms, which call on behalf of others, are passed
over: a meeting of a run counts as called where its strategy comes to `run.boundary()`. So are PyTorch's, through which
torch.distributed comes to its backend. It costs 0.1 us for each frame.
"""

import contextlib
import os
import sys
from types import FrameType
from typing import Any, NoReturn

from hpcdl import errors, kernels
from hpcdl.comm.diagnostics.call_signature import differ
from hpcdl.errors import AgreedError

PACKAGE = os.path.dirname(errors.__file__) + os.sep
BETWEEN = (
    *("comm", "checkpoint", "faults", "runs", "recovery", "parameter_server", "data_server", "launch"),
    *("torch", "models", "optim", "data", "machine"),
)
PASSED = (
    *(f"{PACKAGE}{room}{os.sep}" for room in BETWEEN),
    os.path.dirname(kernels.__file__) + os.sep,
    f"{PACKAGE}shared_memory.py",
    contextlib.__file__,
)
PYTORCH = "torch", "typing_extensions", "warnings", "_py_warnings"  # the others: `deprecated`, by version
passed: dict[str, bool] = {}  # by file


def caller(depth: int = 1) -> FrameType:
    """The innermost frame that is not passed over, from `depth` frames above this function on; else the outermost."""
    return innermost(sys._getframe(depth))


def innermost(frame: FrameType) -> FrameType:
    """Of this frame and those that have called it, the first that is not passed over; else the outermost."""
    while True:
        file = frame.f_code.co_filename
        over = passed.get(file)
        if over is None:
            over = passed[file] = file.startswith(PASSED) or of_pytorch(file)
        if not over or frame.f_back is None:
            return frame
        frame = frame.f_back


def of_pytorch(file: str) -> bool:
    """Whether the file is of PyTorch, or wraps its functions; only of modules that are imported, as callers are."""
    folder, *wrappers = (getattr(sys.modules.get(name), "__file__", None) or "" for name in PYTORCH)
    return file in wrappers or (folder != "" and file.startswith(os.path.dirname(folder) + os.sep))


def refuse(comm: Any, call: str) -> NoReturn:
    """Ranks that differ in what they call together tell each other, from which line, too; collective. AgreedError."""
    everyone = comm.allgather((call, place(caller())))
    calls, lines = (dict(enumerate(each)) for each in zip(*everyone, strict=True))
    raise AgreedError(differ(calls, lines))


def place(frame: FrameType) -> str:
    """The frame as a reader finds it: train.py:15 in main."""
    return f"{named(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def named(file: str) -> str:
    """A file by its name; one of hpcdl's with its folder."""
    return "hpcdl/" + os.path.relpath(file, PACKAGE) if file.startswith(PACKAGE) else os.path.basename(file)
