"""hpcdl/data/resampling.py: what a member of an ensemble is trained on."""

import contextlib

import numpy as np
import pytest

from hpcdl.data import from_arrays, open_data
from hpcdl.data.resampling import Draw
from hpcdl.errors import UsageError


def made(**how):
    x = np.arange(60.0).reshape(20, 3) + 1
    return from_arrays(x, np.arange(20) % 2, x[:6], np.arange(6) % 2, **how)


def seen(data):
    """The rows of an epoch, by their first feature, sorted."""
    return sorted(float(row[0]) for batch in data.batches(0, 7) for row in batch.x)


def test_rows_are_drawn_with_replacement():
    data, draw = made(), Draw(3, 1, rows=True)
    data = draw.resample(data)
    drawn = draw.examples(20)
    assert data.examples == len(drawn) == 20 and len(set(drawn)) < 20
    assert seen(data) == [3.0 * each + 1 for each in drawn]
    assert data.train.rows(0, 20)[0][:, 0].tolist() == seen(data)
    assert data.test.examples == 6
    other = Draw(3, 2, rows=True).examples(20)
    assert other.tolist() != drawn.tolist() and Draw(3, 1, rows=True).examples(20).tolist() == drawn.tolist()


def test_held_out_rows_are_never_drawn():
    data = made(validation=0.2, data_seed=5)
    held_out = set(data.validation.numbers)
    data = Draw(0, 0, rows=True).resample(data)
    assert data.examples == 16 and not held_out & set(data.train.numbers) and data.validation.examples == 4


def test_the_same_rows_are_held_out_whatever_the_seed():
    first, second = (made(validation=0.2, data_seed=5, seed=seed) for seed in (1, 2))
    assert first.validation.numbers.tolist() == second.validation.numbers.tolist()
    assert made(validation=0.2, seed=1).validation.numbers.tolist() != first.validation.numbers.tolist()


def test_folds_are_stratified_and_part_the_rows():
    labels = np.arange(20) % 7 == 0
    data = from_arrays(np.arange(20.0)[:, None], labels.astype(int), classes=2)
    outside = [np.setdiff1d(np.arange(20), np.array(seen(Draw(4, fold, folds=3).resample(data)))) for fold in range(3)]
    assert sorted(np.concatenate(outside)) == [*range(20)] and [labels[fold].sum() for fold in outside] == [1, 1, 1]
    assert {len(fold) for fold in outside} == {6, 7}
    values = from_arrays(np.arange(20.0)[:, None], np.linspace(0, 1, 20))
    assert sorted(len(seen(Draw(4, fold, folds=3).resample(values))) for fold in range(3)) == [13, 13, 14]


def test_weights_say_which_rows_are_drawn():
    weights = np.zeros(20)
    weights[[4, 7]] = 0.75, 0.25
    drawn = Draw(0, 0, rows=True, weights=weights).examples(20)
    assert set(drawn) == {4, 7} and (drawn == 4).sum() > 10


def test_a_resampled_data_set_is_another_one():
    data, other = made(), made()
    drawn, again = (Draw(0, 0, rows=True).resample(each) for each in (data, other))
    assert len({data.digest, other.digest}) == 1 and again.digest == drawn.digest != data.digest


@pytest.mark.parametrize("standardize", [False, True])
def test_features_that_are_left_out_are_zero(standardize):
    data, draw = made(standardize=standardize, dtype="float64"), Draw(1, 0, features=0.7)
    whole = made(standardize=standardize, dtype="float64")
    data = draw.resample(data)
    out = draw.left_out(3)
    assert len(out) == 1
    kept = np.delete(np.arange(3), out)
    for split, plain in ((data.train, whole.train), (data.test, whole.test)):
        x, before = split.rows(0, split.examples)[0], plain.rows(0, plain.examples)[0]
        assert (x[:, out] == 0).all() and (x[:, kept] == before[:, kept]).all() and before[:, out].any()
    assert np.isfinite(data.statistics["deviation"]).all()  # a checkpoint keeps them
    assert len(Draw(0, 0, features=0.01).left_out(3)) == 2  # one feature stays


def test_data_that_are_resampled_stay_as_they_were():
    data, before = made(), made()
    Draw(1, 0, rows=True, features=0.7).resample(data)
    for mine, theirs in zip(data.batches(0, 7), before.batches(0, 7), strict=True):
        assert np.array_equal(mine.x, theirs.x) and np.array_equal(mine.index, theirs.index)
    assert data.digest == before.digest and data.statistics == {} and data.train.examples == 20


@pytest.mark.parametrize("placement", ["shared", "partitioned", "streamed"])
def test_batches_lack_the_features_that_are_left_out(placement):
    with contextlib.closing(open_data("digits", placement=placement)) as data:
        draw = Draw(0, 0, features=0.5)
        seen = np.concatenate([batch.x.copy() for batch in draw.resample(data).batches(0, 500)])
        assert not seen[:, draw.left_out(64)].any() and seen.any()


@pytest.mark.parametrize(
    ("name", "placement", "draw", "words"),
    [
        ("text", "shared", Draw(0, 0, features=0.5), "tokens of a text"),
        ("digits", "streamed", Draw(0, 0, rows=True), "take --placement shared"),
    ],
)
def test_refusals(name, placement, draw, words):
    with contextlib.closing(open_data(name, placement=placement)) as data, pytest.raises(UsageError, match=words):
        draw.resample(data)
