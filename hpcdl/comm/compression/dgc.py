"""Deep gradient compression (DGC): top-k of what has accumulated, with its momentum; sparser from epoch to epoch.

    u <- m u + g                     g: this rank's part of the mean gradient; m: the momentum of --optimizer
    v <- v + u                       what is not sent goes on with its momentum (momentum correction)
    sent: the k values of largest |v|; there v <- 0 and u <- 0, so that no stale momentum goes on (masking)
    w <- w - lr * the sum of what all ranks have sent, by a sparse all-reduce (sparse.py)

    k                                fraction n, at least 1; in epoch e = 0, 1, ... below `warmup` 4^-(1 + e) n, if more
    --clip-norm c                    each rank clips its g at c / sqrt(N) before it accumulates
    bytes                            those of topk; a rank holds u and v

At fraction 1 nothing waits, so nothing is masked: SGD with momentum. Weight decay has a momentum of its own, equal on
all ranks: the state of the optimizer. On one rank nothing is left out. (Lin, Han, Mao, Wang and Dally, "Deep gradient
compression: reducing the communication bandwidth for distributed training", ICLR 2018)"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compression.codec import RandomKey
from hpcdl.comm.compression.method import CompressionMethod, check_fraction
from hpcdl.comm.compression.sparse import SparseAllReduce
from hpcdl.comm.compression.state import Steps
from hpcdl.comm.compression.topk import TopK
from hpcdl.errors import UsageError
from hpcdl.kernels.norm import sum_of_squares

WARMUP = 4  # epochs, as in the paper


def fraction_of(epoch: int, fraction: float, warmup: int) -> float:
    """Return the fraction of an epoch."""
    return max(fraction, 0.25 ** (1 + epoch)) if epoch < warmup else fraction


def phases(steps: int, per_epoch: int, fraction: float, warmup: int) -> list[tuple[float, str]]:
    """Return the parts of a run by their fractions, as those of top-k."""
    found, left = [], 1.0
    for epoch in range(warmup + 1):
        part = left if epoch == warmup else min(left, per_epoch / steps)
        found += [(part, f"topk:{fraction_of(epoch, fraction, warmup)}")] * (part > 0)
        left -= part
    return found


class DeepGradientCompression(SparseAllReduce):
    """State of all-reduces of the largest accumulated values. fraction: of the values. warmup: epochs. momentum: u."""

    def __init__(self, size: int, dtype: DTypeLike, key: RandomKey, feedback: bool, fraction: float, warmup: int):
        super().__init__(size, TopK(dtype, fraction), feedback, key)
        self.fraction, self.warmup = fraction, warmup
        self.momentum = np.zeros(size, self.dtype)

    @property
    def tracked(self) -> dict[str, np.ndarray]:
        return super().tracked | {"local_momentum": self.momentum}

    def cut_vectors(self, cut: slice) -> None:
        super().cut_vectors(cut)
        self.momentum = self.momentum[cut]

    @property
    def now(self) -> float:
        """The fraction of this epoch."""
        epoch = self.training.optimizer.step // self.training.per_epoch
        return fraction_of(epoch, self.fraction, self.warmup)

    def prepare(self, vector: np.ndarray, ranks: int) -> None:
        optimizer, scale = self.training.optimizer, self.training.scale
        if optimizer.clip_norm:
            most, norm = optimizer.clip_norm / math.sqrt(ranks), scale * math.sqrt(sum_of_squares(vector))
            scale *= most / norm if norm > most else 1.0
        vector *= scale
        self.momentum *= getattr(optimizer, "beta", 0.0)
        self.momentum += vector
        vector[:] = self.momentum

    def reduce(self, comm: MPI.Intracomm, vector: np.ndarray, all_reduce: Steps) -> Iterator[Step]:
        codec: Any = self.feedback.codec
        if codec.fraction != self.now:
            codec = self.feedback.codec = TopK(self.dtype, self.now)
            self.message = codec.message(self.size)
        yield from super().reduce(comm, vector, all_reduce)
        if codec.fraction < 1:
            self.momentum[codec.parts(self.message)[1]] = 0

    def update(self, optimizer: Any, parameters: np.ndarray, gradient: np.ndarray, scale: float) -> None:
        own = copy.copy(optimizer)  # the gradients are clipped already
        own.clip_norm = 0.0
        own.update(parameters, gradient)
        optimizer.step = own.step
        for name in optimizer.vectors:  # the gradient had its momentum on the ranks; that of the weight decay is left
            optimizer.state[name] -= gradient


def check(fraction: float, warmup: int) -> None:
    """Raise UsageError if the settings are out of range."""
    check_fraction(fraction)
    if warmup < 0:
        raise UsageError(f"warmup is a number of epochs, 0 or more, not {warmup}")


METHODS = [
    CompressionMethod(
        "dgc",
        state=lambda size, dtype, key, layout, feedback, fraction, warmup: DeepGradientCompression(
            size, dtype, key, feedback, fraction, warmup
        ),
        codec=lambda dtype, feedback, fraction, warmup: TopK(dtype, fraction),
        settings={"fraction": 0.001, "warmup": WARMUP},
        first="fraction",
        check=check,
        optimizers=("sgd", "momentum"),
        clips=True,
        phases=phases,
        vectors=1,
    )
]
