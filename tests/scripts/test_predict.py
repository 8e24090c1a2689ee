"""predict.py: new rows from whatever file, as the model was trained to see them; classes and columns by name."""

import csv
import gzip
import json
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
from in_process import ends

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.models import make_model

CLASSES = ["ant", "bee", "cat"]
RECIPE = {"label": ["kind"], "id": "name", "missing": "mean", "header": True, "delimiter": ","}
RECIPE["columns"] = [{"name": "size", "number": 1, "values": None, "fill": 2.0}]
RECIPE["columns"] += [{"name": "color", "number": 2, "values": ["blue", "red"], "fill": None}]


def write_table(path, rows=60, labels=CLASSES, recipe=RECIPE, columns=("train", "test")):
    """A data file as prepare-data makes it of a table with the columns name, size, color and kind."""
    with h5py.File(path, "w") as file:
        for part in columns:
            y = np.random.default_rng(len(part)).integers(0, len(labels), rows)
            color = y % 2
            file[f"{part}/x"] = np.column_stack([3.0 * y + 0.1 * np.arange(rows) / rows, color == 0, color == 1])
            file[f"{part}/y"] = y
            file[f"{part}/row"] = 100 + np.arange(rows)
            file[f"{part}/id"] = np.array([f"é{k}".encode() for k in range(rows)])
        file.attrs["classes"], file.attrs["labels"] = len(labels), labels
        if recipe:
            file.attrs["table"] = json.dumps(recipe)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run on such a table, on one rank."""
    folder = tmp_path_factory.mktemp("table")
    write_table(folder / "a.h5")
    given = ["--data", folder / "a.h5", "--model", "softmax", "--epochs", 30, "--out", folder / "run"]
    assert ends("train_allreduce", [*map(str, given), "--progress", "none"]) == (0, "")
    return folder / "run"


@pytest.fixture
def predict(trained, tmp_path, monkeypatch):
    """A function: predict a source, by default with this run; the lines of the file, or what it refuses with."""
    monkeypatch.chdir(tmp_path)

    def run(source, *options, of=trained, program="predict"):
        told = [of, source, "--out", "p.csv", "--force"] if program == "predict" else [of, "--data", source]
        status, said = ends(program, [*map(str, [*told, *options])])
        if status:
            assert status == 2 and said.count("\n") == 1
            return said
        return list(csv.reader(Path("p.csv").open())) if program == "predict" else None

    return run


def test_a_table_with_its_columns_in_any_order(predict, tmp_path):
    """Columns by name, whatever their order; extra ones are ignored, the missing is filled in, the unknown is none."""
    (tmp_path / "new.csv").write_text('note,color,size,name\nx,red,3.05,"a,1"\n\ny,blue,6,b\nz,green,NA,c\n')
    table = predict("new.csv", "--probabilities")
    assert table[0] == ["row", "id", "class", "probability", "p(ant)", "p(bee)", "p(cat)", "reason"]
    assert [line[:3] for line in table[1:3]] == [["0", "a,1", "bee"], ["1", "b", "cat"]]
    assert all(abs(sum(map(float, line[4:-1])) - 1) < 1e-6 for line in table[1:])


def test_predictions_are_those_of_the_very_same_rows_in_the_data_file(predict, trained, tmp_path):
    """To the last bit: from the file, from a csv, and by hand."""
    whole = predict(trained.parent / "a.h5", "--probabilities")
    assert whole[0][:5] == ["row", "id", "label", "class", "probability"] and whole[1][:2] == ["100", "é0"]
    with h5py.File(trained.parent / "a.h5") as file:
        x = file["test/x"][...]
    lines = [f"é{k},{float(size)!r},{'blue' if blue else 'red'}" for k, (size, blue, _) in enumerate(x)]
    (tmp_path / "new.csv").write_text("\n".join(["name,size,color", *lines]))
    table = predict("new.csv", "--probabilities")
    assert [line[2:-1] for line in table[1:]] == [line[3:] for line in whole[1:]]
    checkpoint, data = Checkpoint.read(trained), open_data(str(trained.parent / "a.h5"), standardize="auto")
    model = make_model("softmax", (3,), 3)
    p = model.predict(checkpoint.vectors["parameters"], data.test.rows(0, 60)[0])
    assert [np.float32(line[5]) for line in whole[1:]] == p[:, 0].tolist()
    assert data.statistics  # those of a table are standardized
    np.testing.assert_array_equal(checkpoint.vectors["data/mean"], data.statistics["mean"])


def test_missing_numbers_are_filled_in_as_the_rows_that_train_say(predict, tmp_path, monkeypatch):
    """As in training, and not as in the file: in a new table, in the data file, in one like it, in a resumed run."""
    monkeypatch.chdir(tmp_path)
    sizes = [1.5**k for k in range(40)]  # no rows without one have the same mean
    lines = [f"{'' if k % 5 == 0 else repr(size)},{'blue' if k % 3 else 'red'}" for k, size in enumerate(sizes)]
    Path("new.csv").write_text("\n".join(["size,color", *lines]))
    Path("all.csv").write_text("\n".join(["size,color,kind", *(f"{line},{k % 2}" for k, line in enumerate(lines))]))
    for file, *options in (["a.h5", "--missing", "mean", "--test-fraction", 0], ["b.h5", "--like", "a.h5"]):
        given = ["csv", "all.csv", file, *options, *(["--test-fraction", 1] if file == "b.h5" else [])]
        assert ends("prepare_data", [*map(str, given)]) == (0, "")
    train = "--data a.h5 --model softmax --dtype float64 --validation 0.25 --out run --progress none --epochs"
    assert ends("train_allreduce", [*train.split(), "1"]) == (0, "")
    assert ends("train_allreduce", ["--resume", "run", "--epochs", "2", "--progress", "none"]) == (0, "")
    recipe = Checkpoint.read(Path("run")).attributes["meaning"]["recipe"]
    with h5py.File("a.h5") as file:
        fill = json.loads(file.attrs["table"])["columns"][0]["fill"]
    assert recipe["columns"][0]["fill"] not in (None, fill)
    new = [line[:-1] for line in predict("new.csv", "--probabilities", of="run")[1:]]
    for file in ("a.h5", "b.h5"):
        table = {line[0]: [line[0], *line[2:]] for line in predict(file, "--probabilities", of="run")[1:]}
        assert [table[line[0]] for line in new] == new
    assert predict("b.h5", program="evaluate", of="run") is None


def test_other_classes_are_matched_by_name_or_refused_by_name(predict, trained, tmp_path, capsys):
    write_table(tmp_path / "same.h5", labels=["bee", "cat", "ant"])
    assert predict("same.h5", program="evaluate", of=trained) is None
    table = predict("same.h5")
    assert {line[2] for line in table[1:]} <= set(CLASSES)
    with h5py.File(tmp_path / "same.h5") as file:
        assert [line[2] for line in table[1:]] == [["bee", "cat", "ant"][k] for k in file["test/y"]]
    write_table(tmp_path / "zebra.h5", labels=["ant", "bee", "zebra"])
    for program in ("predict", "evaluate"):
        said = predict("zebra.h5", program=program)
        assert "zebra has the class 'zebra', which the model does not know; it knows 'ant', 'bee', 'cat'" in said


def test_other_columns_are_refused(predict, tmp_path):
    other = RECIPE | {"columns": [RECIPE["columns"][0] | {"fill": 7.0}, RECIPE["columns"][1]]}
    write_table(tmp_path / "other.h5", recipe=other)
    assert "'size' (a number, filled with 7) instead of 'size' (a number, filled with 2)" in predict("other.h5")
    (tmp_path / "short.csv").write_text("size,name\n1,a\n")
    assert "no column 'color', which the training data had" in predict("short.csv")


def test_rows_without_labels_in_a_data_file(predict, tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows/x"], file["rows/row"] = np.array([[3.0, 0, 1], [6.0, 1, 0]]), np.array([4, 9])
        file.attrs["table"], file.attrs["classes"] = json.dumps(RECIPE), 3
    assert [line[:2] for line in predict("rows.h5")] == [["row", "class"], ["4", "bee"], ["9", "cat"]]
    said = predict("rows.h5", program="evaluate")
    assert "has no group test; it has rows" in said
    assert "has no group train" in predict("rows.h5", "--split", "train")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on images."""
    folder = tmp_path_factory.mktemp("digits")
    assert ends("train_allreduce", ["--epochs", "2", "--out", str(folder / "run"), "--progress", "none"]) == (0, "")
    return folder / "run"


