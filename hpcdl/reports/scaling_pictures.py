"""The pictures of hpcdl plan: measured and predicted speed-up against ranks; seconds of a simulated step at scale; the
fastest all-reduce by ranks and bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.planning.scaling import Size
from hpcdl.reports.charts import Curve, curves, label, ticks
from hpcdl.reports.figures import COLOURS, SOFT, STYLES, Key, Picture, check_library, look, write


def check(path: Path) -> None:
    """Raise UsageError if a file of this name can be no picture, or matplotlib is not installed."""
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--picture {path}: the name must end in .png or .svg")
    check_library()


def write_speed_up(measured: Sequence[Size], predicted: Sequence[Size], title: str, path: Path) -> None:
    """Write the picture of speed-ups on logarithmic axes, where the ideal is a line. Raises UsageError like `check`."""
    check(path)
    every = [size.ranks for size in (*measured, *predicted)]
    known = np.array([*every, *(size.speed_up for size in (*measured, *predicted))])
    least, most = 0.7 * known.min(), 1.4 * known.max()  # an interval may be endless
    powers = 2.0 ** np.arange(np.ceil(np.log2(least)), np.log2(most))
    powers = powers[:: -(-len(powers) // 6)]

    def draw(axes: Any) -> None:
        axes.plot(every, every, color=SOFT, ls=STYLES[1], lw=1)
        looks = {"color": COLOURS[0], "ms": 3.5}, {"color": COLOURS[1], "ls": STYLES[2], "ms": 2.5}
        for sizes, look_of in zip((measured, [measured[-1], *predicted]), looks, strict=True):
            axes.plot([size.ranks for size in sizes], [size.speed_up for size in sizes], marker="o", **look_of)
        bounds = {size.ranks: size.interval for size in predicted if size.interval is not None}
        if bounds:
            low, high = zip(*bounds.values(), strict=True)
            axes.fill_between([*bounds], low, np.minimum(high, 1e6 * max(bounds)), color=COLOURS[1], alpha=0.22, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.grid(axis="y")
        axes.set_ylim(least, most)
        axes.set_yticks(powers, [f"{p:g}" for p in powers])
        axes.set_xticks(every, [f"{p:g}" for p in every])
        axes.minorticks_off()
        label(axes, "ranks", "speed-up")

    legend = (
        Key("measured", COLOURS[0], 0),
        Key("foretold, with its 95 % interval", COLOURS[1], 2),
        Key("if nothing were lost", SOFT, 1),
    )
    write(Picture("scaling", title, "", draw, legend), path)


def write_simulation(path: Path, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]], compute: float) -> None:
    """Write the picture of lines (name, ranks, seconds) on logarithmic axes. compute: seconds of a step's computing."""

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        made = [
            Curve(np.array(ranks, float), np.array(seconds), *look(i), marked=True)
            for i, (_, ranks, seconds) in enumerate(lines)
        ]
        curves(axes, made, "ranks", "seconds of a step")
        axes.set_yscale("log")
        axes.axhline(compute, color="grey", lw=0.8, ls=":")
        for which in ("x", "y"):
            ticks(axes, which, log=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")

    keys = [Key(name, *look(i)) for i, (name, _, _) in enumerate(lines)]
    write(Picture("scale", "A step, by number of ranks; dotted: its computing", "", draw, keys), path)


def write_fastest(path: Path, sizes: Sequence[int], lengths: Sequence[str], names: Sequence[Sequence[str]]) -> None:
    """Write the picture of the fastest all-reduce: a cell for each of the numbers of ranks `sizes` and the bytes
    `lengths` (as texts), coloured by its name in `names` (sizes, lengths)."""
    found = sorted({name for row in names for name in row})

    def draw(axes: Any) -> None:
        from matplotlib.colors import ListedColormap

        numbers = [[found.index(name) for name in row] for row in zip(*names, strict=True)]
        colours = ListedColormap([look(i)[0] for i in range(len(found))])
        axes.pcolormesh(numbers, cmap=colours, vmin=-0.5, vmax=len(found) - 0.5, edgecolor="white", linewidth=0.3)
        every = -(-len(sizes) // 6)
        shown = [f"{number / 1000:.3g}k" if number >= 1000 else f"{number}" for number in sizes]
        axes.set_xticks([i + 0.5 for i in range(0, len(sizes), every)], shown[::every])
        marks = range(0, len(lengths), 5)
        axes.set_yticks([i + 0.5 for i in marks], lengths[::5])
        label(axes, "ranks", "bytes of the vector")

    keys = [Key(name, look(i)[0], None) for i, name in enumerate(found)]
    write(Picture("fastest", "The fastest all-reduce", "", draw, keys), path)
