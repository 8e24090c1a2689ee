"""The gradient noise scale: up to which batch more examples a step are worth it, from two norms that a step has anyway.

    g_r         the mean gradient of the b_r examples of rank r        |g|^2 on the mean |G|^2 + tr(Sigma) / b
    g           that of all B of them                                  |g|^2 on the mean |G|^2 + tr(Sigma) / B

    tr(Sigma) ~ (|g_r|^2 - |g|^2) / (1/b_r - 1/B)                       neither has a bias; means over the ranks,
    |G|^2     ~ |g|^2 - tr(Sigma) / B                                   uneven shares too
    B_simple  = tr(Sigma) / |G|^2                                       of running means of both, each over the last 100

At a batch of B_simple a step goes half as far as it could, and takes twice the examples that it needs: beyond it a
larger batch saves few steps and costs many examples. It grows while a model learns. A step costs two norms of a vector,
an evaluation one message of three numbers, of the run's own. A run that goes on begins its means anew.

(McCandlish, Kaplan and Amodei, "An empirical model of large-batch training", 2018, appendix A)
"""

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
    """Running means of one rank: `own` before the sum over the ranks, `summed` after it, in each step."""

    def __init__(self) -> None:
        self.weight = self.gradient = self.variance = 0.0
        self.square, self.rows = 0.0, 0

    def own(self, gradient: Array, rows: int) -> None:
        """This rank's sum of gradients, over so many examples."""
        self.square, self.rows = sum_of_squares(gradient), rows

    def summed(self, gradient: Array, total: int) -> None:
        """The sum over all ranks, of `total` examples.

        Each rank makes estimates by itself; their mean is made when it is asked for.
        """
        if not 0 < self.rows < total:  # the last batch of an epoch may be short of examples
            return
        large = sum_of_squares(gradient) / total**2
        variance = (self.square / self.rows**2 - large) / (1 / self.rows - 1 / total)
        norm = large - variance / total
        self.weight = DECAY * self.weight + 1 - DECAY
        self.variance = DECAY * self.variance + (1 - DECAY) * variance
        self.gradient = DECAY * self.gradient + (1 - DECAY) * norm

    def scores(self, peers: "Communicator") -> dict[str, float]:
        """What is known by now, by name; nothing where the noise still hides the gradient. Collective."""
        sums = np.array([self.gradient, self.variance, self.weight])
        peers.all_reduce(sums)
        gradient, variance, weight = sums.tolist()
        if not (weight and gradient > 0 and variance >= 0 and math.isfinite(variance / gradient)):
            return {}
        return dict(zip(NAMES, (variance / gradient, gradient / weight, variance / weight), strict=True))


class Observed(Whole):
    """Everything on each rank, and the noise scale among the scores."""

    def __init__(self, model: Any, parameters: Array, optimizer: Any, noise: NoiseScale):
        super().__init__(model, parameters, optimizer)
        self.noise = noise

    def scores(self, data: Any) -> dict:
        return super().scores(data) | self.noise.scores(self.peers)


def refuse_no_parts(ranks: int, batch: int, overlap: bool) -> None:
    """Raise UsageError where no rank's gradient is seen before the sum, or ranks have no examples of their own."""
    if overlap:
        raise UsageError("--noise-scale looks at each rank's gradient before it is summed: leave out --overlap")
    if ranks < 2:
        raise UsageError("--noise-scale compares the gradients of ranks: start 2 or more")
    if batch < ranks:
        raise UsageError(f"--noise-scale: a batch of {batch} leaves some of {ranks} ranks without examples; take more")
