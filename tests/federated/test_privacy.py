"""Clipping, noise, and the accountant against published values, closed forms and integrals."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.errors import UsageError
from hpcdl.federated.averaging import PrivateAverage
from hpcdl.federated.privacy import ORDERS, add_noise, clip, divergence, divergences
from hpcdl.federated.privacy import epsilon as epsilon_of
from hpcdl.random import Random

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="pure functions")


def epsilon(noise, fraction, rounds, delta) -> float:
    return epsilon_of(rounds * divergences(noise, fraction), delta)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clip(dtype):
    short, long = np.array([0.3, -0.4], dtype), np.array([30, -40, 0], dtype)
    clip(short, 0.6)
    assert np.array_equal(short, np.array([0.3, -0.4], dtype))
    clip(long, 0.5)
    assert np.allclose(long, [0.3, -0.4, 0])
    nothing = np.zeros(3, dtype)
    clip(nothing, 0.5)
    assert not nothing.any()


def test_noise_has_its_deviation_and_is_added():
    total = np.full(100_000, 7.0)
    add_noise(total, 2.5, Random(0)("noise", 3))
    noise = total - 7
    assert abs(noise.mean()) < 6 * 2.5 / math.sqrt(noise.size)
    assert abs(noise.var() / 2.5**2 - 1) < 6 * math.sqrt(2 / noise.size)
    again, other = np.full((2, 100_000), 7.0)
    add_noise(again, 2.5, Random(0)("noise", 3))
    add_noise(other, 2.5, Random(0)("noise", 4))
    assert np.array_equal(again, total)
    assert abs(np.corrcoef(other, total)[0, 1]) < 6 / math.sqrt(noise.size)


@pytest.mark.parametrize(
    ("epochs", "noise", "published"), [(1, 1.1, 1.03), (2, 1.1, 1.11), (60, 1.1, 3.01), (15, 1.3, 1.19)]
)
def test_published_epsilons(epochs, noise, published):
    """The tutorial of TensorFlow Privacy (tutorials/README.md, 2019), which converts as Mironov (CSF 2017) does."""
    rounds, delta = epochs * 60000 // 256, 1e-5
    spent = rounds * divergences(noise, 256 / 60000)
    plain = min(each + math.log(1 / delta) / (a - 1) for a, each in zip(ORDERS, spent, strict=True))
    assert round(plain, 2) == published
    assert 0.6 * plain < epsilon(noise, 256 / 60000, rounds, delta) < plain


def test_published_divergences():
    """dp-accounting, rdp_privacy_accountant_test.py: z = 2.5, q = 0.01, 50 rounds."""
    found = [50 * divergence(2.5, 0.01, a) for a in (5, 50, 100)]
    assert found == pytest.approx([2.18075656e-03, 2.38460375e-02, 1.67416308e02], rel=1e-8)


@pytest.mark.parametrize(
    ("noise", "fraction", "rounds", "delta"),
    [(1.1, 0.1, 100, 1e-5), (3.0, 0.01, 2000, 1e-5), (0.3, 0.02, 1, 1e-3), (1.0, 1.0, 5, 1e-5), (5.0, 0.999, 30, 1e-8)],
)
def test_the_accountant_of_dp_accounting(noise, fraction, rounds, delta):
    """The same epsilon by the same orders; and not below what the distribution of the privacy loss itself gives."""
    dp_accounting = pytest.importorskip("dp_accounting", reason="pip install dp-accounting")
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event, found = dp_accounting.GaussianDpEvent(noise), epsilon(noise, fraction, rounds, delta)
    if fraction < 1:
        event = dp_accounting.PoissonSampledDpEvent(fraction, event)
    theirs = RdpAccountant(ORDERS).compose(event, rounds).get_epsilon(delta)
    assert found == pytest.approx(theirs, rel=1e-11)
    if noise == 3:  # the others take seconds
        assert 0.8 * found < PLDAccountant().compose(event, rounds).get_epsilon(delta) < found


def test_every_client_in_every_round_is_the_gaussian_mechanism():
    """At q = 1 the sum over k is exp(a (a-1) / (2 z^2)); and the z for (1, 1e-6) that dp-accounting states."""
    for order in (2, 5, 64):
        almost = divergence(1.7, 1 - 1e-12, order)
        assert divergence(1.7, 1, order) == order / (2 * 1.7**2) == pytest.approx(almost, rel=1e-8)
    assert epsilon(4.530877117, 1, 1, 1e-6) == pytest.approx(1, abs=1e-6)
    assert epsilon(2.0, 1, 9, 1e-5) == pytest.approx(epsilon(2.0 / 3, 1, 1, 1e-5))  # 9 rounds are one of a third of z


@pytest.mark.parametrize(("noise", "fraction"), [(1.1, 0.1), (0.7, 0.5), (3.0, 0.01), (2.0, 0.999)])
@pytest.mark.parametrize("order", [2, 3, 7, 20])
def test_the_divergence_is_the_integral(noise, fraction, order):
    """1/(a-1) log of the integral of p (p'/p)^a, p normal around 0, p' = (1-q) p + q (normal around 1); both ways."""
    x, step = np.linspace(-60 * noise, 60 * noise + order, 100_001, retstep=True)
    log_p = -((x / noise) ** 2) / 2 - math.log(noise * math.sqrt(2 * math.pi))
    log_ratio = np.logaddexp(math.log1p(-fraction), math.log(fraction) + (2 * x - 1) / (2 * noise**2))
    integral = np.exp(log_p + order * log_ratio).sum() * step
    assert divergence(noise, fraction, order) == pytest.approx(math.log(integral) / (order - 1), rel=1e-7)
    other = np.exp(log_p + (1 - order) * log_ratio).sum() * step
    assert math.log(other) <= math.log(integral)


def test_epsilon_is_monotonous():
    """Less with more noise, fewer clients, fewer rounds, and a larger delta; and the exact epsilon is not above it."""
    for better, worse in [
        ((2, 0.1, 100, 1e-5), (1, 0.1, 100, 1e-5)),
        ((1, 0.1, 100, 1e-5), (1, 0.2, 100, 1e-5)),
        ((1, 0.1, 100, 1e-5), (1, 0.1, 200, 1e-5)),
        ((1, 0.1, 100, 1e-4), (1, 0.1, 100, 1e-5)),
        ((5, 1, 1, 1e-5), (5, 1, 2, 1e-5)),
    ]:
        assert 0 < epsilon(*better) < epsilon(*worse) < math.inf
    assert epsilon(1, 0.1, 0, 1e-5) == 0
    assert epsilon(1e4, 1e-3, 1, 0.1) == 0


@pytest.mark.parametrize("noise", [0.5, 1, 4])
def test_it_bounds_the_exact_delta_of_the_gaussian_mechanism(noise):
    """Balle and Wang (ICML 2018), theorem 8: delta(epsilon) by the error function."""

    def normal(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    for delta in (1e-3, 1e-5, 1e-8):
        bound = epsilon(noise, 1, 1, delta)
        half, tilt = 1 / (2 * noise), bound * noise
        exact = normal(half - tilt) - math.exp(bound) * normal(-half - tilt)
        assert 0.05 * delta < exact <= delta


def test_noise_that_is_next_to_nothing_or_beyond_all_has_a_divergence():
    """No overflow, no division by zero: an average refuses what is infinite."""
    for fraction in (0.5, 1):
        assert divergence(1e-200, fraction, 2) == math.inf and divergence(1e308, fraction, 2) < 1e-9
    rows = [np.arange(3)] * 2
    with pytest.raises(UsageError, match="--noise 1e-200 is too little for any epsilon"):
        PrivateAverage(Random(0), rows, 0.5, np.zeros(3), 1.0, 1e-200)
