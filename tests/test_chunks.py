"""One way to cut, and one to divide what is not of one length."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.chunks import chunk, chunks, longest_first


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_chunks_cover_all_once_and_the_first_are_one_longer(n, parts):
    cut = chunks(n, parts)
    assert [i for part in cut for i in range(part.start, part.stop)] == list(range(n))
    assert [part.stop - part.start for part in cut] == [n // parts + (i < n % parts) for i in range(parts)]
    assert cut == [chunk(n, parts, i) for i in range(parts)]


def fullest(lengths, owners):
    return max((sum(n for n, at in zip(lengths, owners, strict=True) if at == part) for part in owners), default=0)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_longest_first_keeps_its_bound(parts):
    """Beside the best of all divisions."""
    random = np.random.default_rng(parts)
    for _ in range(25):
        lengths = random.integers(1, 30, random.integers(1, 8)).tolist()
        best = min(fullest(lengths, owners) for owners in itertools.product(range(parts), repeat=len(lengths)))
        assert fullest(lengths, longest_first(lengths, parts)) <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


def test_longest_first_at_its_worst():
    """Graham's own example: 2 N - 1, 2 N - 1, ..., N + 1, N + 1, N, N, N."""
    for parts in (2, 3, 4):
        lengths = [n for n in range(2 * parts - 1, parts, -1) for _ in range(2)] + [parts] * 3
        assert fullest(lengths, longest_first(lengths, parts)) == 4 * parts - 1
        assert sum(lengths) == parts * 3 * parts  # so 3 N is the best there is


def test_of_equal_ones_longest_first_takes_the_first():
    assert longest_first([3, 9, 5, 5], 2) == [0, 0, 1, 1]
    assert longest_first([4, 4, 4], 5) == [0, 1, 2]
    assert longest_first([1, 1, 0, 1, 1], 3) == [0, 1, 1, 2, 0]
    assert longest_first([], 3) == []
