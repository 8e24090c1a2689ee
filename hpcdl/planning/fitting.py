"""Grids of ranks on which a training fits into memory, with ZeRO's stage, micro-batches and recomputation.

    for each (d, p, c, e, t) with d p c e t = ranks that can cut the layers; c > 1 only if no other grid fits
        for stages 0 to 3 of ZeRO, where d c > 1       permanent memory: parameters, gradients, optimizer
        for m = 1, 2, 4, ..., rows micro-batches      temporary memory: activations, with and without recomputation
            the grid fits if the sum of the largest rank is at most the room

Best first: without recomputation (which costs a third more computing), then the smallest idle share of the pipeline,
(p-1)/(m+p-1), then the fewest parts of a layer (their messages are the most frequent) and of a sequence, the lowest
stage of ZeRO, the fewest ranks that share experts, the fewest stages, the fewest micro-batches. The schedule is 1F1B:
stage s has at most p - s micro-batches in flight, so p - s + 2 show its maximum. The ranks of the first replica's
first and last stage hold most. The order needs no memory: the search ends with the last grid that is asked for."""

import bisect
import functools
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
    1. owners: possible numbers of ranks that share experts."""
    parts = [t for t in range(1, ranks + 1) if ranks % t == 0]
    shared = list(itertools.product(parts[1:] if cut else parts[:1], owners))
    triples = [(p * c * e * t, (p, c, e, t)) for t, (c, e), p in itertools.product(parts, shared, parts)]
    return [(ranks // apart, *each) for apart, each in triples if ranks % apart == 0]


def microbatch_counts(rows: int) -> list[int]:
    """Return numbers of micro-batches of `rows` rows: powers of two, and one per row."""
    return sorted({1 << k for k in range(rows.bit_length())} | {rows})


def fits(case: Workload, room: int, half: bool = False, refused: list[str] | None = None) -> Iterator[Fit]:
    """Yield grids that fit into `room`, best first, each found when it is asked for: a large model has thousands.
    half: 16 bit, master weights. refused: gets the errors of shapes to which the search came. UsageError."""
    if case.ranks > LARGEST:
        raise UsageError(f"--ranks {case.ranks}: grids are searched for at most {LARGEST:,} ranks")
    refused = [] if refused is None else refused
    counts = [layer.experts.count for layer in mixtures_of(case.model)]
    owners = [e for e in range(1, min(counts, default=1) + 1) if all(count % e == 0 for count in counts)]
    beside = resident() + max(data(case, rank, "worker") for rank in (0, case.ranks - 1))
    found = False
    for cut in (False, True):  # sequences are cut only if nothing else fits
        if found or (cut and not case.model.sequences):
            return
        grids: dict[tuple[int, ...], GridMemory | None] = {}
        for shape in shapes(case.ranks, cut, owners):
            try:
                grids[shape] = GridMemory(case, shape, room - beside, half)
            except UsageError as error:
                refused.append(refusal(shape, error))
        for fit in sorted((fit for grid in grids.values() if grid for fit in grid.ways()), key=lambda fit: fit.order):
            grid = grids[fit.shape]
            try:
                whole = grid.filled(fit) if grid else None
            except UsageError as error:
                refused.append(refusal(fit.shape, error))
                grids[fit.shape] = None
                continue
            if whole:
                found = True
                yield whole._replace(bytes=whole.bytes + beside)


def refusal(shape: tuple[int, ...], error: UsageError) -> str:
    """Return why the model cannot be cut to this shape."""
    return f"{'x'.join(map(str, shape))}: {error}"


class GridMemory:
    """The memory of the ranks that hold most on a grid of this shape; each dry run is made once, when it is needed.
    room: bytes for what the case's rank holds beside its data."""

    def __init__(self, case: Workload, shape: tuple[int, ...], room: float, half: bool):
        copies, stages, context, expert, parts = shape
        check_context(case.model, context, "ring")
        self.case, self.shape, self.room, self.half = case, shape, room, half
        self.grid = PIPELINE._replace(shape=(copies, stages, parts), context=context, expert=expert)
        self.share = case.share(0, self.grid.shares)
        self.ends = sorted({0, (stages - 1) * self.grid.apart})  # ranks of the first and the last stage
        self.zeros = range(1 + 3 * (copies * context > 1))
        self.scale = 2 / case.dtype.itemsize if half else 1  # of activations
        self.state, self.passing = functools.cache(self._state), functools.cache(self._passing)
        self.fewest = functools.cache(self._fewest)

    def ways(self) -> Iterator[Fit]:
        """Yield all ways to train on the grid, their bytes unknown yet."""
        for recompute, m, zero in itertools.product((False, True), microbatch_counts(self.share), self.zeros):
            yield Fit(self.shape, zero, m, recompute, math.nan, 0)

    def filled(self, fit: Fit) -> Fit | None:
        """Return `fit` with its bytes; None if it does not fit, or recomputes and saves nothing by it. UsageError."""
        if self.state(self.zeros[-1]) is None or fit.microbatches < self.fewest(fit.stage, fit.recompute):
            return None
        found = self._most(fit.stage, fit.microbatches, fit.recompute)
        without = self._most(fit.stage, fit.microbatches, False) if fit.recompute else None
        if found is None or (without is not None and found[0] >= without[0]):
            return None
        return fit._replace(bytes=found[0], rank=found[1])

    def _fewest(self, zero: int, recompute: bool) -> float:
        """Return the least number of micro-batches that fits, as do all above it; infinite if none does."""
        counts = microbatch_counts(self.share)
        if self._most(zero, counts[-1], recompute) is None:
            return math.inf
        return counts[bisect.bisect_left(counts, True, key=lambda m: self._most(zero, m, recompute) is not None)]

    def _most(self, zero: int, m: int, recompute: bool) -> tuple[float, int] | None:
        """Return the bytes of the rank that holds most, and the rank; None if they do not fit."""
        state, sums = self.state(zero), []
        if state is None:
            return None
        for own, rank in zip(state, self.ends, strict=True):
            sums.append((own + self.passing(rank, m, recompute), rank))
            if sums[-1][0] > self.room:
                return None
        return max(sums, key=lambda each: each[0])

    def _state(self, zero: int) -> list[float] | None:
        """Return the state of each end under this stage of ZeRO; None if it does not fit with one row of a batch."""
        cut = self.grid._replace(zero=zero)  # with layers gathered for a step of one row
        found = []
        for rank in self.ends:
            memory, updated = dry_run_step(self.case, rank, cut, 1)
            found.append(state_bytes(memory, updated, self.case.dtype.itemsize, self.half))
            if found[-1] + self.scale * memory.peak["activations"] > self.room:
                return None  # more rows need no less
        return found

    def _passing(self, rank: int, m: int, recompute: bool) -> float:
        """Return the rank's activations with `m` micro-batches."""
        shown = min(m, self.shape[1] - rank // self.grid.apart + 2)
        cut, rows = self.grid._replace(microbatches=shown, recompute=recompute), -(-self.share // m) * shown
        return self.scale * dry_run_step(self.case, rank, cut, rows)[0].peak["activations"]


PIPELINE = Cut((1, 1, 1), schedule="1f1b", microbatches=1, tensor=True)


def state_bytes(memory: Memory, updated: int, item: int, half: bool) -> float:
    """Return the bytes of parameters, gradients and optimizer. half: in 16 bit, with `updated` master weights."""
    parameters, gradients, optimizer = (memory.peak[kind] for kind in KINDS[:3])
    if not half:
        return float(parameters + gradients + optimizer)
    return (parameters + gradients) * 2 / item + optimizer * 4 / item + MASTER * updated
