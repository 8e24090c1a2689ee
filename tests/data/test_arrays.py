"""Data from arrays: names of classes, several outputs, and what a function of one's own returns."""

import textwrap

import numpy as np
import pytest

from hpcdl.data import from_arrays, open_data
from hpcdl.errors import UsageError

X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


def test_labels_name_the_classes():
    data = from_arrays(X, Y, labels=["ant", "bee", "cat", "dog"])
    assert data.classes == 4 and data.schema.names(4) == ["ant", "bee", "cat", "dog"] and data.source == ""
    for labels in (["a", "b"], ["a", "a", "b"]):
        with pytest.raises(UsageError):
            from_arrays(X, Y, labels=labels)


def test_several_outputs():
    y = np.column_stack([X.sum(axis=1), X[:, 0]])
    data = from_arrays(X, y, X[:2], y[:2], dtype="float64")
    assert data.classes == 0 and data.outputs == (2,)
    batch = next(iter(data.batches(0, 4, (1, 2))))
    assert batch.y.shape == (2, 2)
    np.testing.assert_array_equal(batch.y, y[batch.index])
    np.testing.assert_array_equal(data.test.rows(0, 2)[1], y[:2])
    assert [part.y.shape for part in batch.split(3)] == [(1, 2), (1, 2), (0, 2)]
    with pytest.raises(UsageError, match=r"y has rows of shape \(2,\), but y_test of shape \(\)"):
        from_arrays(X, y, X[:2], y[:2, 0])
    with pytest.raises(UsageError, match="classes=2 does not fit y"):
        from_arrays(X, np.zeros((6, 2), int), classes=2)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "tables_of_mine.py").write_text(
        textwrap.dedent(
            """
            import numpy as np
            def pairs(rows=6, seed=0):
                x = np.random.default_rng(seed).standard_normal((rows, 2))
                return x, np.arange(rows) % 3
            def four():
                return (*pairs(6), *pairs(4))
            def named(): return {"x": pairs()[0], "y": pairs()[1], "labels": ["a", "b", "c"], "scale": 0.5}
            def three(): return 1, 2, 3
            def strange(): return {"x": 1, "y": 2, "z": 3}
            def random(): return np.random.default_rng().standard_normal((5, 2)), np.arange(5) % 2
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "tables_of_mine"
    __import__("sys").modules.pop("tables_of_mine", None)


def test_a_function_of_ones_own(mine):
    data = open_data(f"{mine}:pairs,rows=9", seed=5, standardize=True)
    assert (data.name, data.source, data.examples, data.classes) == ("pairs", f"{mine}:pairs,rows=9", 9, 3)
    raw = np.random.default_rng(5).standard_normal((9, 2))  # the run's seed, for it takes one
    np.testing.assert_allclose(data.train.rows(0, 9)[0], (raw - raw.mean(axis=0)) / raw.std(axis=0), rtol=1e-5)
    assert open_data(f"{mine}:four").test.examples == 4
    assert open_data(f"{mine}:named").schema.labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("what", "how", "words"),
    [
        ("three", {}, r"should return \(x, y\), \(x, y, x_test, y_test\) or a dictionary of them"),
        ("strange", {}, "not a dictionary with"),
        ("pairs,row=3", {}, "there is no setting 'row'; it takes rows, seed"),
        ("pairs", {"placement": "streamed"}, "needs placement shared, not streamed"),
    ],
)
def test_refusals(mine, what, how, words):
    with pytest.raises(UsageError, match=words):
        open_data(f"{mine}:{what}", **how)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_draw_other_arrays_are_told_so(mine, world):
    with pytest.raises(UsageError, match=r"returns other arrays on rank . than on rank 0: draw its random numbers"):
        open_data(f"{mine}:random", comm=world)
    assert open_data(f"{mine}:pairs", comm=world).examples == 6
