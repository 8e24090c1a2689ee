"""Text tables of plans, and byte counts with units."""

import math
from collections.abc import Iterable, Sequence

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(value: float) -> str:
    """Return bytes in the form "1.50 MiB"; a dash for NaN."""
    if math.isnan(value):
        return "-"
    for unit, name in UNITS:
        if value >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def table(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Return aligned lines; the first row holds the names. Columns are right-aligned, those in `left` left-aligned."""
    widths, left = [max(map(len, column)) for column in zip(*rows, strict=True)], set(left)
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
