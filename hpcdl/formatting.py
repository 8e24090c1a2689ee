"""Formatting: numbers with nouns (1 rank, 2 ranks), durations, times of day, bytes, text tables."""

import math
import time
from collections.abc import Iterable, Sequence

ES = ("s", "x", "tch", "rch", "sh")  # endings of nouns with the plural -es
UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def counted(number: float, noun: str, form: str = "") -> str:
    """Return the number with its noun; the noun is singular if the number reads "1". form: format of the number.

    >>> counted(1, "rank"), counted(2, "class"), counted(1438, "training row", ","), counted(0.5, "epoch", "g")
    ('1 rank', '2 classes', '1,438 training rows', '0.5 epochs')"""
    text = format(number, form)
    return f"{text} {noun if text == '1' else noun + ('es' if noun.endswith(ES) else 's')}"


def duration(seconds: float) -> str:
    """Return a duration as 45 s, 12 min, 2 h 05 min or 3 days 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def clock(at: float, now: float) -> str:
    """Return the time of day at `at`, with the date if `now` is on another day; both in seconds since the epoch."""
    there = time.localtime(at)
    return time.strftime("%H:%M" if time.localtime(now)[:3] == there[:3] else "%a %d %b %H:%M", there)


def spent(seconds: float) -> str:
    """Return a duration that may be short, as 0.4 s, 9.5 s, 45 s or 12 min."""
    return f"{seconds:.1f} s" if 0 <= seconds < 9.95 else duration(seconds)


def size(value: float) -> str:
    """Return bytes in the form "1.50 MiB"; a dash for NaN."""
    if math.isnan(value):
        return "-"
    for unit, name in UNITS:
        if value >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def table(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Return rows as aligned lines. The first row has the columns' names. Columns in `left` go left, others right."""
    widths, left = [max(map(len, column)) for column in zip(*rows, strict=True)], set(left)
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def dashed(name: str) -> str:
    """Return the name of an option, given the name of its field in a class of options: batch_size gives batch-size."""
    return name.replace("_", "-")
