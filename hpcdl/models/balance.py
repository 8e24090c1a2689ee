"""Load balance of pipeline stages: cut the layers into consecutive parts with the smallest maximum cost.

    costs      3 1 | 1 2 2 | 4         3 parts of cost 4, 5, 4; no other cut has a smaller maximum

The loss belongs to the last part. A layer's cost is its number of parameters, or its measured seconds."""

import itertools
import math
import time
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.models.layered import FlatWeights, Layered
from hpcdl.models.part import ModelPart, require_layers
from hpcdl.random import Random

REPEATS = 3


def cut_layers(model: Layered, parts: int, costs: list[float] | None = None) -> list[range]:
    """Return `parts` nonempty ranges of layer numbers, the loss in the last one. Raises UsageError for fewer layers
    than parts. costs: a cost for each layer except the loss; None: the layer's number of parameters."""
    require_layers(model)
    count = len(model.layers) - 1
    if parts > count:
        names = ", ".join(layer.name for layer in model.layers[:-1])
        raise UsageError(f"{parts} stages are more than the model's {count} layers ({names}); take fewer stages")
    ranges = balanced(parameter_costs(model) if costs is None else costs, parts)
    return [*ranges[:-1], range(ranges[-1].start, count + 1)]


def balanced(costs: list[float], parts: int) -> list[range]:
    """Return `parts` nonempty ranges with the least maximum sum of costs, by dynamic programming in parts * n^2 steps.
    best[k][n], n costs in k consecutive ranges, is min over i of max(best[k - 1][i], costs[i] + ... + costs[n - 1])."""
    n, sums = len(costs), np.concatenate([[0.0], np.cumsum(costs)])
    best = np.full((parts + 1, n + 1), math.inf)
    cut = np.zeros((parts + 1, n + 1), int)
    best[0, 0] = 0
    for k in range(1, parts + 1):
        for end in range(k, n + 1):
            worst = np.maximum(best[k - 1, k - 1 : end], sums[end] - sums[k - 1 : end])
            cut[k, end] = k - 1 + worst.argmin()
            best[k, end] = worst.min()
    ends = [n]
    for k in range(parts, 0, -1):
        ends.insert(0, int(cut[k, ends[0]]))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def parameter_costs(model: Layered) -> list[float]:
    """Return how many parameters, tied ones included, each layer uses; the loss has no entry."""
    return [float(sum(math.prod(tensor.shape) for tensor in tensors)) for tensors in model.tensors[:-1]]


def measured_costs(model: Layered, batch: Any) -> list[float]:
    """Return the seconds of forward and backward of each layer for this batch; the last layer's include the loss's.
    Layers are created one at a time, so that a model larger than the memory can be measured."""
    last = len(model.layers) - 1
    costs: list[float] = []
    for i in range(last):
        part = ModelPart(model, [range(i, i + 1 if i + 1 < last else last + 1)])
        w = part.initialize(Random(0))
        weights, layers = FlatWeights(part, w, model.device.zeros(part.size, part.dtype)), part.numbers[0]
        x = batch.x if i == 0 else model.device.zeros(part.input_shape(0, len(batch.y)), part.dtype)
        seconds = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            y, tape = part.forward(weights, x, layers, part.targets(batch), batch=batch)
            dy = None
            if i + 1 < last:
                dy = model.pool.take(*y.shape)
                dy[...] = 0
            dx = part.backward(weights, tape, dy, layers)
            model.device.synchronize()
            seconds.append(time.perf_counter() - begun)
            if dx is not None:
                model.pool.give(dx)
        costs.append(min(seconds))
    return costs
