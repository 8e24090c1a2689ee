"""The gradient noise scale: up to which batch size more examples per step pay off, from norms that a step has anyway.

    G, Sigma    the true gradient, and the covariance of one example's gradient
    g_r         the mean gradient of the b_r examples of rank r        E |g_r|^2 = |G|^2 + tr(Sigma) / b_r
    g           the mean gradient of all B examples                    E |g|^2   = |G|^2 + tr(Sigma) / B

    tr(Sigma) ~ (|g_r|^2 - |g|^2) / (1/b_r - 1/B)                      both unbiased, also for uneven shares;
    |G|^2     ~ |g|^2 - tr(Sigma) / B                                  averaged over the ranks
    B_simple  = tr(Sigma) / |G|^2                                      of running means over the last 100 steps

At a batch of B_simple a step makes half the progress that huge batches allow, and training takes twice the examples
that tiny ones need. B_simple grows during training. Cost: two norms a step, a message of three numbers an evaluation.
A resumed run begins anew. (McCandlish et al., "An empirical model of large-batch training", 2018, appendix A)"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.runs.ownership import Whole

if TYPE_CHECKING:
    from hpcdl.comm import Communicator

DECAY = 0.99  # of the running means: a memory of 1 / (1 - DECAY) steps
NAMES = "noise_scale", "gradient_norm_squared", "gradient_variance"


class NoiseScale:
    """Running means of one rank; in each step `own` is called before the sum over the ranks, `summed` after it."""

    def __init__(self) -> None:
        self.weight = self.gradient = self.variance = 0.0
        self.square, self.rows = 0.0, 0

    def own(self, gradient: Array, rows: int) -> None:
        """Note this rank's sum of gradients over `rows` examples."""
        self.square, self.rows = sum_of_squares(gradient), rows

    def summed(self, gradient: Array, total: int) -> None:
        """Update the running means by the sum of the gradients of all ranks, over `total` examples."""
        if not 0 < self.rows < total:  # the last batch of an epoch may be short of examples
            return
        large = sum_of_squares(gradient) / total**2
        variance = (self.square / self.rows**2 - large) / (1 / self.rows - 1 / total)
        norm = large - variance / total
        self.weight = DECAY * self.weight + 1 - DECAY
        self.variance = DECAY * self.variance + (1 - DECAY) * variance
        self.gradient = DECAY * self.gradient + (1 - DECAY) * norm

    def scores(self, peers: "Communicator") -> dict[str, float]:
        """Return the estimates by name, averaged over the ranks; {} while noise hides the gradient. Collective."""
        sums = np.array([self.gradient, self.variance, self.weight])
        peers.all_reduce(sums)
        gradient, variance, weight = sums.tolist()
        if not (weight and gradient > 0 and variance >= 0 and math.isfinite(variance / gradient)):
            return {}
        return dict(zip(NAMES, (variance / gradient, gradient / weight, variance / weight), strict=True))


class Observed(Whole):
    """The ownership `Whole`, with the noise scale among its scores."""

    def __init__(self, model: Any, parameters: Array, optimizer: Any, noise: NoiseScale):
        super().__init__(model, parameters, optimizer)
        self.noise = noise

    def scores(self, data: Any) -> dict:
        return super().scores(data) | self.noise.scores(self.peers)


def refuse_no_parts(ranks: int, batch: int, overlap: bool) -> None:
    """Raise UsageError under --overlap, on fewer than 2 ranks, or if a batch has fewer examples than ranks."""
    if overlap:
        raise UsageError("--noise-scale needs each rank's gradient before the sum over the ranks: leave out --overlap")
    if ranks < 2:
        raise UsageError("--noise-scale compares the gradients of several ranks: start at least 2 ranks")
    if batch < ranks:
        raise UsageError(f"--noise-scale: a batch of {batch} is less than an example for each of {ranks} ranks")
