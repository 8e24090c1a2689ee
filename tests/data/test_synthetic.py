"""Sparse rows that are drawn: the same bits for the same spec, of the shape that it says; models can learn them."""

import re

import h5py
import numpy as np
import pytest

from hpcdl.csr import CSR
from hpcdl.data import open_data, synthetic
from hpcdl.data.format import read_info
from hpcdl.data.synthetic import SPECS, Synthetic, draw_data
from hpcdl.errors import UsageError


def arrays(path, group="train"):
    with h5py.File(path, "r", locking=False) as file:
        return [file[f"{group}/{name}"][...] for name in ("x/data", "x/indices", "x/indptr", "y")]


def test_the_same_bits_for_the_same_spec(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "BLOCK", 100)
    prepare("synthetic", "small:rows=350,test=120,seed=5").close()
    prepare("synthetic", "small:rows=350,test=120,seed=5", out="again.h5").close()
    prepare("synthetic", "small:rows=250,test=0,seed=5", out="less.h5").close()
    prepare("synthetic", "small:rows=350,test=120,seed=6", out="other.h5").close()
    info = read_info(tmp_path / "out.h5")
    assert info.rows == {"train": 350, "test": 120, "rows": 0} and info.features == (400,) and info.classes == 2
    assert "drawn as small: 12 of 400 words a row, 2 classes, seed 6" in prepare.summary and info.schema.base == 1
    assert read_info(tmp_path / "less.h5").rows["test"] == 0
    for group in ("train", "test"):
        one, two, other = (arrays(tmp_path / f"{name}.h5", group) for name in ("out", "again", "other"))
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        assert not np.array_equal(one[1], other[1])
    assert not np.array_equal(one[1][:100], arrays(tmp_path / "out.h5")[1][:100])  # those of test are no rows of train
    one, less = (arrays(tmp_path / f"{name}.h5") for name in ("out", "less"))
    np.testing.assert_array_equal(less[0], one[0][: len(less[0])])  # the first rows of more
    np.testing.assert_array_equal(less[3], one[3][:250])


def test_the_shape_of_documents():
    """Norms, the number of words, and how often each occurs, are as the formulas say."""
    made = Synthetic(**SPECS["rcv1"] | {"rows": 3000, "features": 20000})
    labels = []
    parts = list(made.blocks("train", 3000, labels))
    whole = CSR.joined(parts)
    data, columns = whole.data, whole.indices
    lengths = np.diff(whole.indptr)
    rows = np.repeat(np.arange(3000), lengths)
    np.testing.assert_allclose(np.bincount(rows, data.astype("f8") ** 2), 1, rtol=1e-6)
    assert abs(lengths.mean() - 74) < 0.5 and (data > 0).all() and len(parts) == 1
    frequency = np.bincount(columns, minlength=20000)[made.column] / 3000  # by rank
    expected = -np.expm1(made.words * np.log1p(-made.p))
    assert abs(expected.sum() - 74) < 1e-9 and abs(made.p[9] / made.p[99] - 102 / 12) < 1e-9
    for few in (slice(0, 10), slice(10, 100), slice(100, 1000), slice(1000, 20000)):
        assert abs(frequency[few].sum() / expected[few].sum() - 1) < 0.03
    counts = np.bincount(np.concatenate(labels))
    assert len(counts) == 2 and counts.min() > 1200
    for row in range(20):
        assert (np.diff(whole[row : row + 1].copy().indices) > 0).all()


@pytest.mark.parametrize(("classes", "kind"), [(0, "f"), (2, "u"), (5, "u")])
def test_labels_can_be_learned(prepare, tmp_path, classes, kind):
    """The hidden sums, by least squares of one class against the rest, are found again."""
    prepare("synthetic", f"small:classes={classes},noise=0.1,features=200,nonzeros=20").close()
    data = open_data(tmp_path / "out.h5", dtype="float64")
    assert data.classes == classes and data.train.source.y.dtype == (np.int64 if classes else np.float64)
    (x, y), (x_test, y_test) = data.train.rows(0, 2000), data.test.rows(0, 500)
    wanted = np.eye(classes)[y] if classes else y[:, None]
    ones = [np.hstack([each.dense(), np.ones((len(each), 1))]) for each in (x, x_test)]
    square = ones[0].T @ ones[0] + 1e-9 * np.eye(201)
    found = ones[1] @ np.linalg.solve(square, ones[0].T @ wanted)
    if classes:
        assert (found.argmax(1) == y_test).mean() > (0.8 if classes == 2 else 0.65)
    else:
        assert np.var(found[:, 0] - y_test) < 0.1 * np.var(y_test)


@pytest.mark.parametrize("classes", [0, 3])
def test_the_same_rows_in_memory_as_in_a_file(classes, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "BLOCK", 100)
    spec = f"small:rows=350,test=120,seed=5,classes={classes}"
    prepare("synthetic", spec).close()
    data, file = draw_data(spec, dtype="float64"), open_data(tmp_path / "out.h5", dtype="float64")
    assert data.name == spec and data.dtype == file.dtype == np.float64 and data.classes == file.classes == classes
    for part, kept, rows in [(data.train, file.train, 350), (data.test, file.test, 120)]:
        assert part.examples == kept.examples == rows
        (x, y), (x_kept, y_kept) = part.rows(0, rows), kept.rows(0, rows)
        assert np.array_equal(x.dense(), x_kept.dense()) and np.array_equal(y, y_kept)
    assert draw_data("small:rows=9,test=0").test is None
    with pytest.raises(UsageError, match="drawn in memory, needs"):
        draw_data("rcv1:rows=1000000000000")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("reuters", "unknown shape of synthetic rows 'reuters'"),
        ("small:row=3", "has no setting 'row'"),
        ("small:rows=0", "rows should be 1 or more"),
        ("small:test=-1", "test should be 0 or more"),
        ("small:classes=1", "classes should be 0"),
        ("small:features=3000000000", "features should be 2 to"),
        ("small:nonzeros=nan", "nonzeros should be from 1 to half of the features"),
        ("small:power=7", "power should be from 0 to 3"),
        ("small:noise=inf", "noise should be 0 or more"),
        ("small:features=2000000000", "bytes of memory, and this machine has"),
    ],
)
def test_bad_specs(prepare, tmp_path, spec, words):
    assert words in prepare("synthetic", spec)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=re.escape(words)):
        draw_data(spec)
