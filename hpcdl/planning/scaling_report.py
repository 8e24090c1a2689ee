"""Tables of the limits of parallelism, for `hpcdl plan scaling`."""

import math

from hpcdl.formatting import counted, table
from hpcdl.planning.scaling import Scaling, Size


def report(result: Scaling) -> list[str]:
    """Return the tables of speed-ups, fits, predictions and losses."""
    kind = "weak scaling, the batch grows with the ranks" if result.weak else "strong scaling, one batch on all"
    lines = [f"{counted(len(result.runs), 'run')}: {kind}"]
    rows = [["ranks", "ms a step", "speed-up", "efficiency", "Karp-Flatt", "Gustafson", "95 % interval"]]
    rows += [row(size, "") for size in result.sizes] + [row(size, " foretold") for size in result.predicted]
    lines += table(rows)
    if result.weak:
        lines.append(f"serial fraction {result.serial:.4f} of the time of many ranks (Gustafson, least squares)")
    else:
        limit = f": no more than {result.limit:,.1f} times one rank" if result.serial > 0 else ""
        lines.append(f"serial fraction {result.serial:.4f} (Amdahl, least squares){limit}")
    above = [size for size in result.sizes if size.speed_up > 1.02 * size.ranks]
    lines += [f"super-linear on {counted(size.ranks, 'rank')}: what each works on may fit a cache" for size in above]
    names = [*next(iter(result.lost.values()))]
    shares = [["ranks", *names]]
    shares += [[str(p), *(f"{100 * each[name]:.1f} %" for name in names)] for p, each in result.lost.items()]
    lines += ["where the seconds of all ranks went", *table(shares)]
    for run in result.runs:
        if run.noise_scale is not None:
            lines.append(
                f"{run.folder}: noise scale {run.noise_scale:,.0f}; batches beyond it (now {run.batch:g}) bring little"
            )
    return lines


def row(size: Size, mark: str) -> list[str]:
    """Return a row of the table, with dashes for undefined values."""
    fractions = ["-" if value is None else f"{value:.3f}" for value in (size.karp_flatt, size.gustafson)]
    interval = "-"
    if size.interval is not None:
        low, high = size.interval
        interval = f"{low:.2f} to {high:.2f}" if math.isfinite(high) else f"{low:.2f} or more"
    numbers = f"{1e3 * size.step:.3f}", f"{size.speed_up:.2f}", f"{100 * size.efficiency:.0f} %"
    return [f"{size.ranks}{mark}", *numbers, *fractions, interval]
