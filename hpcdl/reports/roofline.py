"""The roofline of this machine, with our kernels and a model's layers; what a run computes for each byte it sends.

                         peak          a point's height is what it reaches; no higher than
    GFLOP/s   ________________
             /                             min(peak, intensity * bandwidth)
            /   . a kernel
           /                           left of the ridge memory bounds it, right of it arithmetic
            flops for each byte

(Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.) Flops and bytes are
counted (kernels/intensity.py, hpcdl/models/work.py). Seconds are measured on one thread; the shortest of several
times counts, as for the roofs. A layer whose operands are in a cache may lie above the memory's roof. A run's flops
per sent byte, beside the machine's flops per copied byte, show if computing or sending takes longer."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.kernels.cases import CASES
from hpcdl.kernels.intensity import COSTS
from hpcdl.models import TRANSFORMERS, for_data
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.losses import Loss
from hpcdl.models.work import AttentionCall, GroupedProduct, Operations, Product, flops, moved, operations
from hpcdl.planning.summaries import summary_of
from hpcdl.random import Random
from hpcdl.reports import figures
from hpcdl.reports.figures import COLOURS, SOFT, STYLES, Key, Picture

REPEATS = 7
SECONDS = ("compute_seconds_per_rank", "communication_seconds_per_rank", "idle_seconds_per_rank")
NEEDED = ("parameters", "steps", "batch_size", "bytes_sent_per_rank", *SECONDS)


class Point(NamedTuple):
    """Flops, bytes and seconds of an operation; kind: kernel, forward or backward."""

    name: str
    kind: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def gflops(self) -> float:
        return 1e-9 * self.flops / self.seconds

    def row(self) -> dict[str, Any]:
        return {"what": "point", **self._asdict(), "intensity": self.intensity, "gflops": self.gflops}


def attainable(intensity: Any, peak: float, bandwidth: float) -> Any:
    """Return min(peak, intensity * bandwidth) in GFLOP/s. peak: GFLOP/s; bandwidth: GB/s."""
    return np.minimum(peak, intensity * bandwidth)


def kernel_points(size: int, seconds: float, dtype: str = "float32") -> list[Point]:
    """Return a point for each kernel with known flops, timed for about `seconds`. Its first array has `size` bytes."""
    points, elements = [], size // np.dtype(dtype).itemsize
    for name, case in ((name, CASES[name]) for name in COSTS if name in CASES and COSTS[name].per_element):
        columns = min(case.columns, elements)
        args = case.make(max(1, elements // columns), columns, dtype, np.random.default_rng(0))
        shape = args[case.main].shape if args[case.main].ndim == 2 else (args[case.main].size, 1)
        taken = shortest(partial(case.kernel, *args), seconds)  # type: ignore[misc]
        points.append(Point(name, "kernel", COSTS[name].flops(*shape), case.traffic(*args), taken))
    return points


def shortest(call: Callable[[], Any], seconds: float) -> float:
    """Return the shortest seconds of a call, of REPEATS calls or as many as fit into `seconds`, at most 1000."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    call()
    return min(timed() for _ in range(int(min(1000, max(REPEATS, seconds / max(timed(), 1e-9))))))


def product_flops(counted: list[tuple[Operations, Operations]]) -> float:
    """Return the flops of all products of a step, those within attention among them."""
    every = [each for layer in counted for done in layer for each in done]
    inner = sum(each.products() for each in every if isinstance(each, AttentionCall))
    return inner + sum(each.flops() for each in every if isinstance(each, Product | GroupedProduct))


def product_gflops(
    counted: list[tuple[Operations, Operations]], dtype: str = "float32", repeats: int = REPEATS
) -> float:
    """Return the GFLOP/s of a step's BLAS products, each by itself on one thread, with contiguous operands.
    The shortest of `repeats` times counts: the model's step is no faster than that."""
    every = [each for layer in counted for done in layer for each in done if isinstance(each, Product)]
    random, seconds = np.random.default_rng(0), 0.0
    with threadpool_limits(1):
        for product, times in Counter(every).items():
            m, k, n, batch, _ = product
            a, b = (random.random((batch, *shape)).astype(dtype) for shape in ((m, k), (k, n)))
            call, span = partial(np.matmul, a, b, np.empty((batch, m, n), dtype)), []
            for _ in range(1 + repeats):
                start = time.perf_counter()
                call()
                span.append(time.perf_counter() - start)
            seconds += times * min(span[1:])
    return 1e-9 * flops(every) / seconds


# A model with a batch, and for each layer what it does forward and backward with it.
Prepared = tuple[Layered, Any, list[tuple[Operations, Operations]]]


def prepare(spec: str, data: str, rows: int, dtype: str = "float32") -> Prepared:
    """Return the model, a batch of `rows` examples, and each layer's operations. UsageError if they are not counted."""
    opened = open_data(data or ("text" if spec.partition(":")[0] in TRANSFORMERS else "digits"), dtype=dtype)
    model = for_data(spec, opened, dtype)
    if not isinstance(model, Layered) or opened.sparse:
        known = "softmax, linear, mlp, gpt, llama"
        raise UsageError(f"--roofline {spec}: operations are counted only of {known} on dense data")
    batch = next(opened.batches(0, rows))
    return model, batch, [operations(layer, len(batch.y)) for layer in model.layers]


