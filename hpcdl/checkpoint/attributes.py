"""What attributes a checkpoint must have, and of what types: one table, for a run that goes on and for who evaluates.

A checkpoint with a right checksum may still lack an attribute, or have another in its place: another program has
written it, or another version of this one. What the table does not name is let be.
"""

import math
from collections.abc import Callable
from typing import Any

from hpcdl.errors import UsageError

# What a leg has cost each rank, by name; legs of older versions do not have the last.
COUNTS = ("bytes_sent_per_rank", "messages_per_rank", "bookkeeping_bytes_per_rank")
SECONDS = tuple(f"{name}_seconds_per_rank" for name in ("compute", "communication", "idle", "data", "bookkeeping"))
SUMMED = (*COUNTS, *SECONDS)

Kind = tuple[Callable[[Any], bool], str]  # whether a value is of it; its name


def is_count(value: Any) -> bool:
    """Whether it is a whole number of 0 or more, of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def is_layout(value: Any) -> bool:
    """Whether it says of each tensor its name, shape and type, as `Layout.describe` does."""
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and isinstance(each.get("dtype"), str)
        and SHAPE[0](each.get("shape"))
        for each in value
    )


def are_scores(value: Any) -> bool:
    """Whether each score is a number; those of the replicas are a list of numbers, or none."""
    if not isinstance(value, dict):
        return False
    many = value.get("replica_test_accuracy")
    rest = [each for name, each in value.items() if name != "replica_test_accuracy"]
    return all(map(is_number, rest)) and (many is None or (isinstance(many, list) and all(map(is_number, many))))


def are_legs(value: Any) -> bool:
    """Whether each says its ranks, steps and seconds, and of each rank what it has spent (segments.py), or null."""
    if not (isinstance(value, list) and all(isinstance(each, dict) and each.keys() >= LEG.keys() for each in value)):
        return False
    fine = all(kind[0](each[name]) for each in value for name, kind in (LEG | LATER).items() if name in each)
    return fine and all(
        each.get(name) is None or (isinstance(each[name], list) and len(each[name]) == each["ranks"])
        for each in value
        for name in SUMMED
    )


TEXT: Kind = lambda value: isinstance(value, str), "a text"
COUNT: Kind = is_count, "a whole number of 0 or more"
NUMBER: Kind = is_number, "a finite number"
MAYBE: Kind = lambda value: value is None or is_number(value), "a finite number, or null"
MAPPING: Kind = lambda value: isinstance(value, dict), "a mapping"
SHAPE: Kind = lambda value: isinstance(value, list) and all(map(is_count, value)), "a list of whole numbers"

NUMBERS: Kind = (
    lambda value: value is None or (isinstance(value, list) and all(map(MAYBE[0], value))),
    "a list of numbers, or null",
)
RANKS: Kind = lambda value: value is None or is_count(value), "a whole number of 0 or more, or null"
LATER: dict[str, Kind] = dict.fromkeys(SUMMED[-1:], NUMBERS)  # costs that a leg may lack
LEG: dict[str, Kind] = {"ranks": RANKS, "steps": COUNT, "seconds": NUMBER}
LEG |= dict.fromkeys((name for name in SUMMED if name not in LATER), NUMBERS)

ATTRIBUTES: dict[str, Kind | dict[str, Kind]] = {
    "strategy": TEXT,
    "model": TEXT,
    "source": TEXT,
    "layout": (is_layout, "a list of tensors: name, shape, dtype"),
    "data": {"name": TEXT, "features": SHAPE, "classes": COUNT, "rows": COUNT},
    "optimizer": TEXT,
    "seed": COUNT,
    "batch": COUNT,
    "step": COUNT,
    "epoch": NUMBER,
    "updates": COUNT,
    "examples": COUNT,
    "best": MAYBE,
    "waited": COUNT,
    "scores": (are_scores, "a mapping of names to numbers"),
    "train_loss": MAYBE,
    "seconds": NUMBER,
    "fixed": MAPPING,
}
NEWER: dict[str, Kind | dict[str, Kind]] = {  # which checkpoints of older versions do not have
    "legs": (are_legs, "a list of what the run's legs have cost"),
    "sent": {"bytes": MAYBE, "messages": MAYBE},
    "environment": {"name": TEXT, "options": MAPPING, "shape": SHAPE, "dtype": TEXT, "actions": COUNT},
}


def check_attributes(found: Any, where: str) -> None:
    """Raise UsageError where a checkpoint's attributes are not as the table says; `where` begins the line."""
    _check(found, ATTRIBUTES, where, "")
    _check(found, {name: kind for name, kind in NEWER.items() if name in found}, where, "")


def _check(found: Any, wanted: dict, where: str, above: str) -> None:
    if not isinstance(found, dict):
        raise UsageError(f"{where}: its attribute{f' {above}' if above else 's'} should be a mapping")
    for name, kind in wanted.items():
        path = f"{above}.{name}" if above else name
        if name not in found:
            raise UsageError(f"{where}: its attribute {path} is missing")
        if isinstance(kind, dict):
            _check(found[name], kind, where, path)
        elif not kind[0](found[name]):
            raise UsageError(f"{where}: its attribute {path} should be {kind[1]}")
