"""Tables of a simulation: strategies by number of ranks, and checkpoint intervals."""

import json
from pathlib import Path
from typing import Any, TypeAlias

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_write
from hpcdl.formatting import size
from hpcdl.planning import collective_time, failures
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.step_simulation import Simulated, StepWork, simulate
from hpcdl.random import Random

Results: TypeAlias = list[list[Simulated | str]]  # by strategy and number of ranks
RUNS = 200  # of a job with failures
LENGTHS = {size(2**power).replace(".00", ""): 2**power for power in range(10, 31)}  # bytes, for the fastest all-reduce
HOUR = 3600.0


def simulate_all(texts: list[str], cluster: Cluster, work: StepWork, sizes: list[int], steps: int) -> Results:
    """Simulate each strategy on each number of ranks; a strategy that cannot run gives the reason as a text.
    Raises UsageError if a strategy runs on none of these numbers."""
    results: Results = []
    for text in texts:
        line: list[Simulated | str] = []
        for ranks in sizes:
            try:
                line.append(simulate(text, cluster, work, ranks, steps))
            except UsageError as error:
                line.append(str(error))
        if all(isinstance(each, str) for each in line):
            raise UsageError(str(line[0]))
        results.append(line)
    return results


def table(results: Results, sizes: list[int]) -> list[str]:
    """Return the table: seconds of a step, of messages, of waiting, the share of computing, and staleness."""
    lines = [f"{'strategy':44}{'ranks':>9}{'a step':>12}{'messages':>12}{'waiting':>12}{'computing':>11}{'stale':>9}"]
    for line in results:
        for ranks, each in zip(sizes, line, strict=True):
            if isinstance(each, str):
                lines.append(f"{'':44}{ranks:>9,}  {each}")
                continue
            name = each.strategy if each is line[0] else ""
            times = "".join(f"{duration(value):>12}" for value in (each.seconds, each.messages, each.waiting))
            stale = f"{each.staleness:,.0f}" if each.staleness else ""
            lines.append(f"{name:44}{ranks:>9,}{times}{each.efficiency:>11.1%}{stale:>9}")
    return lines


def duration(seconds: float) -> str:
    """Return seconds as a text in s, ms or us."""
    size = max(0.0, seconds)
    unit, factor = ("s", 1.0) if size >= 1 else ("ms", 1e3) if size >= 1e-3 else ("us", 1e6)
    return f"{size * factor:.3g} {unit}" if size * factor >= 0.0005 else f"0 {unit}"


def checkpoint_table(
    sizes: list[int], cluster: Cluster, hours: float, checkpoint: float, restart: float, work: float
) -> list[str]:
    """Return the table of checkpoint intervals by Young, Daly and the optimum, whose cost is also simulated.
    hours: mean time between failures of a node. checkpoint, restart: seconds. work: hours of the job without these."""
    lines = [f"{'ranks':>9}{'fails every':>14}{'Young':>11}{'Daly':>11}{'best':>11}{'costs':>9}{'simulated':>18}"]
    for ranks in sizes:
        between = hours * HOUR / cluster.nodes(ranks)
        interval = failures.optimal_interval(between, checkpoint, restart)
        expected = failures.slowdown(interval, between, checkpoint, restart)
        if expected > 100:
            lines.append(f"{ranks:>9,}{duration(between):>14}  a job that fails so often never ends")
            continue
        segments = max(1, round(work * HOUR / interval))
        taken = failures.simulate_runs(segments * interval, interval, between, checkpoint, restart, RUNS, Random(0))
        ratio = taken / (segments * interval) - 1
        laws = (failures.young(between, checkpoint), failures.daly(between, checkpoint), interval)
        cells = "".join(f"{duration(each):>11}" for each in laws)
        spread = f"{ratio.mean():.1%} +- {ratio.std():.1%}"
        lines.append(f"{ranks:>9,}{duration(between):>14}{cells}{expected - 1:>9.1%}{spread:>18}")
    return lines


def write(path: Path, results: Results, about: dict[str, Any]) -> None:
    """Write all numbers as JSON. about: further entries."""
    there = [each for line in results for each in line if not isinstance(each, str)]
    lines = [each._asdict() | {"waiting": each.waiting, "efficiency": each.efficiency} for each in there]
    with blamed_on(f"--json {path} cannot be written"), atomic_write(path) as file:
        file.write(json.dumps(about | {"simulated": lines}, indent=1).encode())


def fastest_table(cluster: Cluster, sizes: list[int]) -> tuple[list[str], list[list[str]]]:
    """Return the table of the fastest all-reduces, a line for each number of ranks, and their names by number of ranks
    and by bytes (LENGTHS)."""
    names = [[collective_time.fastest(cluster, ranks, bytes) for bytes in LENGTHS.values()] for ranks in sizes]
    lengths = [*LENGTHS]
    lines = [f"{'ranks':>9}  the fastest all-reduce of {lengths[0]} to {lengths[-1]}"]
    for ranks, row in zip(sizes, names, strict=True):
        last = [i for i, name in enumerate(row) if row[i + 1 : i + 2] != [name]]
        parts = [f"{row[i]} to {lengths[i]}" for i in last[:-1]] + [row[-1]]
        lines.append(f"{ranks:>9,}  {', '.join(parts)}")
    return lines, names


def curves(results: Results) -> list[tuple[str, list[float], list[float]]]:
    """Return each strategy's name, the numbers of ranks on which it runs, and its seconds of a step on each."""
    there = [[each for each in line if not isinstance(each, str)] for line in results]
    return [(of[0].strategy, [each.ranks for each in of], [each.seconds for each in of]) for of in there]
