"""Adagrad: a learning rate for each coordinate, which decreases with the coordinate's past gradients.

    d = mean gradient + weight_decay w        s <- s + d^2        w <- w - a d / (sqrt(s) + eps)      (a: learning rate)

The coordinate of a rare feature keeps a large rate until the feature occurs. (Duchi, Hazan and Singer, "Adaptive
subgradient methods for online learning and stochastic optimization", JMLR 2011) Same numbers as PyTorch's Adagrad."""

from typing import Any

from hpcdl.errors import UsageError
from hpcdl.kernels import updates
from hpcdl.kernels.device import Array
from hpcdl.optim.optimizer import Optimizer


class Adagrad(Optimizer):
    """Adagrad; state: sum_of_squares."""

    vectors = ("sum_of_squares",)
    skips_zero_gradient = True

    def __init__(self, *args: Any, eps: float = 1e-10, **kwargs: Any):
        if not eps > 0:
            raise UsageError(f"Adagrad's eps is positive, not {eps}")
        super().__init__(*args, **kwargs)
        self.eps = eps

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        updates.adagrad(w, g, self.state["sum_of_squares"], rate, scale, self.weight_decay, self.eps)
