"""From libsvm's text to predictions: prepare-data, training, evaluate, predict, on sparse rows."""

import csv
import gzip
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from in_process import ends
from sparse_files import put_sparse

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.csr import CSR
from hpcdl.scripts import prepare_data

WIDTH = 30


def rows(count, seed):
    """Dense rows (count, WIDTH), of which a few elements are not zero, and labels -1 or 1 that a line tells apart."""
    random = np.random.default_rng(seed)
    x = np.round(random.standard_normal((count, WIDTH)), 3) * (random.random((count, WIDTH)) < 0.25)
    x[:, 0], x[0, WIDTH - 1] = np.arange(count) % 7, 0.5
    return x, np.where(x[:, 1:] @ np.linspace(-1, 1, WIDTH - 1) > 0, 1, -1)


def write(path, x, y, base=1):
    lines = [
        f"{label:+d} {' '.join(f'{column + base}:{row[column]}' for column in np.flatnonzero(row))}\n"
        for row, label in zip(x, y, strict=True)
    ]
    content = "".join(lines).encode()
    Path(path).write_bytes(gzip.compress(content) if str(path).endswith(".gz") else content)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data files of rows that count from 1 and from 0, and a run on each."""
    folder = tmp_path_factory.mktemp("sparse")
    for base in (0, 1):
        data = folder / f"data{base}.h5"
        (x, y), (x_test, y_test) = rows(200, 1), rows(60, 2)
        given = write(folder / f"{base}.svm", x, y, base), write(folder / f"test{base}.svm", x_test, y_test, base)
        prepare_data.main(["libsvm", str(given[0]), str(data), "--test", str(given[1])])
        told = ["--data", data, "--model", "logistic", "--epochs", 20, "--lr", 1, "--out", folder / f"run{base}"]
        assert ends("train_allreduce", [*map(str, told), "--progress", "none"]) == (0, "")
    return folder


def predicted(folder, base, source, *options):
    out = folder / "p.csv"
    given = [folder / f"run{base}", source, "--out", out, "--force", *options]
    status, said = ends("predict", list(map(str, given)))
    assert status in (0, 2)
    return said if status else list(csv.DictReader(out.open()))


def test_the_base_makes_no_difference(folder):
    one, two = (Checkpoint.read(folder / f"run{base}") for base in (0, 1))
    np.testing.assert_array_equal(one.vectors["parameters"], two.vectors["parameters"])
    assert [each.attributes["meaning"]["base"] for each in (one, two)] == [0, 1]
    assert one.attributes["data"]["digest"] == two.attributes["data"]["digest"] and one.attributes["data"]["sparse"]
    summary = json.loads((folder / "run1/summary.json").read_text())
    assert summary["test_accuracy"] > 0.85 and summary["data"] == "data1"


@pytest.mark.parametrize("base", [0, 1])
def test_predictions_of_every_kind_of_source(folder, base):
    x, y = rows(60, 2)
    test = predicted(folder, base, folder / f"data{base}.h5")
    assert [row["label"] for row in test] == [str(label) for label in y]
    accuracy = np.mean([row["label"] == row["class"] for row in test])
    assert accuracy == json.loads((folder / f"run{base}/summary.json").read_text())["test_accuracy"]
    texts = write(folder / "new.txt", x, y, base), write(folder / "new.gz", x, y * 0, base)
    with h5py.File(folder / "rows.h5", "w") as file:
        put_sparse(file.create_group("rows/x"), x)
    sparse = CSR.of(x)
    arrays = {"data": sparse.data, "indices": sparse.indices, "indptr": sparse.indptr, "shape": np.array(x.shape)}
    np.savez(folder / "scipy.npz", format=np.array(b"csr"), **arrays)
    np.savez(folder / "dense.npz", x=x)
    np.savetxt(folder / "dense.csv", x, delimiter=",")
    files = f"test{base}.svm", "rows.h5", "scipy.npz", "dense.npz", "dense.csv"
    for source in (*texts, *map(folder.joinpath, files)):
        found = predicted(folder, base, source)
        assert [row["class"] for row in found] == [row["class"] for row in test], source
        assert [row["row"] for row in found] == [str(number) for number in range(60)]
        if "dense" not in source.name:
            assert [row["probability"] for row in found] == [row["probability"] for row in test], source


def test_a_function_that_returns_sparse_rows(folder, monkeypatch):
    x, _ = rows(60, 2)
    np.savez(folder / "mine.npz", x=x)
    code = "import numpy\nfrom hpcdl.csr import CSR\ndef rows(): return {'x': CSR.of(numpy.load('mine.npz')['x'])}\n"
    (folder / "sparse_mine.py").write_text(code)
    monkeypatch.chdir(folder)
    known, found = predicted(folder, 1, folder / "test1.svm"), predicted(folder, 1, "sparse_mine:rows")
    assert known == found


def test_comments_count_no_rows(folder):
    x, y = rows(60, 2)
    lines = write(folder / "new.svm", x, y).read_text().splitlines(keepends=True)
    (folder / "new.svm").write_text("# rows\n" + "\n# more\n".join(lines[:5]))
    found = predicted(folder, 1, folder / "new.svm")
    assert [row["row"] for row in found] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("base", "text", "words"),
    [
        (1, "1 3:1\n1 31:1\n", "line 2: the index in '31:1' is beyond 30, the last one that {run} was trained on"),
        (0, "1 3:1\n1 30:1\n", "line 2: the index in '30:1' is beyond 29, the last one that {run} was trained on"),
        (1, "1 0:1\n", "line 1: the index in '0:1' is 0, but indices must count from 1"),
        (1, "3:1 4:1\n", "line 1: the row begins with '3:1', not with a label"),
        (1, "1 3:nan\n", "line 1: the value in '3:nan' is not finite"),
    ],
)
def test_rows_that_do_not_fit(folder, base, text, words):
    (folder / "bad.svm").write_text(text)
    said = predicted(folder, base, folder / "bad.svm")
    assert words.format(run=folder / f"run{base}") in said and said.count("\n") == 1


def test_a_model_of_dense_rows(folder, tmp_path):
    x, y = rows(80, 1)
    with h5py.File(tmp_path / "dense.h5", "w") as file:
        file["train/x"], file["train/y"], file["test/x"], file["test/y"] = x, (y + 1) // 2, x, (y + 1) // 2
    told = ["--data", tmp_path / "dense.h5", "--model", "logistic", "--steps", 2, "--out", tmp_path / "run1"]
    assert ends("train_allreduce", [*map(str, told), "--progress", "none"]) == (0, "")
    assert "do not say whether indices count from 0 or from 1" in predicted(tmp_path, 1, folder / "test1.svm")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        put_sparse(file.create_group("rows/x"), x)
    assert len(predicted(tmp_path, 1, tmp_path / "rows.h5")) == 80  # the same features, written otherwise
    told = [*told[:-1], tmp_path / "run2", "--standardize"]
    assert ends("train_allreduce", [*map(str, told), "--progress", "none"]) == (0, "")
    assert "has sparse rows, but the model was trained on standardized" in predicted(tmp_path, 2, tmp_path / "rows.h5")


def test_evaluate(folder):
    """Also on a file whose text counts from 0, where that of the training counts from 1: columns are columns."""
    known = json.loads((folder / "run1/summary.json").read_text())
    for data in ([], ["--data", folder / "data0.h5"]):
        files = ["--json", folder / "scores.json", "--export", folder / "w.npz", "--force"]
        assert ends("evaluate", list(map(str, [folder / "run1", *data, *files]))) == (0, "")
        found = json.loads((folder / "scores.json").read_text())["scores"]
        assert found["accuracy"] == known["test_accuracy"] and np.isclose(found["loss"], known["test_loss"])
    assert sum(each.size for each in np.load(folder / "w.npz").values()) == WIDTH + 1


def test_zeros_stay_zero(folder):
    for option, word in (("--standardize", "zeros"), ("--augment=flip", "zeros")):
        given = ["--data", folder / "data1.h5", "--model", "logistic", "--steps", 2, "--out", "none", option]
        status, said = ends("train_allreduce", list(map(str, given)))
        assert status == 2 and word in said and said.count("\n") == 1


def test_a_sparse_archive_of_scipy(folder, tmp_path):
    x, y = rows(50, 3)
    sparse = CSR.of(x)
    arrays = {"data": sparse.data, "indices": sparse.indices, "indptr": sparse.indptr.astype("i4")}
    about = {"shape": np.array(x.shape), "format": np.array(b"csr")}

    def prepared(**given):
        np.savez(tmp_path / "a.npz", **given)
        return ends("prepare_data", ["npz", str(tmp_path / "a.npz"), str(tmp_path / "a.h5"), "--test-fraction=0"])

    assert prepared(**arrays, **about, y=y) == (0, "")
    with h5py.File(tmp_path / "a.h5", "r", locking=False) as file:
        assert sorted(file["train/x/data"][...]) == sorted(sparse.data) and file["train/x"].attrs["features"] == WIDTH
    (tmp_path / "a.h5").unlink()
    for given, words in (
        (arrays | about, "has no array y"),
        (arrays | about | {"y": y[1:]}, "but y has shape (49,)"),
        (arrays | about | {"y": y, "format": np.array(b"csc")}, "in the form b'csc'; save it as csr"),
        (arrays | about | {"y": y, "indices": sparse.indices[::-1]}, "columns"),
        (arrays | about | {"y": y, "indptr": sparse.indptr[1:]}, "indices and indptr do not fit its shape [50, 30]"),
        (arrays | about | {"y": y, "data": sparse.data.astype("S4")}, "are no sparse matrix of numbers"),
        (arrays | about | {"y": y, "shape": np.array([50, 3, 4])}, "are no sparse matrix of numbers"),
        (arrays | about | {"y": y, "shape": np.array([50, 20])}, "has a column outside of 0 to 19"),
    ):
        status, said = prepared(**given)
        assert status == 2 and words in said, said
        assert not (tmp_path / "a.h5").exists()
