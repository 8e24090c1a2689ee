"""Call sites: the line of a user's program or a strategy that makes a call, not the layers between it and MPI.

The search starts at the innermost frame. It skips frames of PyTorch and of hpcdl's LOWER_ROOMS, which call on behalf of
others: when a run's ranks agree, the call site is the strategy's `run.boundary()`. Each frame costs 0.1 us."""

import contextlib
import os
import sys
from types import FrameType
from typing import Any, NoReturn

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


def caller(depth: int = 1) -> FrameType:
    """Return `innermost` of the frame `depth` frames above this function."""
    return innermost(sys._getframe(depth))


def innermost(frame: FrameType) -> FrameType:
    """Return this frame, or the first of its callers that is not skipped (see the module), or else the outermost."""
    while True:
        file = frame.f_code.co_filename
        over = skipped.get(file)
        if over is None:  # PyTorch: only imported modules are considered
            folder, *wrappers = (getattr(sys.modules.get(name), "__file__", None) or "" for name in PYTORCH)
            pytorch = file in wrappers or (folder != "" and file.startswith(os.path.dirname(folder) + os.sep))
            over = skipped[file] = file.startswith(SKIPPED_PREFIXES) or pytorch
        if not over or frame.f_back is None:
            return frame
        frame = frame.f_back


def refuse(comm: Any, call: str) -> NoReturn:
    """Raise an AgreedError with every rank's call and call site; collective. call: this rank's call as text."""
    everyone = comm.allgather((call, location(caller())))
    calls, lines = (dict(enumerate(texts)) for texts in zip(*everyone, strict=True))
    raise AgreedError(mismatch_message(calls, lines))


def location(frame: FrameType) -> str:
    """Return the frame's location as text, such as "train.py:15 in main"; files of hpcdl by path in the package."""
    file = frame.f_code.co_filename
    name = "hpcdl/" + os.path.relpath(file, PACKAGE) if file.startswith(PACKAGE) else os.path.basename(file)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