def assert_alike(table, wanted):
    """The same cells, but for the last, a probability: some processors' products round by how many rows there are."""
    assert [line[:-1] for line in table] == [line[:-1] for line in wanted]
    np.testing.assert_allclose(*(np.array([line[-1] for line in each], float) for each in (table, wanted)), 1e-5)


def test_images_from_npz_idx_csv_and_a_function(predict, digits, tmp_path, monkeypatch):
    data = open_data("digits")
    x = np.rint(data.test.rows(0, 40)[0] * 16).astype(np.uint8)
    wanted = [line[2:] for line in predict("digits", of=digits)[1:41]]
    np.savez(tmp_path / "a.npz", x=x.reshape(-1, 8, 8), other=1)
    header = bytes([0, 0, 8, 3]) + struct.pack(">3I", 40, 8, 8)
    (tmp_path / "images-idx3-ubyte").write_bytes(header + x.tobytes())
    (tmp_path / "images.gz").write_bytes(gzip.compress(header + x.tobytes()))
    (tmp_path / "a.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in x))
    names = ",".join(f"p{k}" for k in range(64)) + "\n"
    (tmp_path / "b.csv").write_text(names + (tmp_path / "a.csv").read_text())
    (tmp_path / "pictures_of_mine.py").write_text(
        "import numpy as np\ndef some():\n    x = np.load('a.npz')['x']\n"
        "    return {'x': x, 'y': np.arange(40) % 10, 'scale': 1 / 16}\n"
        "def alone():\n    return np.load('a.npz')['x']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "c.csv").write_text(",".join(map(str, range(64))) + "\n" + (tmp_path / "a.csv").read_text())
    files = "a.npz images-idx3-ubyte images.gz a.csv b.csv c.csv"
    for source in (*files.split(), "pictures_of_mine:some", "pictures_of_mine:alone"):
        table = predict(source, of=digits)
        assert_alike([line[-3:-1] if source.endswith(".csv") else line[-2:] for line in table[1:]], wanted)
        assert [int(line[0]) for line in table[1:]] == list(range(40))


def test_a_csv_with_another_delimiter(predict, tmp_path):
    (tmp_path / "new.csv").write_text("name;color;size\na;red;3.05\n")
    assert [line[:3] for line in predict("new.csv", "--delimiter", ";")][1] == ["0", "a", "bee"]
    assert "its columns are: name;color;size (--delimiter is ',')" in predict("new.csv")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "1,2,3\n", "a.csv has 3 columns; the model was trained on 64 features"),
        ("a.npz", b"PK\3\4nothing", "cannot be read as npz"),
        ("a.idx", b"\0\0\x08\1" + struct.pack(">I", 2) + b"ab", "holds one number for each row, as labels are"),
        ("a.idx", b"\0\0\x08\3" + struct.pack(">3I", 2, 8, 8) + b"ab", "it ends in row 0 of 2"),
        ("a.gz", gzip.compress(b"text", mtime=0), "is gzipped, and holds no idx file"),
        ("a.h5", b"\x89HDF nothing", "a.h5"),
        ("folder", None, "is a folder; give a file"),
        ("absent.csv", ..., "'absent.csv' cannot be read: No such file"),
    ],
)
def test_files_that_cannot_be_read(predict, digits, tmp_path, name, content, words):
    if content is None:
        (tmp_path / name).mkdir()
    elif content is not ...:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert words in predict(name, of=digits)
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize(
    ("note", "value", "header"),
    [
        ("id", np.array([7, 8]), ["row", "id", "class"]),
        ("id", np.array(["a", "ü"], h5py.string_dtype()), ["row", "id", "class"]),
        ("id", np.array([7.5, 8.5]), ["row", "class", "probability"]),
        ("row", np.array([[1], [2]]), ["row", "class", "probability"]),
        ("row", np.array([1, 2, 3]), ["row", "class", "probability"]),
    ],
)
def test_what_others_write_beside_x(predict, tmp_path, note, value, header):
    """Any tool makes data files: what are no numbers and no names of rows is let be."""
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows/x"], file[f"rows/{note}"] = np.array([[3.0, 0, 1], [6.0, 1, 0]]), value
        file.attrs["table"], file.attrs["classes"] = json.dumps(RECIPE), 3
    table = predict("rows.h5")
    assert table[0][:3] == header and [line[0] for line in table[1:]] == ["0", "1"]
    if header[1] == "id":
        assert [line[1] for line in table[1:]] == (["7", "8"] if value.dtype.kind == "i" else ["a", "ü"])


def test_labels_that_are_no_numbers(predict, trained, tmp_path):
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/x"], file[f"{part}/y"] = np.zeros((4, 3)), np.array([0, 1, 2, 9])
        file.attrs["table"], file.attrs["classes"], file.attrs["labels"] = json.dumps(RECIPE), 3, CLASSES
    assert "has the label 9 in row 3; the labels of 3 classes are 0 to 2" in predict("bad.h5")
