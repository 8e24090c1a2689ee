"""Long permutations are numpy's own."""

import numpy as np
import pytest

from hpcdl.kernels import shuffle
from hpcdl.random import Random


@pytest.mark.parametrize("n", [0, 1, 2, 5, shuffle.LONG - 1, shuffle.LONG, shuffle.LONG + 1, 2**16, 2**16 + 1, 300_001])
def test_the_same_as_numpy_draws(n):
    for seed in range(5):
        random, same = Random(seed)("order", n), Random(seed)("order", n)
        drawn = shuffle.permutation(random, n)
        assert drawn.dtype == np.int64
        assert (drawn == same.permutation(n)).all()


def test_words_that_do_not_suffice_are_followed_by_more(monkeypatch):
    go, rounds = shuffle.swaps, []

    def counting(*arguments):
        rounds.append(n)
        return go(*arguments)

    monkeypatch.setattr(shuffle, "swaps", counting)
    monkeypatch.setattr(shuffle, "LONG", 50)
    monkeypatch.setattr(shuffle, "SPARE", 1)
    for n in range(50, 400):
        random, same = Random(3)("order", n), Random(3)("order", n)
        assert (shuffle.permutation(random, n) == same.permutation(n)).all()
    assert len(rounds) > 350
