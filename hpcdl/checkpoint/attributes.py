"""The attributes that a checkpoint must have, and their types: one table, checked when a checkpoint is loaded.
A checkpoint with a right checksum may come from another program or version. Attributes not in the table are ignored."""

import math
from collections.abc import Callable
from typing import Any

from hpcdl.errors import UsageError

# Costs of a leg, each a list with one number per rank; legs of older versions do not have the last cost.
COUNTS = ("bytes_sent_per_rank", "messages_per_rank", "bookkeeping_bytes_per_rank")
SECONDS = tuple(f"{name}_seconds_per_rank" for name in ("compute", "communication", "idle", "data", "bookkeeping"))
SUMMED = (*COUNTS, *SECONDS)

Kind = tuple[Callable[[Any], bool], str]  # (True for a value of this kind, name)


def is_count(value: Any) -> bool:
    """True for a whole number from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def is_layout(value: Any) -> bool:
    """True if the value gives name, shape and type of each tensor, as `Layout.describe` does."""
    fields = ("name", TEXT), ("dtype", TEXT), ("shape", SHAPE)
    tensors = value if isinstance(value, list) and all(isinstance(each, dict) for each in value) else [{}]
    return all(kind[0](each.get(name)) for each in tensors for name, kind in fields)


def are_scores(value: Any) -> bool:
    """True if each score is a finite number; replica_test_accuracy may be a list of numbers, or None."""
    if not isinstance(value, dict):
        return False
    many = value.get("replica_test_accuracy")
    rest = [each for name, each in value.items() if name != "replica_test_accuracy"]
    return all(map(is_number, rest)) and (many is None or (isinstance(many, list) and all(map(is_number, many))))


def are_legs(value: Any) -> bool:
    """True if each leg has ranks, steps, seconds, and the costs named in SUMMED: for each a list by rank, or null."""
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

NUMBERS: Kind = lambda v: v is None or (isinstance(v, list) and all(map(MAYBE[0], v))), "a list of numbers, or null"
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
NEWER: dict[str, Kind | dict[str, Kind]] = {  # attributes that checkpoints of older versions do not have
    "legs": (are_legs, "a list of the run's legs and their costs"),
    "sent": {"bytes": MAYBE, "messages": MAYBE},
    "environment": {"name": TEXT, "options": MAPPING, "shape": SHAPE, "dtype": TEXT, "actions": COUNT},
}


def check_attributes(found: Any, where: str) -> None:
    """Raise UsageError if a checkpoint's attributes do not fit the table; `where` begins the message."""
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
