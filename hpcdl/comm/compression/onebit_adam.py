"""1-bit Adam: after some steps of Adam its second moment is frozen, and ranks exchange the first moment by its signs.

    step < warmup        Adam: an all-reduce of gradients by the communicator's algorithm
    from there on        m_r <- beta1 m / N + (1 - beta1) g_r        g_r: rank r's part of the mean gradient
                         m <- sum of the m_r by an exchange of signs with feedback at both ends (exchange.py, sign.py)
                         w <- w - lr m' / (sqrt(s') + eps)           s' as at step `warmup`; m' as in Adam

Adam is not linear in the gradient, so errors that are fed back would spoil its second moment; with s frozen it is SGD
with momentum and a rate for each parameter. warmup: a number of steps, or below 1 a part of the run (0.2; the paper's
runs take 15 to 25 %). A sign has the mean magnitude of its block, also where s is next to 0, as for the weights of a
pixel that is nearly always black. So no w moves further than Adam itself could move it, by
lr (1 - beta1) / sqrt(1 - beta2) (Kingma and Ba, ICLR 2015, section 2.1), and none whose s is 0. With adam the weight
decay is part of the g_r. On one rank nothing is left out.
(Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed", ICML 2021)"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import RandomKey
from hpcdl.comm.compression.exchange import ChunkExchange
from hpcdl.comm.compression.method import CompressionMethod
from hpcdl.comm.compression.quantizer import BLOCK, Quantizer, check_block
from hpcdl.comm.compression.state import Steps
from hpcdl.errors import UsageError
from hpcdl.kernels import updates


class OneBitAdam(ChunkExchange):
    """State of all-reduces of gradients, and after `warmup` steps (below 1: a part of the run) of first moments."""

    def __init__(self, size: int, dtype: DTypeLike, key: RandomKey, feedback: bool, warmup: float, block: int):
        super().__init__(size, Quantizer(dtype, 1, block, "sign"), feedback, key)
        self.warmup = warmup

    @property
    def begins(self) -> int:
        """The first step that is compressed."""
        return round(self.warmup if self.warmup >= 1 else max(1.0, self.warmup * self.training.steps))

    @property
    def frozen(self) -> bool:
        """True if the second moment no longer changes."""
        return bool(self.training.optimizer.step >= self.begins)

    def prepare(self, vector: np.ndarray, ranks: int) -> None:
        if not self.frozen:
            return
        optimizer, own = self.training.optimizer, slice(self.key.first, self.key.first + self.size)
        rest = 1 - optimizer.beta1
        vector *= rest * self.training.scale
        vector += optimizer.beta1 / ranks * optimizer.state["first_moment"][own]
        if optimizer.weight_decay and not optimizer.decoupled:
            vector += rest * optimizer.weight_decay / ranks * self.training.parameters[own]

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        yield from super().reduce(comm, vector, all_reduce) if self.frozen else all_reduce(comm, vector)

    def update(self, optimizer: Any, parameters: np.ndarray, gradient: np.ndarray, scale: float) -> None:
        if not self.frozen:
            optimizer.update(parameters, gradient, scale=scale)
            return

        def apply(w: np.ndarray, moment: np.ndarray, rate: float, _: float) -> None:
            first, second = optimizer.state["first_moment"], optimizer.state["second_moment"]
            shrink = 1 - rate * optimizer.weight_decay if optimizer.decoupled else 1.0
            begun = 1 - optimizer.beta1 ** (optimizer.step + 1 - optimizer.since)
            root = 1 / math.sqrt(1 - optimizer.beta2 ** max(1, self.begins - optimizer.since))
            furthest = max(1.0, (1 - optimizer.beta1) / math.sqrt(1 - optimizer.beta2))
            most = (furthest * begun * (np.sqrt(second) * root + optimizer.eps)).astype(self.dtype)
            np.clip(moment, -most, most, out=moment)
            moment[second == 0] = 0
            keep, replace = (1.0, 0.0), (0.0, 1.0)
            updates.adam(w, moment, first, second, rate / begun, 1.0, 0.0, shrink, *replace, *keep, root, optimizer.eps)

        own = copy.copy(optimizer)
        own.apply = apply
        own.update(parameters, gradient)
        optimizer.step = own.step


def check(warmup: float, block: int) -> None:
    """Raise UsageError if the settings are out of range."""
    if not 0 < warmup < math.inf or (warmup > 1 and warmup % 1):
        raise UsageError(f"warmup is a number of steps from 1 on, or a part of the run between 0 and 1, not {warmup:g}")
    check_block(block)


METHODS = [
    CompressionMethod(
        "onebit-adam",
        state=lambda size, dtype, key, layout, feedback, warmup, block: OneBitAdam(
            size, dtype, key, feedback, warmup, block
        ),
        codec=lambda dtype, feedback, warmup, block: Quantizer(dtype, 1, block, "sign"),
        settings={"warmup": 0.2, "block": BLOCK},
        first="warmup",
        check=check,
        optimizers=("adam", "adamw"),
        phases=lambda steps, per_epoch, warmup, block: [
            (part := min(1.0, warmup if warmup < 1 else warmup / steps), "none"),
            (1 - part, f"sign:block={block}"),
        ],
    )
]
