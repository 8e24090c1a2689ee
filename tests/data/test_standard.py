"""Standardize: by the mean and deviation of the rows that train, the same for every placement."""

import h5py
import numpy as np
import pytest
from batches import PLACEMENTS
from tables import write_csv

from hpcdl.data import from_arrays, hdf5, open_data, opening
from hpcdl.data.augment import make_augment
from hpcdl.data.standard import TARGET, mean_and_deviation
from hpcdl.errors import UsageError


def batches(data, share=(0, 1), epoch=1):
    return [(b.x.copy(), b.y.copy(), b.index.copy()) for b in data.batches(epoch, 16, share)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("place", PLACEMENTS)
def test_by_the_rows_that_train(shared_file, world, images, place, dtype):
    options = {"validation": 0.2, "seed": 1, "dtype": dtype}
    plain = open_data(shared_file, **options)
    data = open_data(shared_file, comm=world, placement=place, standardize=True, **options)
    splits = plain.train, plain.test, plain.validation
    train, test, held = (split.rows(0, split.examples)[0].astype("f8") for split in splits)
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    assert (deviation[1:] > 10).all() and deviation[0] == 0  # of each image the first pixel is 0: fewer than 200 rows
    deviation[0] = 1
    tolerance = {"float32": 1e-5, "float64": 1e-13}[dtype]
    for split, raw in ((data.train, train), (data.test, test), (data.validation, held)):
        np.testing.assert_allclose(split.rows(0, len(raw))[0], (raw - mean) / deviation, rtol=0, atol=tolerance)
    for x, _, index in batches(data, (world.rank, world.size)):
        np.testing.assert_allclose(x, (train[index] - mean) / deviation, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(x, data.train.take(index)[0])
    np.testing.assert_allclose(data.statistics["mean"], mean, rtol=1e-13)
    np.testing.assert_allclose(data.statistics["deviation"], deviation, rtol=1e-13)
    assert plain.statistics == {}
    plain.close()
    data.close()


@pytest.mark.parametrize("options", [{}, {"validation": 0.1, "augment": "shift:1,flip"}], ids=str)
def test_all_placements_give_the_same_bits(file, options, monkeypatch):
    def rows(place):
        data = open_data(file, placement=place, standardize=True, **options)
        x = np.concatenate([x for x, _, _ in batches(data)])
        index = np.concatenate([index for _, _, index in batches(data)])
        splits = [split.rows(0, split.examples)[0] for split in (data.train, data.test)]
        data.close()
        return x[np.argsort(index)], *splits

    shared, *others = (rows(place) for place in PLACEMENTS)
    for other in others:
        for part in (1, 2) if options else (0, 1, 2):  # the moves of an image depend on its place in the order
            np.testing.assert_array_equal(other[part], shared[part])


@pytest.mark.parametrize("place", ["memory", "streamed"])
def test_after_the_moves(file, images, place):
    """What comes in is raw 0, and each pixel's place has its own mean."""
    x, y, _, _ = images()
    options = {"augment": "shift:2,flip", "seed": 5}
    make = (lambda **more: from_arrays(x, y, dtype="float64", **options, **more)) if place == "memory" else (
        lambda **more: open_data(file, placement="streamed", dtype="float64", **options, **more)
    )  # fmt: skip
    plain, data = make(), make(standardize=True)
    mean, deviation = (data.statistics[name] for name in ("mean", "deviation"))
    moved = 0
    for (raw, _, one), (standard, _, two) in zip(batches(plain), batches(data), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(standard, (raw - mean) / deviation, atol=1e-12)
        moved += (raw != plain.train.take(one)[0]).any(axis=1).sum()
    assert moved > 50
    moves = make_augment("shift:2,flip", (6, 5), 5).moves(1, 0, 16, 0, 16)
    down = int(np.flatnonzero(moves.down > 0)[0])
    np.testing.assert_allclose(batches(data)[0][0][down, :5], (-mean / deviation)[:5])
    plain.close()
    data.close()


@pytest.mark.parametrize("slab", [8, 100, 10_000])
def test_part_by_part_and_far_from_zero(monkeypatch, slab):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", slab)
    random = np.random.default_rng(0)
    x = 1e8 + random.standard_normal((1000, 3)) * [1, 1e-3, 100]
    parts = np.split(x, [1, 400, 400, 990])
    mean, deviation = mean_and_deviation(parts, -2.0)
    np.testing.assert_allclose(mean, -2 * x.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(deviation, 2 * (x - x.mean(axis=0)).std(axis=0), rtol=1e-4)  # the sum of squares, 1e-16


def test_a_feature_that_never_changes():
    x = np.full((30, 3), 0.1)
    x[:, 1] = np.arange(30)
    x[:, 2] = 1e-200 * np.arange(30)
    data = from_arrays(x, np.arange(30) % 3, standardize=True, dtype="float64", scale=3)
    np.testing.assert_array_equal(data.statistics["deviation"][[0, 2]], 1)
    rows = data.train.rows(0, 30)[0]
    assert np.abs(rows[:, 0]).max() < 1e-15 and rows[:, 1].std() == pytest.approx(1)
    assert np.isfinite(from_arrays(x, np.arange(30) % 3, standardize=True).train.rows(0, 30)[0]).all()


def test_by_given_statistics(file, images):
    data = open_data(file, standardize=True, validation=0.3)
    x, y, _, _ = images()
    other = from_arrays(x[::-1], y[::-1], standardize=data.statistics)
    np.testing.assert_array_equal(other.train.rows(0, 100)[0], open_data(
        file, standardize=data.statistics).train.rows(0, 100)[0][::-1])  # fmt: skip
    np.testing.assert_array_equal(other.statistics["mean"], data.statistics["mean"])
    data.close()


@pytest.mark.parametrize("place", PLACEMENTS)
def test_measured_by_one_rank(shared_file, world, place, monkeypatch):
    calls = []
    original = opening.training_statistics
    monkeypatch.setattr(opening, "training_statistics", lambda *what: calls.append(1) or original(*what))
    data = open_data(shared_file, comm=world, placement=place, standardize=True)
    assert len(calls) == (world.rank == 0)
    means = world.allgather(data.statistics["mean"].tobytes())
    assert len(set(means)) == 1
    data.close()


def test_a_bad_value_is_found_when_it_is_measured(tmp_path, images, write):
    x, y, x_test, y_test = images(kind="f4")
    x[60, 0, 3] = np.inf
    path = write(tmp_path / "bad.h5", x, y, x_test, y_test)
    with pytest.raises(UsageError, match="in row 60"):
        open_data(path, placement="streamed", standardize=True)


@pytest.mark.parametrize("outputs", [(), (2,)])
@pytest.mark.parametrize("place", ["memory", *PLACEMENTS])
def test_values_to_predict_are_standardized_too(tmp_path, place, outputs):
    """Those of the training rows have mean 0 and deviation 1, validation and test rows follow; the raw ones stay."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((50, 3)), 4000 + 800 * random.standard_normal((50, *outputs))
    how = {"standardize": True, "validation": 0.2, "dtype": "float64"}
    if place == "memory":
        data = from_arrays(x[10:], y[10:], x[:10], y[:10], **how)
    else:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            for part, rows in (("train", slice(10, 50)), ("test", slice(0, 10))):
                file[f"{part}/x"], file[f"{part}/y"] = x[rows], y[rows]
        data = open_data(str(tmp_path / "a.h5"), placement=place, **how)
    train, held = (split.rows(0, split.examples)[1] for split in (data.train, data.validation))
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(train.std(axis=0), 1, rtol=1e-12)
    mean, deviation = (data.statistics[name] if outputs else data.statistics[name][0] for name in TARGET)
    np.testing.assert_allclose(data.test.rows(0, 10)[1], (y[:10] - mean) / deviation, rtol=1e-12)
    assert len(held) == 8 and abs(held).max() < 5 and abs(data.test.rows(0, 10)[1]).max() < 5
    batch = next(data.batches(0, 16))
    np.testing.assert_array_equal(batch.y, data.train.take(batch.index)[1])
    assert data.unit == (None if outputs else deviation)
    data.close()
    assert from_arrays(x, np.arange(50) % 2, standardize=True).statistics.keys() == {"mean", "deviation"}


def test_what_has_too_few_digits_is_refused():
    """A time in seconds since 1970 that changes by some: in float32 all would be the same."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((200, 2)), random.standard_normal(200)
    time, constant = 1.7e9 + 20 * x[:, 0], np.full(200, 1e9)
    said = r"the feature 1 has mean 1.7e\+09 and deviation \d+.*float32 .* take --dtype float64"
    with pytest.raises(UsageError, match=said):
        from_arrays(np.column_stack([x, time])[:, 1:], y, standardize=True)
    with pytest.raises(UsageError, match=r"the value to predict 0 has mean 1.7e\+09"):
        from_arrays(x, time, standardize=True)
    data = from_arrays(np.column_stack([time, constant]), y, standardize=True, dtype="float64")
    assert data.train.rows(0, 200)[0].std(axis=0) == pytest.approx([1, 0], abs=1e-6)
    from_arrays(np.column_stack([x, constant]), y, standardize=True)


def test_features_of_texts_stay_0_and_1(prepare, tmp_path):
    """The 1 of a rare text would be large, and a usual learning rate too large for it."""
    rows = [(f"{number}.5", "cd"[number % 50 == 0], "a" if number % 2 else "", number % 2) for number in range(100)]
    path = write_csv(tmp_path / "a.csv", [("size", "kind", "colour", "label"), *rows])
    prepare("csv", path, "--test-fraction", "0").close()
    data = open_data(str(tmp_path / "out.h5"), standardize="auto", dtype="float64")
    x = data.train.rows(0, 100)[0]
    assert np.std(x[:, 0]) == pytest.approx(1) and np.mean(x[:, 0]) == pytest.approx(0)
    assert sorted(x[:, 1:].sum(axis=0)) == [2, 50, 98] and set(x[:, 1:].ravel()) == {0, 1}
    data.close()
