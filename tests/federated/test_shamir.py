"""Shamir's shares: any t give the secret back, and t - 1 fit every secret."""

import itertools
import os

import pytest
from mpi4py import MPI

from hpcdl.federated.shamir import PRIME, SHARE, join, split, weights

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="pure functions")


def test_a_worked_example():
    """f(x) = 1234 + 166 x + 94 x^2, from three of its points."""
    points = [2, 4, 5]
    shares = [value.to_bytes(SHARE, "little") for value in (1942, 3402, 4414)]
    assert int.from_bytes(join(shares, weights(points), 32), "little") == 1234


def test_the_prime_is_the_least_above_256_bits():
    def passes(n):
        return all(pow(base, n - 1, n) == 1 for base in (2, 3, 5, 7))

    assert [n for n in range(2**256, PRIME + 1) if passes(n)] == [PRIME] and PRIME < 256**SHARE


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, os.urandom(32), os.urandom(16)], ids=len)
@pytest.mark.parametrize(("threshold", "count"), [(1, 1), (2, 2), (3, 5), (5, 5)])
def test_any_t_shares_give_the_secret(secret, threshold, count):
    shares = split(secret, threshold, count)
    for points in itertools.permutations(range(1, count + 1), threshold):
        assert join([shares[x - 1] for x in points], weights(points), len(secret)) == secret


def at(x: int, points: dict[int, int]) -> int:
    """The value at x of the polynomial through these points: that of the polynomial moved by x, at 0."""
    moved = [(each - x) % PRIME for each in points]
    return sum(value * weight for value, weight in zip(points.values(), weights(moved), strict=True)) % PRIME


@pytest.mark.parametrize("threshold", [2, 3, 6])
def test_fewer_shares_fit_every_secret(threshold):
    """With t - 1 shares and any secret there is a t-th share that makes them shares of that secret."""
    shares = split(os.urandom(32), threshold, 8)
    for known in itertools.combinations(range(1, 9), threshold - 1):
        values = {x: int.from_bytes(shares[x - 1], "little") for x in known}
        for guess in (0, 1, 2**256 - 1):
            ninth = at(9, values | {0: guess}).to_bytes(SHARE, "little")
            found = join([shares[x - 1] for x in known] + [ninth], weights([*known, 9]), 32)
            assert int.from_bytes(found, "little") == guess


def test_the_same_secret_is_split_in_another_way_each_time():
    """All of its coefficients are drawn anew: t - 1 shares have nothing in common, and do not give the secret."""
    secret, threshold = bytes(32), 4
    first, second = split(secret, threshold, 6), split(secret, threshold, 6)
    assert not set(first) & set(second)
    for points in itertools.combinations(range(1, 7), threshold - 1):
        value = sum(int.from_bytes(first[x - 1], "little") * w for x, w in zip(points, weights(points), strict=True))
        assert value % PRIME != int.from_bytes(secret, "little")
