"""The lines of metrics.jsonl, one after the other: in memory there is one at a time, however long the run was.

A line is a step's or an evaluation's, as docs/runs.md has them. The last line of a run that is going on, or that was
killed, may be cut off; others may be broken by a crash of the machine. Both are left out, and counted.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DIGITS = 308  # whole numbers with more are beyond all floats, and count as missing
SCORES = ("test_", "validation_")  # begin the names of what only an evaluation has

DECODE = json.JSONDecoder().raw_decode  # json.loads looks for encodings first, and takes half as long again


class MetricLines:
    """The lines of a file. broken: how many could not be read so far; place: the byte behind the last whole line."""

    def __init__(self, path: Path, place: int = 0):
        self.path, self.place, self.broken = path, place, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Those from `place` on that are there now; iterated once more, those that have come since.

        Raises OSError where the file cannot be read.
        """
        with open(self.path, "rb") as file:
            file.seek(self.place)
            for line in file:
                if not line.endswith(b"\n"):  # the writer is in the middle of it, or was killed there
                    break
                self.place += len(line)
                found = read(line)
                if found is None:
                    self.broken += 1
                else:
                    yield found


def read(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if it is invalid or has no step."""
    try:
        text = line.decode().strip()
        found, end = DECODE(text)
        step = found["step"] if end == len(text) else None
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(step, int | float) or not -(2**63) <= step < 2**63:  # NaN and infinity, too
        return None
    if len(line) > DIGITS:
        huge = [name for name in found if isinstance(found[name], int) and abs(found[name]) > sys.float_info.max]
        for name in huge:
            del found[name]
    return found


def is_evaluation(line: dict[str, Any]) -> bool:
    """True if a line is of an evaluation, False if it is of a step."""
    return "bytes" in line or any([name.startswith(SCORES) for name in line])  # a list: twice as fast as a generator