def layer_points(ready: Prepared, seconds: float) -> list[Point]:
    model, batch, counted = ready
    w = model.initialize(Random(0))
    weights, points, x = FlatWeights(model, w, np.zeros_like(w)), [], batch.x
    for i, (ahead, behind) in enumerate(counted):
        seconds_of, x = measured(model, weights, i, x, batch, seconds)
        for kind, done, taken in zip(("forward", "backward"), (ahead, behind), seconds_of, strict=True):
            if flops(done):
                points.append(Point(model.layers[i].name, kind, flops(done), moved(done, w.itemsize), taken))
    return points


def measured(
    model: Layered, weights: FlatWeights, i: int, x: Any, batch: Any, seconds: float
) -> tuple[tuple[float, float], Any]:
    """Return the shortest seconds of layer i forward and backward, and a copy of its result from x."""
    own, last = range(i, i + 1), isinstance(model.layers[i], Loss)
    targets = model.targets(batch) if last else None
    forward, backward, begun = list[float](), list[float](), time.perf_counter()
    made: Any = None
    while len(forward) <= REPEATS or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        y, kept = model.forward(weights, x, own, targets, batch=batch)
        forward.append(time.perf_counter() - start)
        dy = None
        if not last:
            made = y.copy() if made is None else made
            dy = model.pool.take(*y.shape)
            dy[...] = 1e-3
        start = time.perf_counter()
        dx = model.backward(weights, kept, dy, own)
        backward.append(time.perf_counter() - start)
        if dx is not None:
            model.pool.give(dx)
    return (min(forward[1:]), min(backward[1:])), made  # the first compiles


def balance(folder: Path, peak: float, bandwidth: float) -> dict[str, Any]:
    """Return a run's times, and its flops per sent byte beside this machine's flops per copied byte. Raises UsageError.
    peak: GFLOP/s of a thread; bandwidth: GB/s of a copy. A gradient takes about 6 flops per parameter and example, or
    token of gpt (Kaplan et al., "Scaling laws for neural language models", 2020)."""
    found = summary_of(folder, *NEEDED)
    try:
        mean = {name: float(np.mean(found[name])) for name in NEEDED if name.endswith("_per_rank")}
        kind, _, rest = str(found.get("model", "")).partition(":")
        settings = dict(item.partition("=")[::2] for item in rest.split(","))
        tokens = int(settings.get("context", 64)) if kind in TRANSFORMERS else 1  # of an example
        examples = float(found["steps"]) * float(found["batch_size"])
        work = 6.0 * float(found["parameters"]) * examples * tokens
        ranks = max(1, len(found["bytes_sent_per_rank"]))
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"--run {folder}: some entries of summary.json are no numbers") from None
    sent, compute = mean["bytes_sent_per_rank"], mean["compute_seconds_per_rank"]
    row = {"what": "run", "folder": str(folder), "ranks": ranks, "flops_per_rank": work / ranks}
    row |= {"bytes_sent_per_rank": sent} | {name.removesuffix("_per_rank"): mean[name] for name in SECONDS}
    row |= {"gflops": ratio(1e-9 * work / ranks, compute), "flops_per_byte": ratio(work / ranks, sent)}
    return row | {"machine_flops_per_byte": ratio(peak, bandwidth)}


def ratio(a: float, b: float) -> float | None:
    """Return a / b; None if b is 0."""
    return a / b if b else None


def told(row: dict[str, Any]) -> str:
    compute, waited = row["compute_seconds"], row["communication_seconds"]
    share = f"{compute / waited:.3g} : 1" if waited else "no communication"
    times = f"each {compute:.3g} s computing, {waited:.3g} s communicating ({share})"
    first = f"{row['folder']}: {row['ranks']} ranks, {times}"
    if row["flops_per_byte"] is None:
        return f"{first}; it sent nothing."
    each, machine = row["flops_per_byte"], row["machine_flops_per_byte"]
    said = f"It computes about {each:,.0f} flops for each byte that it sends"
    if not machine:
        return f"{first}. {said}."
    better = "computing" if each > machine else "copying"
    core = f"a core of this machine does {machine:,.0f} flops while it copies a byte"
    return f"{first}. {said}; {core}, so at full speed {better} would take longer, {each / machine:.3g} : 1."


MARKS = {"kernel": ("o", COLOURS[6]), "forward": ("^", COLOURS[0]), "backward": ("v", COLOURS[1])}


def picture(points: list[Point], peak: float, roofs: dict[str, float], title: str) -> Picture:
    """Return the picture of the points under the roofs. peak: GFLOP/s; roofs: GB/s by name."""

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        low = min([0.05, *(each.intensity / 1.5 for each in points)])
        high = max([4 * peak / max(1e-9, min(roofs.values(), default=1.0)), *(2 * each.intensity for each in points)])
        x = np.geomspace(low, high, 200)
        for number, (name, speed) in enumerate(roofs.items()):
            axes.plot(x, attainable(x, peak, speed), color=SOFT, lw=1.0, ls=STYLES[number % len(STYLES)])
            axes.text(0.45 * peak / speed, peak / 2, name, fontsize=6, color=SOFT, ha="right", clip_on=True)
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
    legend = [Key(kind if kind == "kernel" else f"layer {kind}", MARKS[kind][1], None) for kind in used]
    return Picture("roofline", title, "", draw, legend, height=4.6)


CHARACTER, HEIGHT = 4.2, 7  # pixels of a name


def name_points(axes: Any, points: list[Point]) -> None:
    """Write the name of each point beside it if no other name or point is there. Layers come before kernels."""
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
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    figures.write(picture(points, peak, roofs, title), *paths)
    return paths


def points_of(ready: Prepared, size: int, seconds: float) -> list[Point]:
    with threadpool_limits(1):
        return [*layer_points(ready, seconds), *kernel_points(size, seconds)]
