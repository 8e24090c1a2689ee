"""Computing time of a rank: gradients by rows and layer, updates, and the drawing of batches.

    measured      seconds by rows, linear in between (machine_sheet.py), times ranks per core now / when measured
    else          the sum of max(flops / F, bytes / M) over the layers' operations (models/work.py); F, M: the machine's
                  flops and memory; an update reads and writes its vectors (muon: and multiplies matrices),
                  a batch moves its rows twice

A rank computes on one core. R > C ranks on a node's C cores take R / C times as long to compute, but not to sleep."""

import math
from operator import attrgetter
from typing import Any, NamedTuple

from hpcdl.errors import UsageError
from hpcdl.faults.straggler import parse
from hpcdl.models.model import layers_of
from hpcdl.models.work import Operations, apart, operations
from hpcdl.planning.machine_sheet import Machine, MeasuredModel, interpolate
from hpcdl.strategies.workload import Workload

Seconds = tuple[float, float]  # forward, backward


class StepParts(NamedTuple):
    """Seconds of a step by part (step_time.py). `seconds`: their sum, without messages behind computing (hidden)."""

    compute: float
    messages: float
    bubble: float
    queue: float
    start: float
    hidden: float
    examples: int

    @property
    def seconds(self) -> float:
        return self.compute + self.messages + self.bubble + self.queue + self.start

    @property
    def rate(self) -> float:
        return self.examples / self.seconds if self.seconds > 0 else float("inf")


class ComputeTime:
    """Computing times of a workload on a machine. exact: the machine has measured its model on as many ranks."""

    def __init__(self, case: Workload, machine: Machine):
        self.case, self.machine = case, machine
        self.measurement, self.factor, self.exact = self._measured()
        options = case.options
        self.pretended = options.pretend_compute / 1000
        self.slowdown = slowest(options.straggler, case.roles.workers)

    def _measured(self) -> tuple[MeasuredModel | None, float, bool]:
        """Return the measurement on the nearest number of ranks (or None), the slowdown since then, and `exact`."""
        case, sharing = self.case, self.machine.sharing(self.case.ranks)
        wanted = case.spec, str(case.options.dtype), case.length, case.options.optimizer
        key = attrgetter("model", "dtype", "parameters", "optimizer")
        same = [(section, each) for section in self.machine.measured for each in section.models if key(each) == wanted]
        if not same:
            return None, sharing, False
        section, measurement = min(same, key=lambda each: (abs(each[0].ranks - case.ranks), -each[0].ranks))
        there = max(1.0, section.per_node / self.machine.cores)
        return measurement, sharing / there, section.ranks == case.ranks

    def layers(self, rows: float) -> list[Seconds]:
        """Return the seconds (forward, backward) of `rows` rows in each layer. UsageError if they are unknown."""
        measurement = self.measurement
        if measurement is None:
            layers = layers_of(self.case.model)
            if layers is None:
                raise UsageError(f"the operations of {self.case.spec} are not counted: measure it (--measure FILE)")
            return [self._theory(layer, rows) for layer in layers]
        first = next(iter(measurement.rows.values()))
        if not first.layers:
            raise UsageError(
                f"{self.case.program} cuts {self.case.spec} into layers, which were not measured one by one: measure "
                "again (--measure FILE), if the model is a chain of layers"
            )
        rows_of, count = measurement.rows.items(), len(first.layers)
        curves = [[{n: of.layers[i][k] for n, of in rows_of} for k in (0, 1)] for i in range(count)]
        return [(self.factor * interpolate(a, rows), self.factor * interpolate(b, rows)) for a, b in curves]

    def _theory(self, layer: Any, rows: float) -> Seconds:
        """Return a layer's seconds by the flops and bytes of its operations; rows < 1 take that share of one row's."""
        n = max(1, math.ceil(rows))
        share = min(1.0, rows) if rows < 1 else rows / n
        times = [self._seconds(done) for done in operations(layer, n)]
        return self.factor * share * times[0], self.factor * share * times[1]

    def _seconds(self, done: Operations) -> float:
        """Return the seconds of operations by the machine's flops and memory."""
        machine, item = self.machine, self.case.dtype.itemsize
        return sum(max(each.flops() / machine.flops, each.moved(item) / machine.memory) for each in done)

    def apart(self, i: int, rows: float) -> float:
        """Return the share of layer i's backward that its weight gradients take, by flops and bytes; 0 if not counted.
        Layers that leave no products for later (PyTorch's) have none."""
        layers, n = layers_of(self.case.model), max(1, math.ceil(rows))
        try:
            back = operations((layers or [])[i], n)[1]
        except (UsageError, IndexError):
            return 0.0
        whole, left = (self._seconds(each) for each in (back, apart(back)))
        return left / whole if whole else 0.0

    def gradient(self, rows: float) -> Seconds:
        """Return the seconds (forward, backward) of a gradient, with --pretend-compute and stragglers."""
        forward, backward = self._full_gradient(rows)
        whole = forward + backward
        if self.pretended > whole:
            return self.delayed(1.0, whole) / 3, self.delayed(1.0, whole) * 2 / 3
        return self.slowdown * forward, self.slowdown * backward

    def _full_gradient(self, rows: float) -> Seconds:
        measurement = self.measurement
        if measurement is None or next(iter(measurement.rows.values())).layers:
            each = self.layers(rows)
            forward, backward = (sum(pair[k] for pair in each) for k in (0, 1))
            if measurement is None:
                return forward, backward
            share = forward / (forward + backward) if forward + backward else 1 / 3
        else:
            share = 1 / 3
        whole = self.factor * interpolate({n: of.gradient for n, of in measurement.rows.items()}, rows)
        return share * whole, (1 - share) * whole

    def delayed(self, fraction: float, seconds: float) -> float:
        """Return seconds of a fraction of a gradient with --pretend-compute and stragglers. seconds: without these."""
        least = self.pretended * fraction
        return self.slowdown * max(seconds, least) + (self.machine.late if least > seconds else 0.0)

    def accumulated(self, rows: float) -> Seconds:
        """Return the seconds (forward, backward) of a gradient in --accumulate parts."""
        parts = max(1, min(self.case.options.accumulate, round(rows) or 1))
        forward, backward = self.gradient(rows / parts)  # pretended once a part, as each is a gradient
        return parts * forward, parts * backward

    def update(self, share: float = 1.0, matrices: float | None = None) -> float:
        """Return the seconds to update this share of the parameters and to zero the gradient. matrices: the share of
        Muon's matrices that a rank orthogonalizes, by default as large."""
        if self.measurement is not None:
            return self.factor * self.measurement.update * share
        vectors = 3 + 1 + 2 * len(self.case.vectors)  # w twice, g; zeros; each vector of the state twice
        moving = share * vectors * self.case.length * self.case.dtype.itemsize / self.machine.memory
        orthogonal = (share if matrices is None else matrices) * self.case.matrix_flops / self.machine.flops
        return self.factor * (moving + orthogonal)

    def draw(self, rows: float) -> float:
        if self.measurement is not None:
            return self.factor * interpolate({n: of.draw for n, of in self.measurement.rows.items()}, rows)
        return self.factor * 2 * rows * self.case.data.row / self.machine.memory


def slowest(straggler: str, workers: range) -> float:
    """Return the slowdown of the slowest worker, averaged over the steps."""
    if not straggler:
        return 1.0
    factors = [parse(straggler, rank, workers) for rank in workers]
    if straggler.startswith("random"):
        factor, probability = factors[0]
        struck = 1 - (1 - probability) ** len(workers)
        return 1 + struck * (factor - 1)
    return max(factor for factor, _ in factors)
