"""Elements of pictures: curves with bands, stacked bars, a matrix, lanes of spans, boxes of micro-batches.
Axes have units that suit the values, and few ticks, for phones. The y label stands above the axis, upright."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcdl.reports.figures import FONT, PAPER, STYLES

GROUPS = 24  # bars, or rows of a matrix, at most
FEW_BARS = 4
TICKS = 4
DASH = 6  # line widths of a dash, where equal curves share a path
ABOVE, BELOW = 0.08, 0.23  # inches from the axes to the y label above, and to the upper edge of the x label below
SCALES = {  # by quantity: smallest value for a unit, its size, its name
    "seconds": ((0, 1e-6, "µs"), (1e-3, 1e-3, "ms"), (1, 1, "s"), (300, 60, "min"), (4 * 3600, 3600, "h")),
    "bytes": ((0, 1, "B"), (1e3, 1e3, "kB"), (1e6, 1e6, "MB"), (1e9, 1e9, "GB"), (1e12, 1e12, "TB")),
    "memory": ((0, 1, "B"), (2**10, 2**10, "KiB"), (2**20, 2**20, "MiB"), (2**30, 2**30, "GiB")),
    **dict.fromkeys(("steps", "messages"), ((0, 1, ""), (1e5, 1e3, "thousands"), (1e8, 1e6, "millions"))),
}
NAMES = {"seconds": "time", "bytes": "bytes sent"}


class Curve(NamedTuple):
    """A curve. low, high: of its band, if given. marked: points get dots if they are few. style: index in STYLES.
    shared: place among so many equal curves, whose colours take turns along their common path."""

    x: np.ndarray
    y: np.ndarray
    colour: str
    style: int = 0
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    marked: bool = False
    width: float = 1.4
    shared: tuple[int, int] = (0, 1)


def scale(values: Any, quantity: str) -> tuple[float, str]:
    """Return (factor, unit): value / factor is in the unit; (1, "") for a quantity without unit (not in SCALES)."""
    most = float(np.nanmax(np.abs(values), initial=0.0))
    fitting = [(size, unit) for least, size, unit in SCALES.get(quantity, ()) if most >= least]
    return fitting[-1] if fitting else (1.0, "")


def with_unit(quantity: str, unit: str, name: str = "") -> str:
    name = name or NAMES.get(quantity, quantity)
    return f"{name} ({unit})" if unit else name


def label(axes: Any, x: str, y: str) -> None:
    """Set the labels of both axes: `x` below the right end of the x axis, `y` above the y axis."""
    height = axes.get_position().height * axes.figure.get_size_inches()[1]
    axes.set_xlabel(x, loc="right")
    axes.xaxis.set_label_coords(1, -BELOW / height)  # finding a place for the label takes as long as drawing all ticks
    axes.yaxis.set_label_coords(0, 1)
    axes.text(0, 1 + ABOVE / height, y, transform=axes.transAxes, ha="left", va="bottom")


def ticks(axes: Any, which: str, log: bool = False) -> None:
    """Set few ticks with plain numbers on the axis `which` (x or y). log: the axis is logarithmic."""
    from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullLocator

    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if log and low > 0 else 0.0
    if decades < 1:  # powers of ten would be too few
        axis.set_major_locator(MaxNLocator(TICKS + (which == "y"), steps=[1, 2, 2.5, 5, 10]))
    else:
        subs = (1, 2, 5) if decades < 1.6 else (1, 3) if decades < 2.6 else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=6))
    axis.set_minor_locator(NullLocator())

    class TickLabels(Formatter):
        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_labels(values)

        def __call__(self, value: float, pos: int | None = None) -> str:
            return tick_labels([value])[0]

    axis.set_major_formatter(TickLabels())


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return numbers with so many digits (6 or more) that the error of each is far below the gaps of the values."""
    gap = float(np.diff(np.unique(values)).min(initial=math.inf))
    exact = [0.0 if abs(value) < 1e-13 * gap < math.inf else float(value) for value in values]
    for digits in range(6, 18):
        labels = [f"{value:.{digits}g}" for value in exact]
        if all(abs(float(label) - value) < 1e-3 * gap for label, value in zip(labels, exact, strict=True)):
            break
    return [re.sub(r"e([+-])0*", lambda m: "e" + m[1].strip("+"), label) for label in labels]


