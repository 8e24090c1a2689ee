"""The roofline of this machine, with our kernels and a model's layers in it, and what a run computes for what it sends.

                         peak          a point's height is what it reaches; no higher than
    GFLOP/s   ________________
             /                             min(peak, intensity * bandwidth)
            /   . a kernel
           /                           left of the ridge memory bounds it, right of it arithmetic
            flops for each byte

(Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.) Flops and bytes are
counted (kernels/intensity.py, hpcdl/models/work.py), seconds are measured, on one thread, the shortest of some, as the
roofs are the best of some. A layer that finds its operands in a cache may stand above the memory's roof.

A run sends bytes between ranks where a kernel moves them to the memory: flops for each byte sent, beside the flops that
the machine does while it copies a byte, say which of both it can wait for.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from hpcdl.data import open_data
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import parse_json
from hpcdl.kernels.cases import CASES
from hpcdl.kernels.intensity import COSTS
from hpcdl.models import for_data
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.losses import Loss
from hpcdl.models.work import Operations, flops, moved, operations
from hpcdl.random import Random
from hpcdl.reports.figures import COLOURS, Key, Picture, drawing, save

REPEATS = 7
SECONDS = ("compute_seconds_per_rank", "communication_seconds_per_rank", "idle_seconds_per_rank")
NEEDED = ("parameters", "steps", "batch_size", "bytes_sent_per_rank", *SECONDS)


class Point(NamedTuple):
    """What an operation does, and in what time; kind: kernel, forward or backward."""

    name: str
    kind: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Flops for each byte."""
        return self.flops / self.bytes

    @property
    def gflops(self) -> float:
        """Billions of flops a second."""
        return 1e-9 * self.flops / self.seconds

    def row(self) -> dict[str, Any]:
        """For the file of --json."""
        return {
            "what": "point",
            "name": self.name,
            "kind": self.kind,
            "flops": self.flops,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "intensity": self.intensity,
            "gflops": self.gflops,
        }


def attainable(intensity: Any, peak: float, bandwidth: float) -> Any:
    """min(peak, intensity * bandwidth) in GFLOP/s, of GFLOP/s and GB/s (Williams et al. 2009, the roofline model)."""
    return np.minimum(peak, intensity * bandwidth)


