"""The limits of parallelism, from runs on 1, 2, 4, ... ranks: speed-up, serial fraction, prediction, and losses.

    p ranks, t(p) seconds of a step          strong: the batch is the same        weak: the batch grows with p
    speed-up                                 S = t(1) / t(p)                      S = p t(1) / t(p)
    efficiency                               S / p                                S / p
    Amdahl         t(p) = a + b / p                s = a / (a + b), the serial part of the time of one rank; S <= 1 / s
    Karp-Flatt     e = (1/S - 1/p) / (1 - 1/p)     rises with p if more than a serial part limits the speed-up
    Gustafson      S = p - s' (p - 1)              s' = the serial part of the time that p ranks take

Without a run on one rank, the smallest, on q ranks, takes its place: S(q) = q. Fits are by least squares of relative
errors: t(p) by a + b / p, neither below 0 (strong), and p - S by s' (p - 1) (weak). The interval of a prediction is the
95 % interval of one more run, by Student's t with the residuals of the runs; a run on each of two sizes gives none.
(Amdahl, AFIPS 1967; Gustafson, "Reevaluating Amdahl's law", CACM 1988; Karp and Flatt, "Measuring parallel processor
performance", CACM 1990)

Losses are the seconds of all ranks beyond those of the smallest run for the same number of examples:

    communication    inside the communicator, not blocked       imbalance    blocked while a rank had more to compute
    bubble           a pipeline's idle share                    idle         blocked otherwise
    slower           computing that takes longer than before    data, rest   waiting for batches; unknown"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.formatting import counted, table
from hpcdl.planning.summaries import summary_of

NEEDED = ("seconds", "steps", "batch_size", "workers", "model", "data")
PER_RANK = ("compute_seconds_per_rank", "communication_seconds_per_rank", "idle_seconds_per_rank")
SAME = ("strategy", "model", "data", "parameters")
# Student's t, two-sided 95 %, by degrees of freedom from 1 on; beyond, that of the normal distribution and a little.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MANY = 2.0
FOREVER = 1 << 60  # ranks
NEAR = 0.01  # relative difference of batches that count as equal


class ScalingRun(NamedTuple):
    """A run. step, batch: seconds and examples of a step. Arrays: seconds by rank. bubble: share of all seconds."""

    folder: str
    ranks: int
    step: float
    batch: float
    steps: int
    compute: np.ndarray
    communication: np.ndarray
    idle: np.ndarray
    data: np.ndarray
    bubble: float
    noise_scale: float | None  # None: not measured

    @property
    def seconds(self) -> float:
        return self.ranks * self.step * self.steps


class Size(NamedTuple):
    """Results on `ranks` ranks. karp_flatt (fraction), gustafson (speed-up): None for 1. interval: of a prediction."""

    ranks: int
    step: float
    speed_up: float
    karp_flatt: float | None
    gustafson: float | None
    interval: tuple[float, float] | None = None

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.ranks


class Scaling(NamedTuple):
    """The scaling of a training. serial: Amdahl's s (strong) or Gustafson's s' (weak). limit: upper bound of the
    speed-up. lost: losses by number of ranks and name, as shares of all ranks' seconds."""

    weak: bool
    serial: float
    limit: float
    runs: list[ScalingRun]
    sizes: list[Size]
    predicted: list[Size]
    lost: dict[int, dict[str, float]]


def read(path: str | Path) -> ScalingRun:
    """Read a run's summary. UsageError if it lacks an entry, or the run took no step."""
    summary = summary_of(path, *NEEDED, *PER_RANK)
    lists: list[Any] = [summary[name] for name in PER_RANK]
    if not all(isinstance(each, list) and len(each) == summary["ranks"] and None not in each for each in lists):
        raise UsageError(f"{path}: the seconds of some ranks are missing or do not fit; give uninterrupted runs")
    if not (summary["steps"] > 0 and summary["seconds"] > 0):
        raise UsageError(f"{path}: the run took no step; give runs with steps")
    compute, communication, idle = (np.array(each, float) for each in lists)
    noise = summary.get("noise_scale")
    data = [each or 0.0 for each in summary.get("data_seconds_per_rank") or [0.0] * summary["ranks"]]
    ranks, steps, step = int(summary["ranks"]), int(summary["steps"]), summary["seconds"] / summary["steps"]
    bubble, scale = float(summary.get("idle_share") or 0.0), noise if isinstance(noise, float) else None
    spent = compute, communication, idle, np.array(data, float)
    return ScalingRun(str(path), ranks, step, float(summary["batch_size"]), steps, *spent, bubble, scale)


