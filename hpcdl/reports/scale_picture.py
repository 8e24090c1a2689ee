"""The picture of a simulation at scale (hpcdl plan simulate): seconds of a step against ranks, a line a strategy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.reports import charts, figures


def check(path: Path) -> None:
    """Raise UsageError where no picture can be made there, before anything is computed."""
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--picture {path}: a picture is .png or .svg")
    figures.check_library()


def write(path: Path, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]], compute: float) -> None:
    """Both axes logarithmic. lines: (name, ranks, seconds); compute: the seconds of it that are computing."""

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        made = [
            charts.Curve(np.array(ranks, float), np.array(seconds), *figures.look(i), marked=True)
            for i, (_, ranks, seconds) in enumerate(lines)
        ]
        charts.curves(axes, made, "ranks", "seconds of a step")
        axes.set_yscale("log")
        axes.axhline(compute, color="grey", lw=0.8, ls=":")
        for which in ("x", "y"):
            charts.ticks(axes, which, log=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")

    keys = [figures.Key(name, *figures.look(i)) for i, (name, _, _) in enumerate(lines)]
    title = "A step on so many ranks; dotted: its computing"
    with figures.drawing():
        figures.save(figures.Picture("scale", title, "", draw, keys), path)
