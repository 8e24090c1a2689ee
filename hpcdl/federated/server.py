"""Server rules: they use d, the clients' mean change with reversed sign, as a gradient.

A rule of hpcdl/optim (sgd is FedAvg, momentum is FedAvgM), or one of the adaptive three:

                  v <-                                    beta1   beta2   rate a
    fedadam       beta2 v + (1 - beta2) d^2               0.9     0.99    0.01
    fedyogi       v - (1 - beta2) d^2 sign(v - d^2)       0.9     0.99    0.01
    fedadagrad    v + d^2                                 0               0.1

    m <- beta1 m + (1 - beta1) d        w <- w - a m / (sqrt(v) + tau)        at first m = 0, v = tau^2;  tau = 0.001

There is no bias correction. If the root of v is far below tau, a step is one of momentum at the rate a / tau.

(Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 2. Rate: the lower median of the best rates of
its six tasks, listed in google-research/federated, optimization/docs/hyperparameters.md)"""

from typing import Any

from numpy.typing import DTypeLike

from hpcdl import optim
from hpcdl.errors import UsageError, parse_spec
from hpcdl.kernels import updates
from hpcdl.kernels.device import Array, Device
from hpcdl.optim.optimizer import Optimizer, check_decay_rate
from hpcdl.plugins import of_torch


class FedAdam(Optimizer):
    """FedAdam; state: first_moment m, second_moment v."""

    vectors = ("first_moment", "second_moment")

    def __init__(self, *args: Any, beta1: float, beta2: float, tau: float, **kwargs: Any):
        check_decay_rate("the server's beta1", beta1)
        check_decay_rate("the server's beta2", beta2)
        if not tau > 0:
            raise UsageError(f"the server's tau is positive, not {tau}")
        self.beta1, self.beta2, self.rest2, self.tau = beta1, beta2, 1 - beta2, tau
        super().__init__(*args, **kwargs)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.state["second_moment"][:] = self.tau**2

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        m, v = self.state["first_moment"], self.state["second_moment"]
        betas = self.beta1, 1 - self.beta1, self.beta2, self.rest2
        updates.adam(w, g, m, v, rate, scale, self.weight_decay, 1.0, *betas, 1.0, self.tau)


class FedAdagrad(FedAdam):
    """FedAdagrad: v is the sum of all d^2."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, beta2=0.0, **kwargs)
        self.beta2 = 1.0


class FedYogi(FedAdam):
    """FedYogi: v moves towards d^2 by a part of d^2, so it falls no faster than it rises."""

    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        m, v = self.state["first_moment"], self.state["second_moment"]
        updates.yogi(w, g, m, v, rate, scale, self.weight_decay, self.beta1, 1 - self.beta1, self.rest2, self.tau)


MOMENTS = {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
SETTINGS: dict[str, dict[str, float]] = {"fedadam": MOMENTS, "fedyogi": MOMENTS}
SETTINGS["fedadagrad"] = {"beta1": 0.0, "tau": 1e-3}
RULES: dict[str, type[FedAdam]] = {"fedadam": FedAdam, "fedyogi": FedYogi, "fedadagrad": FedAdagrad}
RATES = {"fedadam": 0.01, "fedyogi": 0.01, "fedadagrad": 0.1}  # 1 for all others


def parse_rule(spec: str) -> tuple[str, dict[str, float]]:
    """Return the name and settings of the rule `spec`; a factory parses rules of PyTorch. Raises UsageError."""
    return (spec, {}) if of_torch(spec) else parse_spec("optimizer", spec, optim.SETTINGS | SETTINGS)


def make_rule(
    spec: str, size: int, dtype: DTypeLike, lr: float, device: Device, average_from: int | None = None
) -> Optimizer:
    """Return the rule `spec` for vectors of `size` elements, at the constant rate `lr`; 0: the rule's default.
    average_from: see `Optimizer`. Raises UsageError."""
    name, settings = parse_rule(spec)
    rate = lr or RATES.get(name, 1.0)
    settings_of_state: dict[str, Any] = {"device": device, "average_from": average_from}
    if name in RULES:
        return RULES[name](size, dtype, lambda step: rate, **settings_of_state, **settings)
    return optim.make_optimizer(spec, size, dtype, lambda step: rate, **settings_of_state)


def vectors_of(spec: str) -> tuple[str, ...]:
    """Return the names of the rule's state vectors, each as long as the parameters."""
    name, _ = parse_rule(spec)
    return RULES[name].vectors if name in RULES else optim.vectors_of(spec)