def scaling(folders: Sequence[str | Path], further: int = 2) -> Scaling:
    """Return the scaling of these runs. further: number of predicted sizes, each twice the one before.
    UsageError for fewer than two sizes, and for runs of different trainings."""
    for key in SAME:
        values = {str(summary_of(folder).get(key)) for folder in folders}
        if len(values) > 1:
            raise UsageError(f"the runs differ in {key} ({' and '.join(sorted(values))}): give runs of one training")
    runs = sorted((read(folder) for folder in folders), key=lambda run: run.ranks)
    if len({run.ranks for run in runs}) < 2:
        raise UsageError("scaling needs runs on at least two numbers of ranks, such as 1, 2 and 4")
    weak = is_weak(runs)
    first = runs[0].ranks
    numbers = dict.fromkeys(run.ranks for run in runs)
    times = {p: float(np.mean([run.step for run in runs if run.ranks == p])) for p in numbers}
    base = times[first]
    serial, predict = gustafson_fit(runs, base, first) if weak else amdahl_fit(runs)

    def speed_up(ranks: int, step: float) -> float:
        """Return the speed-up by the module's formula; infinite for a time of 0 or less."""
        return (ranks if weak else first) * base / step if step > 0 else math.inf

    sizes = [describe_size(p, t, speed_up(p, t), serial, weak) for p, t in times.items()]
    predicted = []
    for k in range(1, further + 1):
        p = runs[-1].ranks * 2**k
        t, low, high = predict(p)
        bounds = None if low is None or high is None else (speed_up(p, high), speed_up(p, low))
        predicted.append(describe_size(p, t, speed_up(p, t), serial, weak)._replace(interval=bounds))
    limit = math.inf if weak else speed_up(1, predict(FOREVER)[0])
    lost = {run.ranks: losses(run, runs[0], weak) for run in runs}
    return Scaling(weak, serial, limit, runs, sizes, predicted, lost)


def is_weak(runs: Sequence[ScalingRun]) -> bool:
    """True if the batch grows in proportion to the ranks, False if it stays the same; UsageError if neither."""

    def alike(values: list[float]) -> bool:
        return max(values) - min(values) <= NEAR * max(values)

    if alike([run.batch for run in runs]):
        return False
    if alike([run.batch / run.ranks for run in runs]):
        return True
    many = ", ".join(f"{run.batch:g} on {run.ranks}" for run in runs)
    raise UsageError(f"batch sizes vary: {many} ranks; give one --batch-size (strong) or one --batch-per-rank (weak)")


def describe_size(ranks: int, step: float, speed: float, serial: float, weak: bool) -> Size:
    """Return the results for a number of ranks; karp_flatt and gustafson are None for a single rank."""
    if ranks == 1:
        return Size(ranks, step, speed, None, None)
    karp_flatt = (1 / speed - 1 / ranks) / (1 - 1 / ranks)
    # Strong scaling: the serial seconds stay the same, as a share of the time on p ranks.
    own = (ranks - speed) / (ranks - 1) if weak else serial / (serial + (1 - serial) / ranks)
    return Size(ranks, step, speed, karp_flatt, ranks - own * (ranks - 1))


def student(degrees: int) -> float | None:
    """Return Student's t, two-sided 95 %; None without a degree of freedom."""
    if degrees < 1:
        return None
    return STUDENT[degrees - 1] if degrees <= len(STUDENT) else MANY + 3 / degrees


def amdahl_fit(runs: Sequence[ScalingRun]) -> tuple[float, Any]:
    """Fit t(p) = a + b / p; return s and a function from ranks to (seconds, low, high)."""
    p, t = (np.array([getattr(run, name) for run in runs], float) for name in ("ranks", "step"))
    x = np.stack([1 / t, 1 / (p * t)], 1)  # relative errors: (a + b / p) / t is to be 1
    (a, b), *_ = np.linalg.lstsq(x, np.ones(len(t)), rcond=None)
    free = 2
    if a < 0 or b < 0:  # super-linear: no serial part; or no gain from ranks at all
        column, free = (1 if a < 0 else 0), 1
        only = float(x[:, column].sum() / (x[:, column] ** 2).sum())
        a, b = (0.0, only) if column == 1 else (only, 0.0)
        x = x[:, column : column + 1]
    residuals = 1 - (a / t + b / (p * t))
    scale = student(len(t) - free)
    factor = 0.0 if scale is None else math.sqrt(float(residuals @ residuals) / (len(t) - free))
    inverse = np.linalg.inv(x.T @ x)

    def predict(ranks: int) -> tuple[float, float | None, float | None]:
        time = a + b / ranks
        if scale is None:
            return time, None, None
        row = np.array([1 / time, 1 / (ranks * time)])
        row = row if free == 2 else row[[1]] if a == 0 else row[[0]]
        width = scale * factor * math.sqrt(1 + float(row @ inverse @ row)) * time
        return time, max(0.0, time - width), time + width

    return float(a / (a + b)), predict


