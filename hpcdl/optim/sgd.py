"""Stochastic gradient descent, with Polyak's or Nesterov's momentum.

With d = mean gradient + weight_decay w, at learning rate a:

    sgd         w <- w - a d                                            (Robbins and Monro, 1951)
    momentum    v <- beta v + d,     w <- w - a v                       (Polyak, 1964)
    nesterov    v <- beta v + d,     w <- w - a (d + beta v)            (Sutskever et al., ICML 2013)

Same numbers as PyTorch's SGD: v is a sum of gradients without the rate."""

from typing import Any

from hpcdl.kernels import updates
from hpcdl.kernels.device import Array
from hpcdl.optim.optimizer import Optimizer, check_decay_rate


class SGD(Optimizer):
    """Stochastic gradient descent without momentum; no state."""

    skips_zero_gradient = True

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        updates.sgd(w, g, rate, scale, self.weight_decay)


class Momentum(Optimizer):
    """Gradient descent with momentum; state: momentum."""

    vectors = ("momentum",)
    kernel = updates.momentum

    def __init__(self, *args: Any, beta: float = 0.9, **kwargs: Any):
        check_decay_rate("the momentum's beta", beta)
        super().__init__(*args, **kwargs)
        self.beta = beta

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        self.kernel(w, g, self.state["momentum"], rate, scale, self.weight_decay, self.beta)


class Nesterov(Momentum):
    """Gradient descent with Nesterov's momentum; state: momentum."""

    kernel = updates.nesterov
