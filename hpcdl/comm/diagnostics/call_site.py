"""Call sites: the line of a user's program or a strategy that makes a call, not the layers between it and MPI.

The search starts at the innermost frame. It skips frames of hpcdl's lower rooms, which call on behalf of others: the
call site of a run's agreement is the strategy's `run.boundary()`. It also skips PyTorch's frames, through which
torch.distributed reaches its backend. It costs 0.1 us for each frame.
"""

import contextlib
import os
import sys
from types import FrameType
from typing import Any, NoReturn

from hpcdl import errors, kernels
from hpcdl.comm.diagnostics.call_signature import mismatch_message
from hpcdl.errors import AgreedError

PACKAGE = os.path.dirname(errors.__file__) + os.sep
LOWER_ROOMS = (
    *("comm", "checkpoint", "faults", "runs", "recovery", "parameter_server", "data_server", "launch"),
    *("torch", "models", "optim", "data", "machine"),
)
SKIPPED_PREFIXES = (
    *(f"{PACKAGE}{room}{os.sep}" for room in LOWER_ROOMS),
    os.path.dirname(kernels.__file__) + os.sep,
    f"{PACKAGE}shared_memory.py",
    contextlib.__file__,
)
PYTORCH = "torch", "typing_extensions", "warnings", "_py_warnings"  # modules with `deprecated`, by version
skipped: dict[str, bool] = {}  # by file name


def caller(depth: int = 1) -> FrameType:
    """Return the innermost frame that is not skipped, from `depth` frames above this function; else the outermost."""
    return innermost(sys._getframe(depth))


def innermost(frame: FrameType) -> FrameType:
    """Return the first frame that is not skipped, of this one and its callers; else the outermost."""
    while True:
        file = frame.f_code.co_filename
        over = skipped.get(file)
        if over is None:
            over = skipped[file] = file.startswith(SKIPPED_PREFIXES) or of_pytorch(file)
        if not over or frame.f_back is None:
            return frame
        frame = frame.f_back


def of_pytorch(file: str) -> bool:
    """True if the file belongs to PyTorch or wraps its functions; only imported modules are considered."""
    folder, *wrappers = (getattr(sys.modules.get(name), "__file__", None) or "" for name in PYTORCH)
    return file in wrappers or (folder != "" and file.startswith(os.path.dirname(folder) + os.sep))


def refuse(comm: Any, call: str) -> NoReturn:
    """Raise an AgreedError with all ranks' calls and call sites, as they differ; collective."""
    everyone = comm.allgather((call, location(caller())))
    calls, lines = (dict(enumerate(texts)) for texts in zip(*everyone, strict=True))
    raise AgreedError(mismatch_message(calls, lines))


def location(frame: FrameType) -> str:
    """Return the frame's location as text: train.py:15 in main."""
    return f"{display_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def display_path(file: str) -> str:
    """Return the file's name; for hpcdl's own files the path within the package."""
    return "hpcdl/" + os.path.relpath(file, PACKAGE) if file.startswith(PACKAGE) else os.path.basename(file)
