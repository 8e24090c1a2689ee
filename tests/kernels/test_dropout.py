"""Dropout masks from a counter: SplitMix64's published words; a mask for each row, the same in any division of rows."""

import numpy as np

from hpcdl.kernels import references
from hpcdl.kernels.dropout import STEPS, dropout_mask, row_keys

KNOWN = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]  # of the seed 1234567


def masks(rows, width=200, key=5, p=0.25, dtype="float64"):
    mask = np.empty((len(rows), width), dtype)
    dropout_mask(mask, row_keys(key, np.array(rows)), round(p * STEPS), 1 / (1 - p))
    return mask


def test_the_published_words():
    states = np.uint64(1234567) + np.arange(1, 5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert references.split_mix(states).tolist() == KNOWN
    assert row_keys(1234567, np.arange(4)).view(np.uint64).tolist() == KNOWN
    for number, word in enumerate(KNOWN):
        for least in (word >> 40, (word >> 40) + 1):
            mask = np.empty((1, 4))
            dropout_mask(mask, np.array([1234567]), least, 2.0)
            assert mask[0, number] == (2.0 if word >> 40 >= least else 0.0)


def test_a_row_has_its_own_and_the_same_in_any_company():
    whole = masks(range(20))
    assert len(np.unique(whole, axis=0)) == 20
    assert np.array_equal(masks([7, 3]), whole[[7, 3]])
    assert np.array_equal(masks([3], width=90), whole[3:4, :90])
    assert np.array_equal(masks([7, 3], dtype="float32"), whole[[7, 3]].astype("float32"))
    assert (masks(range(20), key=6) != whole).any(axis=1).all()
    neighbours = np.corrcoef((whole > 0).astype(float))[np.triu_indices(20, 1)]
    assert np.abs(neighbours).max() < 5 / np.sqrt(200)
