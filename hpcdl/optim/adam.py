"""Adam, and AdamW, whose weight decay is separate from the gradient.

With d = mean gradient (Adam: + weight_decay w), learning rate a and step t, counted from 1 since the last reset:

    m <- beta1 m + (1 - beta1) d            s <- beta2 s + (1 - beta2) d^2
    w <- w - a m' / (sqrt(s') + eps)        m' = m / (1 - beta1^t),  s' = s / (1 - beta2^t)

AdamW first sets w <- (1 - a weight_decay) w. (Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled
weight decay regularization", ICLR 2019) Same numbers as PyTorch's."""

import math
from typing import Any

from hpcdl.errors import UsageError
from hpcdl.kernels import updates
from hpcdl.kernels.device import Array
from hpcdl.optim.optimizer import Optimizer, check_decay_rate


class Adam(Optimizer):
    """Adam; state: first_moment, second_moment."""

    vectors = ("first_moment", "second_moment")
    decoupled = False

    def __init__(self, *args: Any, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, **kwargs: Any):
        check_decay_rate("Adam's beta1", beta1)
        check_decay_rate("Adam's beta2", beta2)
        if not eps > 0:
            raise UsageError(f"Adam's eps is positive, not {eps}")
        super().__init__(*args, **kwargs)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        self.adam(w, g, self.state["first_moment"], self.state["second_moment"], rate, scale)

    def adam(self, w: Array, g: Array, m: Array, s: Array, rate: float, scale: float) -> None:
        """Update w, or a slice of it, and its moments m and s."""
        t, decay, shrink = self.step + 1 - self.since, self.weight_decay, 1.0
        if self.decoupled:
            decay, shrink = 0.0, 1.0 - rate * self.weight_decay
        rate = rate / (1 - self.beta1**t)
        root = 1 / math.sqrt(1 - self.beta2**t)
        betas = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        updates.adam(w, g, m, s, rate, scale, decay, shrink, *betas, root, self.eps)


class AdamW(Adam):
    """Adam with decoupled weight decay; state: first_moment, second_moment."""

    decoupled = True
