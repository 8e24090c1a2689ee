"""Noise from a counter: Philox4x32-10's published words; normal numbers, the same in any division of a vector."""

import numpy as np
import pytest
from numba import njit

from hpcdl.kernels import noise, references

# Of the known answers that come with the authors' library: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KEY = 0x12345678, 0x9ABCDEF0


@njit
def words(c0, c1, c2, c3, k0, k1):
    return noise.philox(c0, c1, c2, c3, k0, k1)


def read(text):
    return [np.uint64(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize("counter, key, wanted", KNOWN)
def test_the_published_words(counter, key, wanted):
    assert list(words(*read(counter), *read(key))) == read(wanted)
    assert [int(word) for word in references.philox(read(counter), read(key))] == read(wanted)


def drawn(count, dtype="float64", first=0, step=3, key=KEY, deviation=1.0):
    """Return the noise alone."""
    w = np.zeros(count, dtype)
    noise.langevin(w, w.copy(), 0.0, 0.0, 0.0, deviation, first, step, *key)
    return w


def test_the_numbers_are_normal():
    z = np.concatenate([drawn(50_000, step=step) for step in range(4)])
    for power, moment, error in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # error: variance of one z^power
        assert abs(np.mean(z**power) - moment) < 4 * np.sqrt(error / len(z)), power
    assert abs(np.mean(np.abs(z) < 0.6744898) - 0.5) < 4 * 0.5 / np.sqrt(len(z))
    assert abs(np.corrcoef(z[1:], z[:-1])[0, 1]) < 4 / np.sqrt(len(z))
    assert 3.9 < np.abs(z).max() < 6


def test_each_coordinate_step_and_key_has_its_own():
    base = drawn(100)
    others = [drawn(100, step=4), drawn(100, key=(KEY[0] ^ 1, KEY[1])), drawn(100, key=(KEY[0], KEY[1] ^ 1))]
    others += [drawn(100, first=1 << 32), drawn(100, step=3 + (1 << 32))]
    assert all(not np.isin(each, base).any() for each in others)


def test_a_slice_has_the_noise_of_the_whole_to_the_bit(dtype):
    random = np.random.default_rng(0)
    w, g = random.standard_normal((2, 1000)).astype(dtype)
    parts, settings = w.copy(), (0.1, 0.25, 0.01, 0.3)
    noise.langevin(w, g, *settings, 7, 3, *KEY)
    for cut in (slice(0, 1), slice(1, 334), slice(334, 1000)):
        noise.langevin(parts[cut], g[cut], *settings, 7 + cut.start, 3, *KEY)
    np.testing.assert_array_equal(w, parts)