def curves(axes: Any, lines: Sequence[Curve], quantity: str, y: str, percent: bool = False, free: bool = True) -> None:
    """Draw lines against a quantity, such as steps. percent: y times 100. free: y is logarithmic for a large range."""
    factor, unit = scale(np.concatenate([line.x for line in lines]), quantity)
    times = 100.0 if percent else 1.0
    values = np.concatenate([times * line.y[np.isfinite(line.y)] for line in lines])
    log = bool(free and len(values) and values.min() > 0 and values.max() > 30 * values.min())
    if log:
        axes.set_yscale("log")
    for line in lines:
        there = np.isfinite(line.x) & np.isfinite(line.y)
        x, mean = line.x[there] / factor, times * line.y[there]
        marker = "o" if (line.marked and len(x) <= 25) or len(x) == 1 else None
        place, of = line.shared
        style = (DASH * (of - place), (DASH, DASH * (of - 1))) if place else STYLES[line.style]
        axes.plot(x, mean, color=line.colour, ls=style, lw=line.width, marker=marker, ms=2.6)
        if line.low is not None and line.high is not None and not place:
            low, high = times * line.low[there], times * line.high[there]
            if log:
                low = np.maximum(low, values.min() / 3)
            axes.fill_between(x, low, high, color=line.colour, alpha=0.22, lw=0)
    axes.grid(axis="y")
    ticks(axes, "x")
    ticks(axes, "y", log)
    axes.margins(x=0.02)
    label(axes, with_unit(quantity, unit), f"{y} (%)" if percent else y)