def kernel_points(size: int, seconds: float, dtype: str = "float32") -> list[Point]:
    """Each kernel whose flops are known, on one thread, its first array of `size` bytes."""
    points = []
    for name, cost in COSTS.items():
        if name not in CASES or not cost.per_element:
            continue
        case = CASES[name]
        elements = size // np.dtype(dtype).itemsize
        columns = min(case.columns, elements)
        args = case.make(max(1, elements // columns), columns, dtype, np.random.default_rng(0))
        shape = args[case.main].shape if args[case.main].ndim == 2 else (args[case.main].size, 1)
        taken = shortest(lambda call=case.kernel, args=args: call(*args), seconds)  # type: ignore[misc]
        points.append(Point(name, "kernel", cost.flops(*shape), case.traffic(*args), taken))
    return points


def shortest(call: Callable[[], Any], seconds: float) -> float:
    """Seconds of a call: the shortest of REPEATS, or of as many as there is time for."""
    call()
    return min(timed(call) for _ in repeats(timed(call), seconds))


def repeats(taken: float, seconds: float) -> range:
    """How often."""
    return range(int(min(1000, max(REPEATS, seconds / max(taken, 1e-9)))))


def timed(call: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Prepared(NamedTuple):
    """A model with a batch, and for each layer what it does forward and backward with it."""

    model: Layered
    batch: Any
    counted: list[tuple[Operations, Operations]]


def prepare(spec: str, data: str, rows: int, dtype: str = "float32") -> Prepared:
    """The model for a data set, with so many examples of it, or with all where it has fewer.

    Raises UsageError for a model or data that there is not, and a model whose operations are not counted.
    """
    opened = open_data(data or ("text" if spec.partition(":")[0] == "gpt" else "digits"), dtype=dtype)
    model = for_data(spec, opened, dtype)
    if not isinstance(model, Layered) or opened.sparse:
        raise UsageError(f"--roofline {spec}: operations are counted for dense data and softmax, linear, mlp or gpt")
    batch = next(opened.batches(0, rows))
    return Prepared(model, batch, [operations(layer, len(batch.y)) for layer in model.layers])


def layer_points(ready: Prepared, seconds: float) -> list[Point]:
    """Each layer forward and backward."""
    model, batch, counted = ready
    w = model.initialize(Random(0))
    weights, points, x = FlatWeights(model, w, np.zeros_like(w)), [], batch.x
    for i, (ahead, behind) in enumerate(counted):
        seconds_of, x = measured(model, weights, i, x, batch, seconds)
        for kind, done, taken in zip(("forward", "backward"), (ahead, behind), seconds_of, strict=True):
            if flops(done):
                points.append(point(model.layers[i].name, kind, done, taken, w.itemsize))
    return points


def point(name: str, kind: str, done: Operations, taken: float, itemsize: int) -> Point:
    """Of a layer."""
    return Point(name, kind, flops(done), moved(done, itemsize), taken)


def measured(
    model: Layered, weights: FlatWeights, i: int, x: Any, batch: Any, seconds: float
) -> tuple[tuple[float, float], Any]:
    """Seconds of layer i forward and backward, and what it makes of x, as a copy."""
    own, last = range(i, i + 1), isinstance(model.layers[i], Loss)
    targets = model.targets(batch) if last else None
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    begun = time.perf_counter()
    made: Any = None
    while len(times["forward"]) <= REPEATS or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        y, kept = model.forward(weights, x, own, targets, batch=batch)
        times["forward"].append(time.perf_counter() - start)
        dy = None
        if not last:
            made = y.copy() if made is None else made
            dy = model.pool.take(*y.shape)
            dy[...] = 1e-3
        start = time.perf_counter()
        dx = model.backward(weights, kept, dy, own)
        times["backward"].append(time.perf_counter() - start)
        if dx is not None:
            model.pool.give(dx)
    forward, backward = (min(each[1:]) for each in times.values())  # the first compiles
    return (forward, backward), made


# -- a run -----------------------------------------------------------------------------------------------------------


def balance(folder: Path, peak: float, bandwidth: float) -> dict[str, Any]:
    """What a run has computed for what it has sent, beside this machine's.

    peak: GFLOP/s of a thread; bandwidth: GB/s of a copy. A gradient takes about 6 flops for each parameter and
    example, of a gpt for each token (Kaplan et al., "Scaling laws for neural language models", 2020). Raises UsageError
    where the folder has no summary of a run with its counts.
    """
    path = folder / "summary.json"
    with blamed_on(f"--run {folder}: summary.json cannot be read"):
        text = path.read_text()
    try:
        found = parse_json(text)
        missing = [name for name in NEEDED if name not in found]
        if missing:
            raise UsageError(f"--run {folder}: summary.json lacks {', '.join(missing)}")
        mean = {name: float(np.mean(found[name])) for name in NEEDED if name.endswith("_per_rank")}
        tokens = settings_of(str(found.get("model", "")), "context", 64)
        examples = float(found["steps"]) * float(found["batch_size"])
        work = 6.0 * float(found["parameters"]) * examples * tokens
        ranks = max(1, len(found["bytes_sent_per_rank"]))
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"--run {folder}: summary.json is no summary of a run") from None
    sent, compute = mean["bytes_sent_per_rank"], mean["compute_seconds_per_rank"]
    return {
        "what": "run",
        "folder": str(folder),
        "ranks": ranks,
        "flops_per_rank": work / ranks,
        "bytes_sent_per_rank": sent,
        "compute_seconds": compute,
        "communication_seconds": mean["communication_seconds_per_rank"],
        "idle_seconds": mean["idle_seconds_per_rank"],
        "gflops": ratio(1e-9 * work / ranks, compute),
        "flops_per_byte": ratio(work / ranks, sent),
        "machine_flops_per_byte": ratio(peak, bandwidth),
    }


def settings_of(spec: str, name: str, default: int) -> int:
    """A setting in the spec of a gpt; 1 for another model."""
    kind, _, rest = spec.partition(":")
    if kind != "gpt":
        return 1
    said = dict(item.partition("=")[::2] for item in rest.split(","))
    return int(said.get(name, default))


def ratio(a: float, b: float) -> float | None:
    """a / b; None where b is 0."""
    return a / b if b else None


def told(row: dict[str, Any]) -> str:
    """A run's row in two sentences."""
    compute, waited = row["compute_seconds"], row["communication_seconds"]
    share = f"{compute / waited:.3g} : 1" if waited else "no communication"
    first = (
        f"{row['folder']}: {row['ranks']} ranks, each {compute:.3g} s computing, {waited:.3g} s communicating ({share})"
    )
    if row["flops_per_byte"] is None:
        return f"{first}; it sent nothing."
    each, machine = row["flops_per_byte"], row["machine_flops_per_byte"]
    said = f"It computes about {each:,.0f} flops for each byte that it sends"
    if not machine:
        return f"{first}. {said}."
    better = "computing" if each > machine else "copying"
    return (
        f"{first}. {said}; a core of this machine does {machine:,.0f} while it copies a byte, so at full speed "
        f"{better} would take longer, {each / machine:.3g} : 1."
    )


# -- the picture -----------------------------------------------------------------------------------------------------

MARKS = {"kernel": ("o", COLOURS[6]), "forward": ("^", COLOURS[0]), "backward": ("v", COLOURS[1])}


def picture(points: list[Point], peak: float, roofs: dict[str, float], title: str) -> Picture:
    """The points under the roofs; peak: GFLOP/s, roofs: GB/s by name."""

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        low = min([0.05, *(each.intensity / 1.5 for each in points)])
        high = max([4 * peak / max(1e-9, min(roofs.values(), default=1.0)), *(2 * each.intensity for each in points)])
        x = np.geomspace(low, high, 200)
        for number, (name, speed) in enumerate(roofs.items()):
            axes.plot(x, attainable(x, peak, speed), color="#5a5b5c", lw=1.0, ls=LINES[number % len(LINES)])
            axes.text(0.45 * peak / speed, peak / 2, name, fontsize=6, color="#5a5b5c", ha="right", clip_on=True)
        for kind, (mark, colour) in MARKS.items():
            mine = [each for each in points if each.kind == kind]
            axes.plot([p.intensity for p in mine], [p.gflops for p in mine], mark, color=colour, ms=4, ls="none")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(min([each.gflops for each in points], default=0.1) / 2, peak * 2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        axes.grid(True)
        axes.set_xlabel("flops for each byte", loc="right")
        axes.set_title("GFLOP/s", loc="left", fontsize=8)
        name_points(axes, points)

    used = [kind for kind in MARKS if any(each.kind == kind for each in points)]
    legend = [Key({"kernel": "kernel"}.get(kind, f"layer {kind}"), MARKS[kind][1], None) for kind in used]
    return Picture("roofline", title, "", draw, legend, height=4.6)


CHARACTER, HEIGHT = 4.2, 7  # pixels of a name
LINES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)))


