"""Differentially private averaging: what a model tells of any one client is bounded by epsilon and delta.

    a round of DP-FedAvg:  each client takes part with probability q = C, by its own coin (Poisson sampling)
                           u_k <- u_k min(1, S / |u_k|)                    clip its update to 2-norm S
                           d   <- (sum of u_k + N(0, (z S)^2)) / (q K)     one normal number per coordinate

Unlike FedAvg it does not weight by examples, and divides by the expected number of clients, not by their number: so a
client, with all that it holds, moves the sum by S at most, whoever else takes part. Without clipping to act, the mean
over clients of equal size is FedAvg's but for the noise and the number that came.

    (epsilon, delta):  with and without any one client, each set of models has probabilities p and p' with
                       p <= exp(epsilon) p' + delta

The accountant bounds epsilon. Per round, the Renyi divergence of order a between noise around 0, and around 0 with
probability 1 - q or S with probability q, is for whole a > 1

    D(a) = 1/(a-1) log sum over k = 0 ... a of  binomial(a, k) (1-q)^(a-k) q^k exp(k (k-1) / (2 z^2))

which is a / (2 z^2) at q = 1. T rounds add up to T D(a), and for each a

    epsilon = T D(a) + log(1 - 1/a) - log(a delta) / (a-1)

of which the least holds. What epsilon speaks of is the model, and all models on the way to it: not losses, scores or
times that a run prints of its clients, nor who took part. The noise here is keyed by the run's seed, so that a run can
be repeated: whoever knows the seed can take it off. A deployment draws it from the system, and discrete (floating-point
normal numbers leak by their low bits: Mironov, CCS 2012).

(McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018; Mironov,
Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian mechanism", 2019, section 3.3; the conversion:
Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020, proposition 12)
"""

import math

import numpy as np

from hpcdl.kernels.device import device_of
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.kernels.reduce import add_into, scale

ORDERS = [*range(2, 65), *range(72, 257, 8), *range(288, 1025, 32)]


def clip(update: np.ndarray, norm: float) -> None:
    """Scale `update` (n,) in place so that its 2-norm is `norm` at most."""
    length = math.sqrt(sum_of_squares(update))
    if length > norm:
        scale(update, norm / length)


def add_noise(total: np.ndarray, deviation: float, random: np.random.Generator) -> None:
    """Add a normal number of that standard deviation to each element of `total` (n,), in place."""
    noise = random.standard_normal(total.size)
    noise *= deviation
    add_into(total, device_of(total).array(noise.astype(total.dtype, copy=False)))


def divergence(noise: float, fraction: float, order: int) -> float:
    """D(order) of one round, for the noise multiplier z = noise > 0 and clients sampled with probability fraction."""
    double = 2 * noise * noise
    if double == 0:
        return math.inf
    if fraction == 1:
        return order / double
    logs = [
        math.lgamma(order + 1)
        - math.lgamma(k + 1)
        - math.lgamma(order - k + 1)
        + k * math.log(fraction)
        + (order - k) * math.log1p(-fraction)
        + k * (k - 1) / double
        for k in range(order + 1)
    ]
    return float(np.logaddexp.reduce(logs)) / (order - 1)


def divergences(noise: float, fraction: float) -> np.ndarray:
    """D(a) of one round for each a of ORDERS: what the rounds of a run spend adds up, whether they are alike or not."""
    return np.array([divergence(noise, fraction, order) for order in ORDERS])


def epsilon(spent: np.ndarray, delta: float) -> float:
    """The epsilon at this delta of rounds whose `divergences` add up to `spent`."""
    found = (
        total + math.log1p(-1 / order) - math.log(order * delta) / (order - 1)
        for total, order in zip(spent, ORDERS, strict=True)
    )
    return float(max(0.0, min(found))) if spent.any() else 0.0