def group_size(count: int) -> int:
    """Return how many of `count` neighbours are drawn as one group, so that there are at most GROUPS groups."""
    return max(1, -(-count // GROUPS))


def grouped(values: Iterable[Any]) -> tuple[list[str], np.ndarray]:
    """Return the name of each group of neighbouring ranks, and the mean of its known values; NaN if it has none."""
    numbers = np.array([math.nan if each is None else float(each) for each in values])
    size, names, means = group_size(len(numbers)), [], []
    for first in range(0, len(numbers), size):
        part = numbers[first : first + size]
        known = part[np.isfinite(part)]
        names.append(str(first) if len(part) == 1 else f"{first}-{first + len(part) - 1}")
        means.append(known.mean() if len(known) else math.nan)
    return names, np.array(means)


def over_ranks(axes: Any, parts: Sequence[tuple[Sequence[float], str]], y: str, quantity: str) -> None:
    """Draw a stacked bar for each rank, or of means for a group of neighbours. parts: (a value per rank, colour)."""
    count = max(len(values) for values, _ in parts)
    padded = [([*values, *[math.nan] * (count - len(values))], colour) for values, colour in parts]
    size, names = group_size(count), grouped(padded[0][0])[0]
    x = "rank" if size == 1 else f"ranks, means of {size} neighbours"
    bars(axes, names, [(grouped(values)[1], colour) for values, colour in padded], x, y, quantity)


def bars(
    axes: Any, names: Sequence[str], parts: Sequence[tuple[np.ndarray, str]], x: str, y: str, quantity: str = ""
) -> None:
    """Draw a stacked bar for each name, side by side. parts: (a value per name, colour). x, y: labels of the axes."""
    heights = [np.nan_to_num(values) for values, _ in parts]
    factor, unit = scale(np.sum(heights, axis=0), quantity)
    bottom = np.zeros(len(names))
    for values, (_, colour) in zip(heights, parts, strict=True):
        axes.bar(range(len(names)), values / factor, 0.8, bottom, color=colour, edgecolor=PAPER, lw=0.4)
        bottom = bottom + values / factor
    pad = max(0.0, (FEW_BARS - len(names)) / 2)  # few bars are no wider
    axes.set_xlim(-0.6 - pad, len(names) - 0.4 + pad)
    longest = max(map(len, names), default=1)
    every = max(1, math.ceil(len(names) * (longest + 1.5) / 38))
    axes.set_xticks(range(0, len(names), every), list(names)[::every])
    axes.grid(axis="y")
    if not np.any(bottom > 0):
        axes.set_ylim(0, 1)
    ticks(axes, "y")
    label(axes, x, with_unit(quantity, unit, y))


def dots(axes: Any, rows: Sequence[tuple[str, float, float, float, str]], quantity: str, x: str) -> None:
    """Draw rows (name, mean, low, high, colour), one below the other: a point at mean on a line from low to high."""
    highest = [each[3] for each in rows if math.isfinite(each[3])]
    factor, unit = scale(np.array(highest), quantity)
    for place, (_, mean, low, high, colour) in enumerate(rows):
        if math.isfinite(mean):
            axes.plot([low / factor, high / factor], [place, place], color=colour, lw=2, alpha=0.6)
            axes.plot([mean / factor], [place], "o", color=colour, ms=6)
    axes.set_yticks(range(len(rows)), [each[0] for each in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    ticks(axes, "x")
    label(axes, with_unit(quantity, unit, x), "line")


def matrix(axes: Any, values: np.ndarray, size: int, unit: str) -> None:
    """Draw the values as cells, brighter if larger, with numbers if there are few. size: ranks in a row or column."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    count = len(values)
    shown = np.where(values > 0, values, np.nan)
    most = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    mapping = ScalarMappable(Normalize(0, most), "viridis")
    axes.imshow(shown, cmap="viridis", vmin=0, vmax=most, interpolation="none", aspect="auto")
    if count <= 6:
        for row in range(count):
            for column in range(count):
                if (value := values[row, column]) > 0:
                    bright = np.dot(mapping.to_rgba(value)[:3], (0.3, 0.59, 0.11)) > 0.5
                    colour = "#000000" if bright else "#ffffff"
                    axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=colour)
    else:
        box = axes.get_position()
        axes.set_position([box.x0, box.y0, box.width * 0.86, box.height])
        side = axes.figure.add_axes([box.x0 + box.width * 0.89, box.y0, box.width * 0.03, box.height])
        bar = axes.figure.colorbar(mapping, cax=side)
        bar.outline.set_visible(False)
        side.tick_params(length=0, pad=2, labelsize=FONT - 1)
        ticks(side, "y")
    every = max(1, math.ceil(count / 8))
    names = [str(place * size) for place in range(0, count, every)]
    axes.set_xticks(range(0, count, every), names)
    axes.set_yticks(range(0, count, every), names)
    axes.spines[:].set_visible(False)
    many = "" if size == 1 else f", {size} in a row"
    label(axes, f"to rank{many}", f"from rank{many}; {unit}")


def lanes(
    axes: Any,
    names: Sequence[str],
    layers: Sequence[tuple[list[tuple[int, float, float]], str, float, float]],
    seconds: float,
) -> None:
    """Draw layers (spans, colour, top, bottom); a lane is -0.5 (top) to 0.5. Span: (lane, start, stop <= `seconds`)."""
    factor, unit = scale(np.array([seconds]), "seconds")
    for spans, colour, low, high in layers:
        corners = [(start / factor, stop / factor, lane + low, lane + high) for lane, start, stop in spans]
        rectangles(axes, corners, colour)
    frame_lanes(axes, names, seconds / factor, unit)


def boxes(axes: Any, names: Sequence[str], cells: Sequence[tuple[int, float, float, str, str]], seconds: float) -> None:
    """Draw cells (lane, start, stop, text, colour), with the text if there is room. seconds: of the whole axis."""
    factor, unit = scale(np.array([seconds]), "seconds")
    for colour in dict.fromkeys(cell[4] for cell in cells):
        own = [cell for cell in cells if cell[4] == colour]
        rectangles(axes, [(cell[1] / factor, cell[2] / factor, cell[0] - 0.4, cell[0] + 0.4) for cell in own], colour)
    until = dict.fromkeys(range(len(names)), -math.inf)
    for lane, start, stop, text, _ in sorted(cells, key=lambda cell: cell[1]):
        room = 0.022 * (len(text) + 0.3) * seconds / 2
        middle = (start + stop) / 2
        if stop - start > 1.6 * room and middle - room > until[lane] and room < middle < seconds - room:
            style = {"ha": "center", "va": "center_baseline", "fontsize": FONT - 1, "color": "#ffffff"}
            axes.text(middle / factor, lane, text, **style)
            until[lane] = middle + room
    frame_lanes(axes, names, seconds / factor, unit)


def frame_lanes(axes: Any, names: Sequence[str], end: float, unit: str) -> None:
    """Set limits, ticks and labels of lanes, the first lane on top. end: of the time axis, in `unit`."""
    axes.set_ylim(len(names) - 0.45, -0.55)
    every = max(1, math.ceil(len(names) / 10))
    axes.set_yticks(range(0, len(names), every), list(names)[::every])
    axes.set_xlim(0, end)
    ticks(axes, "x")
    label(axes, f"time ({unit})", "rank")


def rectangles(axes: Any, corners: Sequence[tuple[float, float, float, float]], colour: str) -> None:
    """Draw rectangles (left, right, bottom, top) as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not corners:
        return
    points: list[tuple[float, float]] = []
    for left, right, bottom, top in corners:
        points += [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(corners)
    axes.add_patch(PathPatch(Path(points, codes), facecolor=colour, edgecolor=PAPER, lw=0.4))