def gustafson_fit(runs: Sequence[ScalingRun], base: float, first: int) -> tuple[float, Any]:
    """Fit S = p - s' (p - q), q the fewest ranks; return s' and a function from ranks to (seconds, low, high)."""
    larger = [run for run in runs if run.ranks > first]
    each = np.array([(run.ranks - run.ranks * base / run.step) / (run.ranks - first) for run in larger])
    weights = np.array([(run.ranks - first) ** 2 / run.ranks**2 for run in larger])  # relative to S = p
    serial = float((weights @ each) / weights.sum())
    scale = student(len(each) - 1)
    spread = 0.0 if scale is None else math.sqrt(float(weights @ (each - serial) ** 2) / (len(each) - 1))

    def predict(ranks: int) -> tuple[float, float | None, float | None]:
        def time(fraction: float) -> float:
            return ranks * base / max(1e-12, ranks - fraction * (ranks - first))

        if scale is None:
            return time(serial), None, None
        weight = (ranks - first) ** 2 / ranks**2
        width = scale * spread * math.sqrt(1 / weight + 1 / weights.sum())
        return time(serial), time(serial - width), time(serial + width)

    return serial, predict


def losses(run: ScalingRun, first: ScalingRun, weak: bool) -> dict[str, float]:
    """Return losses as shares of all ranks' seconds. `useful` is the smallest run's computing for as many examples."""
    examples = run.steps * run.batch / (first.steps * first.batch)
    useful = min(float(run.compute.sum()), float(first.compute.sum()) * examples)
    bubble = min(run.bubble * run.seconds, float(run.idle.sum()))
    uneven = float((run.compute.max() - run.compute).sum())
    imbalance = min(uneven, float(run.idle.sum()) - bubble)
    shares = {
        "useful": useful,
        "slower": float(run.compute.sum()) - useful,
        "communication": float((run.communication - run.idle).sum()),
        "imbalance": imbalance,
        "bubble": bubble,
        "idle": float(run.idle.sum()) - bubble - imbalance,
        "data": float(run.data.sum()),
    }
    shares["rest"] = max(0.0, run.seconds - sum(shares.values()))
    total = sum(shares.values())
    return {name: value / total for name, value in shares.items()}


def report(result: Scaling) -> list[str]:
    """Return the tables of speed-ups, fits, predictions and losses."""
    kind = "weak scaling, the batch grows with the ranks" if result.weak else "strong scaling, all with one batch size"
    lines = [f"{counted(len(result.runs), 'run')}: {kind}"]
    rows = [["ranks", "ms a step", "speed-up", "efficiency", "Karp-Flatt", "Gustafson", "95 % interval"]]
    rows += [size_row(size, "") for size in result.sizes] + [size_row(size, " foretold") for size in result.predicted]
    lines += table(rows)
    if result.weak:
        lines.append(f"serial fraction {result.serial:.4f} of the time of many ranks (Gustafson, least squares)")
    else:
        limit = f": no more than {result.limit:,.1f} times one rank" if result.serial > 0 else ""
        lines.append(f"serial fraction {result.serial:.4f} (Amdahl, least squares){limit}")
    above = [size for size in result.sizes if size.speed_up > 1.02 * size.ranks]
    lines += [f"super-linear on {counted(size.ranks, 'rank')}: a rank's data may fit its cache" for size in above]
    names = [*next(iter(result.lost.values()))]
    shares = [["ranks", *names]]
    shares += [[str(p), *(f"{100 * each[name]:.1f} %" for name in names)] for p, each in result.lost.items()]
    lines += ["where the seconds of all ranks went", *table(shares)]
    for run in result.runs:
        if (noise := run.noise_scale) is not None:
            lines.append(f"{run.folder}: noise scale {noise:,.0f}; larger batches bring little (now {run.batch:g})")
    return lines


def size_row(size: Size, mark: str) -> list[str]:
    """Return a row of the table, with dashes for undefined values."""
    fractions = ["-" if value is None else f"{value:.3f}" for value in (size.karp_flatt, size.gustafson)]
    interval = "-"
    if size.interval is not None:
        low, high = size.interval
        interval = f"{low:.2f} to {high:.2f}" if math.isfinite(high) else f"{low:.2f} or more"
    numbers = f"{1e3 * size.step:.3f}", f"{size.speed_up:.2f}", f"{100 * size.efficiency:.0f} %"
    return [f"{size.ranks}{mark}", *numbers, *fractions, interval]