def name_points(axes: Any, points: list[Point]) -> None:
    """Names beside points, where neither another name nor another point stands; layers first."""
    spots = [axes.transData.transform((each.intensity, each.gflops)) for each in points]
    boxes: list[tuple[float, float, float]] = []  # left, right, height, in pixels
    for number in sorted(range(len(points)), key=lambda k: points[k].kind == "kernel"):
        (x, y), each = spots[number], points[number]
        left, right = x + 4, x + 6 + CHARACTER * len(each.name)
        others = [(a - 2, a + 2, b) for k, (a, b) in enumerate(spots) if k != number]
        if all(right < a or left > b or abs(y - c) > HEIGHT for a, b, c in [*others, *boxes]):
            boxes.append((left, right, y))
            axes.annotate(each.name, (each.intensity, each.gflops), (4, -2), textcoords="offset points", fontsize=5.5)


def write(points: list[Point], peak: float, roofs: dict[str, float], title: str, stem: Path) -> list[Path]:
    """The picture as STEM.png and STEM.svg."""
    drawn = picture(points, peak, roofs, title)
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    with drawing():
        for path in paths:
            save(drawn, path)
    return paths


def points_of(ready: Prepared, size: int, seconds: float) -> list[Point]:
    """Layers, then kernels, on one thread."""
    with threadpool_limits(1):
        return [*layer_points(ready, seconds), *kernel_points(size, seconds)]
