"""Clipping, noise, and the accountant against published values, closed forms and integrals."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.errors import UsageError
from hpcdl.federated.averaging import PrivateAverage
from hpcdl.federated.privacy import ORDERS, add_noise, alternating, clip, divergence, divergences, log_erfc
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
    """The tutorial of TensorFlow Privacy (tutorials/README.md, 2019): Mironov's conversion (CSF 2017), whole orders."""
    rounds, delta = epochs * 60000 // 256, 1e-5
    plain = min(rounds * divergence(noise, 256 / 60000, a) + math.log(1 / delta) / (a - 1) for a in range(2, 65))
    assert round(plain, 2) == published
    assert 0.6 * plain < epsilon(noise, 256 / 60000, rounds, delta) < plain


def test_published_divergences():
    """dp-accounting, rdp_privacy_accountant_test.py: z = 2.5, q = 0.01, 50 rounds."""
    found = [50 * divergence(2.5, 0.01, a) for a in (5, 50, 100)]
    assert found == pytest.approx([2.18075656e-03, 2.38460375e-02, 1.67416308e02], rel=1e-8)


def theirs(noise, fraction, rounds, exact=False):
    """The epsilon at 1e-5 that dp-accounting finds, by the same orders or from the privacy loss itself."""
    dp_accounting = pytest.importorskip("dp_accounting", reason="pip install dp-accounting")
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event = dp_accounting.GaussianDpEvent(noise)
    event = dp_accounting.PoissonSampledDpEvent(fraction, event) if fraction < 1 else event
    accountant = PLDAccountant() if exact else RdpAccountant(ORDERS)
    return accountant.compose(event, rounds).get_epsilon(1e-5)


@pytest.mark.parametrize("rounds", [1, 60])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.25, 1])
@pytest.mark.parametrize("noise", [1, 2, 4])
def test_the_accountant_of_dp_accounting(noise, fraction, rounds):
    assert epsilon(noise, fraction, rounds, 1e-5) == pytest.approx(theirs(noise, fraction, rounds), rel=0.01)


@pytest.mark.parametrize(("noise", "fraction", "rounds"), [(0.5, 0.25, 60), (0.5, 0.05, 1000), (3, 0.01, 2000)])
def test_between_the_exact_epsilon_and_that_of_dp_accounting(noise, fraction, rounds):
    """Its Renyi divergences are too large where noise is little: it adds up the sizes of terms that alternate."""
    found, setting = epsilon(noise, fraction, rounds, 1e-5), (noise, fraction, rounds)
    assert theirs(*setting, exact=True) < found < theirs(*setting) * (1 + 1e-9)


def test_every_client_in_every_round_is_the_gaussian_mechanism():
    """At q = 1 the sum over k is exp(a (a-1) / (2 z^2)); and the z for (1, 1e-6) that dp-accounting states."""
    for order in (2, 5, 64):
        almost = divergence(1.7, 1 - 1e-12, order)
        assert divergence(1.7, 1, order) == order / (2 * 1.7**2) == pytest.approx(almost, rel=1e-8)
    assert epsilon(4.530877117, 1, 1, 1e-6) == pytest.approx(1, abs=1e-6)
    assert epsilon(2.0, 1, 9, 1e-5) == pytest.approx(epsilon(2.0 / 3, 1, 1, 1e-5))  # 9 rounds are one of a third of z


@pytest.mark.parametrize(("noise", "fraction"), [(1.1, 0.1), (0.7, 0.5), (3.0, 0.01), (2.0, 0.999)])
@pytest.mark.parametrize("order", [1.01, 1.1, 1.5, 2, 2.5, 3, 6.999, 7, 20, 20.3])
def test_the_divergence_is_the_integral(noise, fraction, order):
    """1/(a-1) log of the integral of p (p'/p)^a, p normal around 0, p' = (1-q) p + q (normal around 1); both ways."""
    x, step = np.linspace(-60 * noise, 60 * noise + order, 100_001, retstep=True)
    log_p = -((x / noise) ** 2) / 2 - math.log(noise * math.sqrt(2 * math.pi))
    log_ratio = np.logaddexp(math.log1p(-fraction), math.log(fraction) + (2 * x - 1) / (2 * noise**2))
    integral = np.exp(log_p + order * log_ratio).sum() * step
    assert divergence(noise, fraction, order) == pytest.approx(math.log(integral) / (order - 1), rel=1e-7, abs=1e-12)
    other = np.exp(log_p + (1 - order) * log_ratio).sum() * step
    assert math.log(other) <= math.log(integral)


def test_orders_near_1_tell_a_large_epsilon():
    """By whole orders alone 98.3; by the integrals of all orders 56.6."""
    assert epsilon(0.5, 0.25, 60, 1e-5) == pytest.approx(56.6, rel=1e-3)


def test_the_rest_of_an_alternating_series():
    terms = 1 / np.arange(1, 25)
    assert np.dot(alternating(24), terms) == pytest.approx(math.log(2), rel=1e-15)
    for x in (25, 25.7, 26):  # where both the function and its series are at hand
        assert log_erfc(x) == pytest.approx(math.log(math.erfc(x)), rel=1e-14)


def test_epsilon_is_never_negative():
    """0 before the first round, and where noise hides all."""
    assert epsilon(1, 0.1, 0, 1e-5) == epsilon(1e4, 1e-3, 1, 0.1) == 0


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
    for fraction in (1e-300, 0.5, 1):
        for order in (1.01, 2, 63.5):
            assert divergence(1e-200, fraction, order) == math.inf and 0 <= divergence(1e308, fraction, order) < 1e-9
            assert 1e50 < divergence(1e-30, fraction, order) < 1e70
    rows = [np.arange(3)] * 2
    with pytest.raises(UsageError, match="--noise 1e-200 is too small for a finite epsilon"):
        PrivateAverage(Random(0), rows, 0.5, np.zeros(3), 1.0, 1e-200)
