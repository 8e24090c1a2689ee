"""The lines of metrics.jsonl (docs/runs.md), one in memory at a time, and the names of the scores in them.
An incomplete last line, of a run that is running or was killed, is left out; broken lines are left out and counted."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DIGITS = 308  # integers with more digits exceed all floats, and count as missing
SCORES = ("test_", "validation_")  # prefixes of names that only an evaluation has
TEXT_SCORES = ("perplexity", "bits_per_byte")
USUAL_SCORES = ("loss", "accuracy", "rmse", "return", *TEXT_SCORES)  # which runs have without --scores
PAIR = ("precision", "recall", "f1")  # of class 1 of two classes
AREAS = ("roc_auc", "average_precision")  # under curves
OF_PROBABILITIES = (*AREAS, "log_loss", "brier_score", "calibration_error")
CLASS_SCORES = ("accuracy", "balanced_accuracy", *PAIR, *(f"macro_{name}" for name in PAIR), *OF_PROBABILITIES)
VALUE_SCORES = ("rmse", "mae", "r2")  # of several outputs: rmse_NAME for each
# Scores of which less is better.
SMALLER = ("loss", "log_loss", "brier_score", "calibration_error", "rmse", "mae", *TEXT_SCORES)

DECODE = json.JSONDecoder().raw_decode  # json.loads takes half as long again, as it first detects the encoding


class MetricLines:
    """The lines of a file. broken: number of invalid lines so far. place: the byte after the last line read."""

    def __init__(self, path: Path, place: int = 0):
        self.path, self.place, self.broken = path, place, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the lines from `place` on; a later iteration yields lines that were added since. May raise OSError."""
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
    return "bytes" in line or any([name.startswith(SCORES) for name in line])  # a list: twice as fast as a generator


def base_of(name: str) -> str:
    """Return a score's name without its part and its output: f1 of test_f1, rmse of validation_rmse_mass."""
    score = name.removeprefix(SCORES[0]).removeprefix(SCORES[1])
    return next((each for each in VALUE_SCORES if score.startswith(f"{each}_")), score)


def larger_is_better(name: str) -> bool:
    """True if more is better of a score such as test_f1 or validation_rmse_mass."""
    return base_of(name) not in (*SMALLER, "train_loss")
