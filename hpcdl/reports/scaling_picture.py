"""The picture of speed-up against ranks: measured, fitted and predicted with its interval, and ideal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.reports.charts import label
from hpcdl.reports.figures import COLOURS, SOFT, STYLES, Key, Picture, check_library, drawing, save


class Points(NamedTuple):
    """Ranks and speed-ups as measured; as foretold, from the largest measured on, with low and high where known."""

    ranks: Sequence[int]
    speed_ups: Sequence[float]
    further: Sequence[int]
    foretold: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def picture(points: Points, title: str) -> Picture:
    """Return the picture; both axes are logarithmic, so that ideal speed-up is a straight line."""
    colour = COLOURS[0]

    def draw(axes: Any) -> None:
        every = np.array([*points.ranks, *points.further], float)
        axes.plot(every, every, color=SOFT, ls=STYLES[1], lw=1)
        axes.plot(points.ranks, points.speed_ups, color=colour, marker="o", ms=3.5)
        beyond = [points.ranks[-1], *points.further], [points.speed_ups[-1], *points.foretold]
        axes.plot(*beyond, color=COLOURS[1], ls=STYLES[2], marker="o", ms=2.5)
        if len(points.low) == len(points.further):
            high = np.minimum(points.high, 1e6 * max(points.further))
            axes.fill_between(points.further, points.low, high, color=COLOURS[1], alpha=0.22, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.grid(axis="y")
        known = np.array([*every, *points.speed_ups, *points.foretold])
        axes.set_ylim(0.7 * known.min(), 1.4 * known.max())  # an interval may be endless
        powers = 2.0 ** np.arange(np.ceil(np.log2(0.7 * known.min())), np.log2(1.4 * known.max()))
        axes.set_yticks(powers[:: -(-len(powers) // 6)], [f"{p:g}" for p in powers[:: -(-len(powers) // 6)]])
        axes.set_xticks(every, [f"{p:g}" for p in every])
        axes.minorticks_off()
        label(axes, "ranks", "speed-up")

    legend = (
        Key("measured", colour, 0),
        Key("foretold, with its 95 % interval", COLOURS[1], 2),
        Key("if nothing were lost", SOFT, 1),
    )
    return Picture("scaling", title, "How many times as fast so many ranks are.", draw, legend)


def write(points: Points, title: str, path: Path) -> None:
    """As a file, .png or .svg. UsageError for another, and where matplotlib is missing."""
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"{path}: a picture is a .png or an .svg")
    check_library()
    with drawing():
        save(picture(points, title), path)
