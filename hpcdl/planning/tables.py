"""Plans as text: columns of a table, and bytes in words."""

import math
from collections.abc import Iterable, Sequence

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(value: float) -> str:
    """1.50 MiB; a dash for what nobody knows."""
    if math.isnan(value):
        return "-"
    for unit, name in UNITS:
        if value >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def table(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Lines of columns, the first row their names; numbers to the right, but for the columns `left`."""
    widths, left = [max(map(len, column)) for column in zip(*rows, strict=True)], set(left)
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
