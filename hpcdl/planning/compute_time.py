"""Computing time of a rank: gradients by rows and layer, updates, and the drawing of batches.

    measured      seconds by rows, linear between measurements (machine_sheet.py); on another number of ranks the same,
                  times the cores' sharing
    else          max(flops / F, bytes / M) of each operation of each layer (models/work.py); an update moves its
                  vectors once, a batch its rows twice

A rank computes on one core. Where ranks outnumber a node's cores, computing takes ranks / cores times as long; the
sleep of --pretend-compute does not.
"""

import math
from typing import Any

from hpcdl.errors import UsageError
from hpcdl.faults.straggler import parse
from hpcdl.models.model import layers_of
from hpcdl.models.work import operations
from hpcdl.planning.machine_sheet import Machine, MeasuredModel, interpolate
from hpcdl.strategies.workload import Workload

Seconds = tuple[float, float]  # forward, backward


class ComputeTime:
    """Computing times of a workload on a machine. exact: True if measured on the same number of ranks."""

    def __init__(self, case: Workload, machine: Machine):
        self.case, self.machine = case, machine
        self.measurement, self.factor, self.exact = self._measured()
        options = case.options
        self.pretended = options.pretend_compute / 1000
        self.slowdown = slowest(options.straggler, case.roles.workers)

    def _measured(self) -> tuple[MeasuredModel | None, float, bool]:
        """Return the measurement on the nearest number of ranks, the slowdown from it, and True if it is equal."""
        case, sharing = self.case, self.machine.sharing(self.case.ranks)
        same = [(section, each) for section in self.machine.measured for each in section.models if self._matches(each)]
        if not same:
            return None, sharing, False
        section, measurement = min(same, key=lambda each: (abs(each[0].ranks - case.ranks), -each[0].ranks))
        there = max(1.0, section.per_node / self.machine.cores)
        return measurement, sharing / there, section.ranks == case.ranks

    def _matches(self, each: MeasuredModel) -> bool:
        case = self.case
        same = (each.model, each.dtype) == (case.spec, str(case.options.dtype))
        return same and each.parameters == case.length and each.optimizer == case.options.optimizer

    # -- seconds -----------------------------------------------------------------------------------------------------

    def layers(self, rows: float) -> list[Seconds]:
        """Return the seconds (forward, backward) of each layer. UsageError where they are not known."""
        measurement = self.measurement
        if measurement is None:
            return [self._theory(layer, rows) for layer in self._layers()]
        first = next(iter(measurement.rows.values()))
        if not first.layers:
            raise UsageError(
                f"{self.case.spec} was not measured layer by layer, which {self.case.program} cuts it into: measure it "
                "anew (--measure), if it is a chain of layers"
            )
        rows_of, count = measurement.rows.items(), len(first.layers)
        curves = [[{n: of.layers[i][k] for n, of in rows_of} for k in (0, 1)] for i in range(count)]
        return [(self.factor * interpolate(a, rows), self.factor * interpolate(b, rows)) for a, b in curves]

    def _layers(self) -> list[Any]:
        layers = layers_of(self.case.model)
        if layers is None:
            raise UsageError(f"nobody has counted what {self.case.spec} computes: measure it (--measure FILE)")
        return layers

    def _theory(self, layer: Any, rows: float) -> Seconds:
        """Return a layer's seconds by its operations' flops and bytes; rows < 1: a fraction of one row's."""
        n, item = max(1, math.ceil(rows)), self.case.dtype.itemsize
        machine, share = self.machine, min(1.0, rows) if rows < 1 else rows / n
        times = [
            sum(max(each.flops() / machine.flops, each.moved(item) / machine.memory) for each in done)
            for done in operations(layer, n)
        ]
        return self.factor * share * times[0], self.factor * share * times[1]

    def gradient(self, rows: float) -> Seconds:
        """Return the seconds (forward, backward) of a gradient, with pretended computing and stragglers."""
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
        """Return the seconds of a fraction of a gradient with pretended computing and stragglers (faults/straggler.py).

        seconds: of the computing itself.
        """
        least = self.pretended * fraction
        return self.slowdown * max(seconds, least) + (self.machine.late if least > seconds else 0.0)

    def accumulated(self, rows: float) -> Seconds:
        """Return the seconds (forward, backward) of a gradient in --accumulate parts."""
        parts = max(1, min(self.case.options.accumulate, round(rows) or 1))
        if self.pretended:  # pretended once a part, as each is a gradient
            forward, backward = self.gradient(rows / parts)
            return parts * forward, parts * backward
        return tuple(parts * each for each in self.gradient(rows / parts))  # type: ignore[return-value]

    def update(self, share: float = 1.0) -> float:
        """Return the seconds to update this share of the parameters, and to zero the gradient."""
        if self.measurement is not None:
            return self.factor * self.measurement.update * share
        vectors = 3 + 1 + 2 * len(self.case.vectors)  # w twice, g; zeros; each vector of the state twice
        return self.factor * share * vectors * self.case.length * self.case.dtype.itemsize / self.machine.memory

    def draw(self, rows: float) -> float:
        """Return the seconds to draw a batch."""
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
