"""Grids of ranks on which a training fits into memory, with ZeRO's stage, micro-batches and recomputation.

    for each (d, p, c, e, t) with d p c e t = ranks that can cut the layers; c > 1 only if no other grid fits
        for stages 0 to 3 of ZeRO, where d c > 1       permanent memory: parameters, gradients, optimizer
        for m = 1, 2, 4, ..., rows micro-batches      temporary memory: activations, with and without recomputation
            the grid fits if the sum of the largest rank is at most the room

Best first: without recomputation (which costs a third more computing), then the smallest idle share of the pipeline,
(p-1)/(m+p-1), then the fewest parts of a layer (their messages are the most frequent) and of a sequence, the lowest
stage of ZeRO, the fewest ranks that share experts, the fewest stages, the fewest micro-batches. The schedule is 1F1B: a
stage has at most p micro-batches in flight, so p + 2 micro-batches show its maximum. The ranks of the first replica's
first and last stage hold most."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcdl.comm.grid import AXES
from hpcdl.errors import UsageError
from hpcdl.memory import KINDS, Memory
from hpcdl.models.mixture import mixtures_of
from hpcdl.parallel.context import check_context
from hpcdl.planning.dry_run import dry_run_step
from hpcdl.planning.memory import MASTER, data, resident
from hpcdl.strategies.description import Cut
from hpcdl.strategies.workload import Workload

LARGEST = 4096  # ranks


class Fit(NamedTuple):
    """A grid of this shape, ranks along AXES, that fits. stage: of ZeRO. bytes: of `rank`, which holds most."""

    shape: tuple[int, ...]
    stage: int
    microbatches: int
    recompute: bool
    bytes: float
    rank: int

    @property
    def idle(self) -> float:
        return (self.shape[1] - 1) / (self.microbatches + self.shape[1] - 1)

    @property
    def order(self) -> tuple:
        """Sort key, best first."""
        _, p, c, e, t = self.shape
        return self.recompute, self.idle, t, c, self.stage, e, p, self.microbatches

    @property
    def options(self) -> str:
        each = zip(AXES, self.shape, strict=True)
        grid = ",".join(f"{axis}={n}" for axis, n in each if n > 1 or axis not in ("context", "expert"))
        more = f" --stage {self.stage}" if self.stage else ""
        return f"--grid {grid}{more} --microbatches {self.microbatches}{' --recompute' * self.recompute}"


def shapes(ranks: int, cut: bool = False, owners: Sequence[int] = (1,)) -> list[tuple[int, int, int, int, int]]:
    """Return all (data, pipeline, context, expert, tensor) whose product is `ranks`, with context 1; cut: those above
    1, with expert 1. owners: possible numbers of ranks that share experts."""
    parts = [t for t in range(1, ranks + 1) if ranks % t == 0]
    shared = [(c, 1) for c in parts[1:]] if cut else [(1, e) for e in owners]
    triples = [(p * c * e * t, (p, c, e, t)) for t, (c, e), p in itertools.product(parts, shared, parts)]
    return [(ranks // apart, *each) for apart, each in triples if ranks % apart == 0]


def microbatch_counts(rows: int) -> list[int]:
    """Return numbers of micro-batches of `rows` rows: powers of two, and one per row."""
    return sorted({1 << k for k in range(rows.bit_length())} | {rows})


def fits(case: Workload, room: int, half: bool = False) -> tuple[list[Fit], list[str]]:
    """Return grids that fit into `room`, best first, and errors of shapes. half: 16 bit, master weights. UsageError."""
    if case.ranks > LARGEST:
        raise UsageError(f"--ranks {case.ranks}: grids are searched for at most {LARGEST:,} ranks")
    found: list[Fit] = []
    refused: list[str] = []
    counts = [layer.experts.count for layer in mixtures_of(case.model)]
    owners = [e for e in range(1, min(counts, default=1) + 1) if all(count % e == 0 for count in counts)]
    beside = resident() + max(data(case, rank, "worker") for rank in (0, case.ranks - 1))
    for cut in (False, True):  # sequences are cut only if nothing else fits
        for shape in shapes(case.ranks, cut, owners) if not found and (case.model.sequences or not cut) else ():
            try:
                found += list(fits_on_grid(case, shape, room - beside, half))
            except UsageError as error:
                refused.append(f"{'x'.join(map(str, shape))}: {error}")
    whole = [fit._replace(bytes=fit.bytes + beside) for fit in found]
    return sorted(whole, key=lambda fit: fit.order), refused


def fits_on_grid(case: Workload, shape: tuple[int, ...], room: float, half: bool) -> Iterator[Fit]:
    """Yield the ways to fit into `room` bytes per rank on a grid of this shape."""
    copies, stages, context, expert, parts = shape
    check_context(case.model, context, "ring")
    grid = PIPELINE._replace(shape=(copies, stages, parts), context=context, expert=expert)
    share = case.share(0, grid.shares)
    ends = sorted({0, (stages - 1) * grid.apart})  # ranks of the first and the last stage
    item = case.dtype.itemsize
    scale = 2 / item if half else 1  # of activations
    stays = {}
    for zero in reversed(range(1 + 3 * (copies * context > 1))):  # from the least memory on
        cut = grid._replace(zero=zero)  # with layers gathered for a step of one row
        runs = [dry_run_step(case, rank, cut, 1) for rank in ends]
        each = [state_bytes(*run, item, half) for run in runs]
        if max(a + scale * run[0].peak["activations"] for a, run in zip(each, runs, strict=True)) > room:
            break  # more rows need no less
        stays[zero] = each
    before: dict[tuple[int, int], float] = {}  # the largest rank's without recomputation
    for recompute in (False, True):
        for m in reversed(microbatch_counts(share) if stays else []):  # from the least memory on
            shown = min(m, stages + 2)
            cut = grid._replace(microbatches=shown, recompute=recompute)
            rows = -(-share // m) * shown
            passing = []
            for i, rank in enumerate(ends):
                passing.append(scale * dry_run_step(case, rank, cut, rows)[0].peak["activations"])
                if passing[i] + min(each[i] for each in stays.values()) > room:
                    break
            fitting = []
            for zero, each in stays.items() if len(passing) == len(ends) else ():
                sums = [a + b for a, b in zip(each, passing, strict=True)]
                if max(sums) <= room:
                    fitting.append(zero)
                    if max(sums) < before.get((m, zero), math.inf):  # else recomputation saves nothing
                        yield Fit(shape, zero, m, recompute, max(sums), ends[sums.index(max(sums))])
                    before.setdefault((m, zero), max(sums))
            if not fitting:
                break


PIPELINE = Cut((1, 1, 1), schedule="1f1b", microbatches=1, tensor=True)


def state_bytes(memory: Memory, updated: int, item: int, half: bool) -> float:
    """Return the bytes of parameters, gradients and optimizer. half: in 16 bit, with `updated` master weights."""
    parameters, gradients, optimizer = (memory.peak[kind] for kind in KINDS[:3])
    if not half:
        return float(parameters + gradients + optimizer)
    return (parameters + gradients) * 2 / item + optimizer * 4 / item + MASTER * updated
