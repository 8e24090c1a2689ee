"""What a simulation says: a table of each strategy by the number of ranks, its picture, and how often to save."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_write
from hpcdl.planning import failures
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.step_simulation import Simulated, Work, simulate
from hpcdl.random import Random
from hpcdl.reports import charts, figures

RUNS = 200  # of a job with failures
HOUR = 3600.0


def simulated(
    texts: list[str], cluster: Cluster, work: Work, sizes: list[int], steps: int
) -> list[list[Simulated | str]]:
    """For each strategy what each size gives, or why it cannot be. Raises UsageError where that is so for all sizes."""
    found: list[list[Simulated | str]] = []
    for text in texts:
        line: list[Simulated | str] = []
        for ranks in sizes:
            try:
                line.append(simulate(text, cluster, work, ranks, steps))
            except UsageError as error:
                line.append(str(error))
        if all(isinstance(each, str) for each in line):
            raise UsageError(str(line[0]))
        found.append(line)
    return found


def table(found: list[list[Simulated | str]], sizes: list[int]) -> list[str]:
    """Lines of text: seconds of a step, of it waiting, and the part of it that is computing."""
    said = [f"{'strategy':44}{'ranks':>9}{'a step':>12}{'messages':>12}{'waiting':>12}{'computing':>11}{'stale':>9}"]
    for line in found:
        for ranks, each in zip(sizes, line, strict=True):
            if isinstance(each, str):
                said.append(f"{'':44}{ranks:>9,}  {each}")
                continue
            name = each.strategy if each is line[0] else ""
            times = "".join(f"{shown(value):>12}" for value in (each.seconds, each.messages, each.waiting))
            stale = f"{each.staleness:,.0f}" if each.staleness else ""
            said.append(f"{name:44}{ranks:>9,}{times}{each.efficiency:>11.1%}{stale:>9}")
    return said


def shown(seconds: float) -> str:
    """In a unit in which it is short."""
    size = max(0.0, seconds)
    unit, factor = ("s", 1.0) if size >= 1 else ("ms", 1e3) if size >= 1e-3 else ("us", 1e6)
    return f"{size * factor:.3g} {unit}" if size * factor >= 0.0005 else f"0 {unit}"


def saving(
    sizes: list[int], cluster: Cluster, hours: float, checkpoint: float, restart: float, work: float
) -> list[str]:
    """How often to save, and what failures cost: by Young, Daly, the best, and a simulation of the best.

    hours: between two failures of a node. checkpoint, restart: seconds. work: hours of the job without either.
    """
    said = [f"{'ranks':>9}{'fails every':>14}{'Young':>11}{'Daly':>11}{'best':>11}{'costs':>9}{'simulated':>18}"]
    for ranks in sizes:
        between = hours * HOUR / cluster.nodes(ranks)
        interval = failures.best(between, checkpoint, restart)
        expected = failures.slowdown(interval, between, checkpoint, restart)
        if expected > 100:
            said.append(f"{ranks:>9,}{shown(between):>14}  a job that fails so often does not come to its end")
            continue
        segments = max(1, round(work * HOUR / interval))
        taken = failures.simulated(segments * interval, interval, between, checkpoint, restart, RUNS, Random(0))
        ratio = taken / (segments * interval) - 1
        laws = (failures.young(between, checkpoint), failures.daly(between, checkpoint), interval)
        cells = "".join(f"{shown(each):>11}" for each in laws)
        spread = f"{ratio.mean():.1%} +- {ratio.std():.1%}"
        said.append(f"{ranks:>9,}{shown(between):>14}{cells}{expected - 1:>9.1%}{spread:>18}")
    return said


def write(path: Path, found: list[list[Simulated | str]], about: dict[str, Any]) -> None:
    """All numbers as JSON."""
    lines = [
        each._asdict() | {"waiting": each.waiting, "efficiency": each.efficiency}
        for line in found
        for each in line
        if not isinstance(each, str)
    ]
    with blamed_on(f"--json {path} cannot be written"), atomic_write(path) as file:
        file.write(json.dumps(about | {"simulated": lines}, indent=1).encode())


def picture(path: Path, found: list[list[Simulated | str]], work: Work) -> None:
    """Seconds of a step against ranks, a line for each strategy, both logarithmic. Raises UsageError."""
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--picture {path}: a picture is .png or .svg")
    figures.check_library()
    lines = [[each for each in line if not isinstance(each, str)] for line in found]

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        curves = []
        for i, line in enumerate(lines):
            colour, style = figures.look(i)
            x, y = (np.array([pick(each) for each in line], float) for pick in PICKED)
            curves.append(charts.Curve(x, y, colour, style, marked=True))
        charts.curves(axes, curves, "ranks", "seconds of a step")
        axes.set_yscale("log")
        axes.axhline(work.compute, color="grey", lw=0.8, ls=":")
        charts.ticks(axes, "x", log=True)
        charts.ticks(axes, "y", log=True)

    keys = [figures.Key(line[0].strategy, *figures.look(i)) for i, line in enumerate(lines)]
    title = "Seconds of a step on so many ranks; dotted: its computing"
    with figures.drawing():
        figures.save(figures.Picture("scale", title, "", draw, keys), path)


PICKED: tuple[Callable[[Simulated], float], ...] = (lambda each: each.ranks, lambda each: each.seconds)
