"""Augmentation: the words, the draw, and images that really move; the same whatever the number of ranks."""

import itertools

import numpy as np
import pytest

from hpcdl.data import from_arrays
from hpcdl.data.augment import make_augment
from hpcdl.errors import UsageError


@pytest.mark.parametrize("size", range(1, 8))
def test_moves_are_drawn_for_the_whole_batch(size):
    augment = make_augment("shift:2,flip", (8, 8), seed=0)
    whole = augment.moves(1, 2, 23, 0, 23)
    cuts = np.linspace(0, 23, size + 1).astype(int)
    parts = [augment.moves(1, 2, 23, a, b - a) for a, b in itertools.pairwise(cuts)]
    for one, together in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(one, np.concatenate(together))
    other = augment.moves(1, 3, 23, 0, 23)
    assert not np.array_equal(whole.down, other.down)


def test_draws_reach_every_shift_and_both_sides():
    moves = make_augment("shift:2,flip", (8, 8), seed=0).moves(0, 0, 2000, 0, 2000)
    assert set(moves.down) == set(moves.right) == {-2, -1, 0, 1, 2}
    assert 800 < moves.mirrored.sum() < 1200
    moves = make_augment("shift:1", (8, 8), seed=0).moves(0, 0, 100, 0, 100)
    assert set(moves.down) == {-1, 0, 1} and not moves.mirrored.any()
    moves = make_augment("flip", (8, 8, 3), seed=0).moves(0, 0, 100, 0, 100)
    assert not moves.down.any() and not moves.right.any() and set(moves.mirrored) == {0, 1}


def test_batches_hold_moved_images():
    image = np.zeros((1, 7, 7), "u1")
    image[0, 3, 2] = 100
    data = from_arrays(np.repeat(image, 200, 0), np.arange(200) % 2, augment="shift:2,flip", scale=0.01)
    (batch,) = data.batches(0, 200)
    assert (batch.x.sum(axis=1) == 1).all()  # the dot is still there
    places = {divmod(int(i), 7) for i in batch.x.argmax(axis=1)}
    assert places <= {(v, h) for v in range(1, 6) for h in (*range(0, 5), *range(2, 7))}
    assert {v for v, _ in places} == {1, 2, 3, 4, 5} and {h for _, h in places} == set(range(7))
    np.testing.assert_array_equal(data.train.rows(0, 1)[0].reshape(7, 7), image[0] * np.float32(0.01))


@pytest.mark.parametrize(
    ("spec", "features", "message"),
    [
        ("flop", (8, 8), "did you mean 'flip'"),
        ("shift", (8, 8), "write shift:N"),
        ("shift:0", (8, 8), "write shift:N"),
        ("shift:" + 5000 * "9", (8, 8), "write shift:N"),
        ("flip:2", (8, 8), "unknown augment"),
        ("shift:8", (8, 9), "out of sight"),
        ("flip", (64,), "needs images"),
    ],
)
def test_refusals(spec, features, message):
    with pytest.raises(UsageError, match=message):
        make_augment(spec, features, 0)
