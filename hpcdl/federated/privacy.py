"""Differentially private averaging: what a model tells of any one client is bounded by epsilon and delta.

    a round of DP-FedAvg:  each client takes part with probability q = C, by its own coin (Poisson sampling)
                           u_k <- u_k min(1, S / |u_k|)                    clip its update to 2-norm S
                           d   <- (sum of u_k + N(0, (z S)^2)) / (q K)     one normal number per coordinate

Unlike FedAvg it weights clients equally, and divides by their expected number: so a client changes the sum by S at
most, whoever else takes part.

    (epsilon, delta):  with and without any one client, each set of models has probabilities p and p' with
                       p <= exp(epsilon) p' + delta

The accountant bounds epsilon. Per round, the Renyi divergence of order a > 1 between noise around 0, and around 0 with
probability 1 - q or S with probability q, is D(a) = 1/(a-1) log A(a), with

    whole a    A = sum over k = 0 ... a of  binomial(a, k) (1-q)^(a-k) q^k exp(k (k-1) / (2 z^2))
    any a      A = sum over k = 0, 1, 2, ... of  binomial(a, k) / 2 times the sum of
                   (1-q)^(a-k) q^k exp(k (k-1) / (2 z^2)) erfc((k - c) / (sqrt(2) z))
                   (1-q)^k q^(a-k) exp((a-k) (a-k-1) / (2 z^2)) erfc((c - (a-k)) / (sqrt(2) z))

where both densities are equal at c = z^2 log(1/q - 1) + 1/2. At q = 1, D(a) = a / (2 z^2). All sums are of logarithms.
From k = a on the terms of the second sum alternate in sign, and 24 of them give the rest to 17 digits (Cohen, Rodriguez
Villegas, Zagier, "Convergence acceleration of alternating series", Experimental Mathematics 2000, algorithm 1). T
rounds add up to T D(a), and the least of the bounds for all a holds:

    epsilon = T D(a) + log(1 - 1/a) - log(a delta) / (a-1)

Epsilon covers the model and all intermediate models, not losses, scores or times that a run prints of its clients, nor
which of them took part. The noise is keyed by the run's seed: whoever knows the seed can remove it. A deployment draws
discrete noise from the system, because normal numbers leak by their low bits (Mironov, CCS 2012).

(McMahan et al., ICLR 2018; Mironov, Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian mechanism",
2019, section 3.3; the conversion: Canonne, Kamath, Steinke, NeurIPS 2020, proposition 12)"""

import math

import numpy as np

from hpcdl.kernels.device import device_of
from hpcdl.kernels.norm import sum_of_squares
from hpcdl.kernels.reduce import add_into, scale

INTEGERS = [*map(float, (*range(2, 65), *range(72, 257, 8), *range(288, 1025, 32)))]
ORDERS = sorted({1 + 0.01 * 1.06**step for step in range(151)} | {*INTEGERS})  # fractional ones to 64
MOST = 1e8  # upper bound of the noise multiplier: hardly any privacy is spent
TERMS = 24  # of an alternating series


def clip(update: np.ndarray, norm: float) -> None:
    """Scale `update` (n,) in place to a 2-norm of at most `norm`."""
    length = math.sqrt(sum_of_squares(update))
    if length > norm:
        scale(update, norm / length)


def add_noise(total: np.ndarray, deviation: float, random: np.random.Generator) -> None:
    """Add a normal number of standard deviation `deviation` to each element of `total` (n,), in place."""
    noise = random.standard_normal(total.size)
    noise *= deviation
    add_into(total, device_of(total).array(noise.astype(total.dtype, copy=False)))


def divergence(noise: float, fraction: float, order: float) -> float:
    """Return D(order) of one round, for the noise multiplier z = noise > 0 and sampling probability `fraction`."""
    noise = min(noise, MOST)
    double = 2 * noise * noise
    if double < 1e-300:
        return math.inf
    if fraction == 1:
        return order / double
    log_q, log_p = math.log(fraction), math.log1p(-fraction)

    def plain(k: float, power_of_p: float) -> float:
        return k * log_q + power_of_p * log_p + k * (k - 1) / double

    if order == int(order):
        logs = [log_binomial(order, k) + plain(k, order - k) for k in range(int(order) + 1)]
        return max(0.0, float(np.logaddexp.reduce(logs))) / (order - 1)
    equal, root = noise * noise * (log_p - log_q) + 0.5, math.sqrt(double)

    def term(k: int) -> float:
        rest = order - k
        left = plain(k, rest) + log_erfc((k - equal) / root)
        right = plain(rest, k) + log_erfc((equal - rest) / root)
        return log_binomial(order, k) - math.log(2) + float(np.logaddexp(left, right))

    first = math.ceil(order)  # the last of the positive terms
    logs = [term(k) for k in range(first + TERMS)]
    largest = max(logs)
    weights = [1.0] * first + alternating(TERMS)
    total = math.fsum(weight * math.exp(log - largest) for weight, log in zip(weights, logs, strict=True))
    return max(0.0, largest + math.log(total)) / (order - 1)


def log_binomial(order: float, k: int) -> float:
    """Return log |binomial(order, k)|."""
    return math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)


def log_erfc(x: float) -> float:
    """Return log erfc(x); for x >= 25, where erfc underflows, by its asymptotic series, to 1e-13."""
    if x < 25:
        return math.log(math.erfc(x))
    y = 1 / (2 * x * x)
    return -x * x - math.log(x * math.sqrt(math.pi)) + math.log1p(-y * (1 - 3 * y * (1 - 5 * y * (1 - 7 * y))))


def alternating(terms: int) -> list[float]:
    """Return weights w for which the sum over k of w_k a_k is the sum of the endless series a_0 - a_1 + a_2 - ..."""
    d = (3 + math.sqrt(8)) ** terms
    d = (d + 1 / d) / 2
    b, c, weights = -1.0, -d, []
    for k in range(terms):
        c = b - c
        weights.append(c / d)
        b *= (k + terms) * (k - terms) / ((k + 0.5) * (k + 1))
    return weights


def divergences(noise: float, fraction: float) -> np.ndarray:
    """Return D(a) of one round for each a of ORDERS; D(a) of several rounds add up, even if the rounds differ."""
    return np.array([divergence(noise, fraction, order) for order in ORDERS])


def epsilon(spent: np.ndarray, delta: float) -> float:
    """Return epsilon at this delta for rounds whose `divergences` add up to `spent`."""
    bounds = (
        total + math.log1p(-1 / order) - math.log(order * delta) / (order - 1)
        for total, order in zip(spent, ORDERS, strict=True)
    )
    return float(max(0.0, min(bounds))) if spent.any() else 0.0
