"""Random numbers depend on seed, purpose and index, and on nothing else."""

import numpy as np

from hpcdl.random import Random


def test_equal_keys_give_equal_streams_and_others_give_others():
    keys = [
        (seed, purpose, index) for seed in (0, 1) for purpose in ("order", "augment") for index in ((), (0,), (1, 0))
    ]
    first, again = ([Random(s)(p, *i).random(8) for s, p, i in keys] for _ in range(2))
    assert np.array_equal(first, again)
    assert len(np.unique(np.array(first))) == len(keys) * 8


def test_numpy_integers_are_the_same_key():
    assert Random(3)("order", np.int64(4)).random() == Random(np.int32(3))("order", 4).random()


def test_the_same_numbers_on_every_machine():
    """Written down once, so that a change of the key's form is seen: it would change every seeded run."""
    assert Random(0)("order", 1).integers(0, 1000, 5).tolist() == [188, 94, 263, 549, 636]
