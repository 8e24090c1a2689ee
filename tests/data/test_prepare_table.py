"""prepare_data csv and table: what becomes of columns, missing values and labels, and done again on another table."""

import csv
import datetime
import gzip
import json
import math
import zlib

import duckdb
import h5py
import numpy as np
import pytest
from tables import WRITE, all_of, write_csv

from hpcdl.data import fills, open_data
from hpcdl.data.format import read_info
from hpcdl.data.formats import table_source
from hpcdl.data.formats.recipe import recipe_of
from hpcdl.data.formats.table_rows import TableRows
from hpcdl.errors import UsageError

COLORS = ["green", "red", "blue"]
PEOPLE = [
    ["name", "age", "color", "height", "kind"],
    *([f"n{i}", str(20 + i), COLORS[i % 3], f"{i / 4}", ("cat", "dog")[i % 2]] for i in range(30)),
]


def table(path, change=lambda rows: None, rows=PEOPLE, kind="csv"):
    """A table of 30 rows, one cell or more changed."""
    rows = [list(row) for row in rows]
    change(rows)
    return WRITE[kind](path.with_suffix(f".{kind}"), rows)


def put(*cells):
    """A change: (row from 1, column, text)."""

    def change(rows):
        for row, column, text in cells:
            rows[row][rows[0].index(column)] = text

    return change


def by_row(file, name="x"):
    """What the groups hold, in the order of the source; and which rows of it those are."""
    groups = [group for group in ("train", "test", "rows") if group in file]
    numbers = np.concatenate([file[group]["row"] for group in groups])
    order = np.argsort(numbers)
    return np.concatenate([file[group][name] for group in groups])[order], numbers[order].tolist()


@pytest.mark.parametrize("lines", [4, 1000])
@pytest.mark.parametrize("kind", WRITE)
def test_texts_become_features(tmp_path, prepare, kind, lines, monkeypatch):
    monkeypatch.setattr(table_source, "BLOCK_ROWS", lines)
    with prepare("table", table(tmp_path / "in", kind=kind), "--label", "kind", "--id", "name") as file:
        x, rows = by_row(file)
        want = [[20 + i, i % 3 == 2, i % 3 == 0, i % 3 == 1, i / 4] for i in range(30)]
        np.testing.assert_array_equal(x, want)
        assert x.dtype == float and rows == list(range(30)) and file.attrs["scale"] == 1
        assert list(file.attrs["labels"]) == ["cat", "dog"] and by_row(file, "y")[0].tolist() == [0, 1] * 15
        ids = by_row(file, "id")[0]
        assert ids.dtype.kind == "S" and [each.decode() for each in ids] == [f"n{i}" for i in range(30)]
        assert file["train/row"].dtype == np.int64 and len(file["train/x"]) == 24
    recipe = recipe_of(tmp_path / "out.h5")
    assert recipe.features == ["age", "color=blue", "color=green", "color=red", "height"]
    assert (recipe.label, recipe.id, recipe.missing, recipe.header) == (("kind",), "name", "refuse", True)
    said = "24 training and 6 test rows of 5 float64, scale 1, 2 classes; 5 features from 3 columns; "
    assert prepare.summary.endswith(f"{said}one-hot color (3); classes cat, dog\n")
    x, numbers, ids, *_ = all_of(TableRows(tmp_path / f"in.{kind}", recipe))
    np.testing.assert_array_equal(x, want)  # the same again
    assert numbers == rows and ids[3] == "n3"
    data = open_data(tmp_path / "out.h5")
    assert data.train.examples == 24 and data.features == (5,)
    with pytest.raises(UsageError, match="no whole number for each row in train/row"):
        open_data(tmp_path / "out.h5", partition="column:row")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("way", ["mean", "median"])
def test_missing_numbers_become_what_the_training_rows_say(tmp_path, prepare, way, kind, monkeypatch):
    monkeypatch.setattr(fills, "MEDIAN_BYTES", 1)
    change = put((3, "age", "NA"), (9, "age", "?"), (4, "height", ""), (5, "color", "null"), (6, "color", "N/A"))
    path = table(tmp_path / "in", change, kind=kind)
    with prepare("table", path, "--id", "name", "--missing", way) as file:
        x, _ = by_row(file)
        train = np.setdiff1d(file["train/row"], [2, 8])
        mean = getattr(np, way)(20 + train)
        height = getattr(np, way)(np.setdiff1d(file["train/row"], [3]) / 4)
        np.testing.assert_allclose([x[2, 0], x[8, 0], x[3, 4]], [mean, mean, height], rtol=1e-12)
        assert not x[[4, 5], 1:4].any() and (x[6:, 1:4].sum(axis=1) == 1).all()
        assert file.attrs["scale"] == 1
    assert f"; 3 missing numbers became the {way}; 2 missing texts became zeros; " in prepare.summary
    said = [column.fill for column in recipe_of(tmp_path / "out.h5").columns]
    np.testing.assert_allclose([said[0], said[2]], [mean, height])
    assert said[1] is None
    np.testing.assert_array_equal(all_of(TableRows(path, recipe_of(tmp_path / "out.h5")))[0], x)


def test_rows_with_missing_values_are_left_out(tmp_path, prepare):
    change = put((3, "age", "NaN"), (4, "color", ""), (5, "kind", "None"))
    path = table(tmp_path / "in", change)
    with prepare("csv", path, "--id", "name", "--missing", "drop") as file:
        x, rows = by_row(file)
        assert rows == [0, 1, *range(5, 30)] and x[2, 0] == 25 and by_row(file, "id")[0][2] == b"n5"
    assert "; 1 row without a label left out; 2 rows with missing values left out; " in prepare.summary
    with prepare("csv", path, "--id", "name", "--missing", "mean", "--force") as file:
        assert by_row(file)[1] == [*range(4), *range(5, 30)]
    drop = ["--missing", "drop", "--drop", "name", "--force"]
    table(tmp_path / "in", lambda rows: [row.__setitem__(1, "") for row in rows[1:]])
    with prepare("csv", path, *drop):
        assert "; left out age without a value; " in prepare.summary
    table(tmp_path / "in", lambda rows: [row.__setitem__(1 + 2 * (k % 2), "") for k, row in enumerate(rows[1:])])
    assert "each row lacks a value" in prepare("csv", path, *drop)


def test_missing_values_are_refused_by_column(tmp_path, prepare):
    path = table(tmp_path / "in", put((3, "age", ""), (9, "age", "?"), (4, "color", "NA")))
    said = prepare("csv", path, "--id", "name", "--missing", "refuse")
    assert "2 in column 'age' (the first in line 4), 1 in column 'color' (the first in line 5); --missing mean" in said
    assert "--missing drop leaves the rows out, --drop age,color the columns" in said
    with prepare("csv", path, "--drop", "age,color,name", "--missing", "refuse") as file:
        assert file["train/x"].shape == (24, 1)


def test_missing_values_become_the_median_unless_another_way_is_asked_for(tmp_path, prepare):
    path = table(tmp_path / "in", put((3, "age", ""), (9, "age", "?"), (4, "color", "NA")))
    found = []
    for options in ([], ["--missing", "median"]):
        with prepare("csv", path, "--id", "name", "--force", *options) as file:
            found.append((file.attrs["digest"], file.attrs["table"]))
        assert "; 2 missing numbers became the median; 1 missing text became zeros; " in prepare.summary
    assert found[0] == found[1]
    with prepare("csv", table(tmp_path / "whole"), "--id", "name", "--force"):
        assert recipe_of(tmp_path / "out.h5").missing == "refuse"  # of new rows: training rows had none


def test_which_columns(tmp_path, prepare):
    path = table(tmp_path / "in")
    for options, features in [
        (["--columns", "age"], ["age"]),
        (["--columns", "height,1", "--label", "4"], ["age", "height"]),
        (["--drop", "name,color"], ["age", "height"]),
        (["--columns", "age,color", "--drop", "2"], ["age"]),
        (["--drop", "name", "--text", "height", "--group", "color"], ["age", *(f"height={i / 4}" for i in range(30))]),
    ]:
        with prepare("csv", path, *options, "--force"):
            assert sorted(recipe_of(tmp_path / "out.h5").features) == sorted(features)
    with h5py.File(tmp_path / "out.h5") as file:
        assert by_row(file, "group")[0].tolist() == [1, 2, 0] * 10
    comma = write_csv(tmp_path / "b.csv", [["a,b", "c", "kind"], *([str(i), "1", str(i % 2)] for i in range(9))])
    with prepare("csv", comma, "--drop", "a,b", "--force"):
        assert recipe_of(tmp_path / "out.h5").features == ["c"]
    with prepare("csv", comma, "--columns", '"a,b",c', "--force"):
        assert recipe_of(tmp_path / "out.h5").features == ["a,b", "c"]


@pytest.mark.parametrize("kind", ["csv", "feather"])
def test_several_values_to_predict(tmp_path, prepare, kind):
    path = table(tmp_path / "in", kind=kind)
    with prepare("table", path, "--label", "age,height", "--drop", "name,kind") as file:
        y, rows = by_row(file, "y")
        np.testing.assert_array_equal(y, [[20 + i, i / 4] for i in rows])
        assert file.attrs["classes"] == 0 and file["train/y"].shape == (24, 2)
    assert recipe_of(tmp_path / "out.h5").label == ("age", "height") and "values to predict" in prepare.summary
    data = open_data(str(tmp_path / "out.h5"), standardize="auto")
    assert data.outputs == (2,) and data.schema.outputs == ["age", "height"] and "target_mean" in data.statistics
    data.close()
    assert "column 'kind' has texts" in prepare("table", path, "--label", "age,kind", "--drop", "name", "--force")
    (tmp_path / "new").mkdir()
    with prepare("table", path, "--like", tmp_path / "out.h5", "--test-fraction", 1, out="new/out.h5") as file:
        np.testing.assert_array_equal(by_row(file, "y")[0], y)


def test_whole_numbers_that_are_many_may_be_values(tmp_path, prepare):
    rows = [["a", "mass"], *([str(i % 7), str(3000 + 25 * (i % 40))] for i in range(120))]
    path = write_csv(tmp_path / "in", rows)
    prepare("csv", path).close()
    said = "if the labels are values to predict, not classes: --regression"
    assert "40 classes" in prepare.summary and said in prepare.summary
    prepare("csv", path, "--regression", "--force").close()
    assert "values to predict" in prepare.summary and "if the labels are" not in prepare.summary


def test_one_group_only(tmp_path, prepare):
    path = table(tmp_path / "in")
    for fraction, group, words in ((0, "train", "30 training rows"), (1, "test", "30 test rows")):
        with prepare("csv", path, "--drop", "name", "--test-fraction", fraction, "--force") as file:
            assert list(file) == [group] and len(file[group]["x"]) == 30
        assert words in prepare.summary and read_info(tmp_path / "out.h5").rows[group] == 30
    said = prepare("csv", path, "--drop", "name", "--missing", "mean", "--test-fraction", "1", "--force")
    assert "--missing mean needs training rows, of which --test-fraction 1 leaves none" in said


def test_bytes_and_scale(tmp_path, prepare):
    """Bytes where all that is stored is a whole number up to 255; pixels only where all columns are plain numbers."""
    rows = [["a", "b", "kind"], *([str(i), "xy"[i % 2], str(i % 2)] for i in range(20))]
    for options, change, kind, scale in [
        (["--drop", "b"], put(), "u1", 1 / 255),
        (["--drop", "b", "--missing", "mean"], put(), "u1", 1 / 255),
        ([], put(), "u1", 1),
        (["--drop", "b", "--missing", "drop"], put((3, "a", "")), "u1", 1 / 255),
        (["--drop", "b", "--missing", "mean", "--test-fraction", "0"], put((3, "a", "")), "f8", 1),
        (["--drop", "b", "--missing", "median", "--test-fraction", "0"], put((3, "a", "")), "u1", 1),
        (["--scale", "1/16"], put(), "u1", 1 / 16),
    ]:
        path = table(tmp_path / "in", change, rows=rows)
        with prepare("csv", path, *options, "--force") as file:
            assert (file["train/x"].dtype, file.attrs["scale"]) == (kind, scale), options


def test_a_table_of_others_labels(tmp_path, prepare):
    """In the encoding, with the classes and the scale of another."""
    path = table(tmp_path / "in", put((3, "age", "")))
    with prepare("csv", path, "--id", "name", "--missing", "median", "--scale", "1/2", out="a.h5") as file:
        first = {name: value for name, value in file.attrs.items() if name not in ("digest", "name", "recipe")}
    order = ["kind", "extra", "color", "age", "height"]
    new = tmp_path / "new.csv"
    write_csv(new, [order, ["dog", "?", "purple", "", "2"], ["dog", "", "red", "1", "3"]], delimiter=";")
    like = ["--like", tmp_path / "a.h5", "--delimiter", ";"]
    with prepare("csv", new, *like, "--test-fraction", 1) as file:
        fill = recipe_of(tmp_path / "a.h5").columns[0].fill
        assert file["test/x"][()][np.argsort(file["test/row"])].tolist() == [[fill, 0, 0, 0, 2], [1, 0, 0, 1, 3]]
        assert file["test/y"][()].tolist() == [1, 1] and "test/id" not in file and "train" not in file
        for name, value in first.items():
            if name != "table":
                np.testing.assert_array_equal(file.attrs[name], value)
        assert json.loads(file.attrs["table"]) == json.loads(first["table"]) | {"delimiter": ";", "like": True}
    said = "1 missing number became the median; 1 text that "
    assert said in prepare.summary and "does not have became zeros" in prepare.summary
    write_csv(new, [order, ["cow", "", "red", "1", "3"], ["ox", "", "red", "1", "3"]], delimiter=";")
    assert "does not have the class 'cow', 'ox'; it has cat, dog" in prepare("csv", new, *like, "--force")
    write_csv(new, [order[1:], ["", "red", "1", "3"]], delimiter=";")
    assert "has no column 'kind', which the training data had" in prepare("csv", new, *like, "--force")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_without_labels(tmp_path, prepare, kind):
    with prepare("csv", table(tmp_path / "in"), "--id", "name", out="a.h5"):
        pass
    rows = [row[:-1] for row in PEOPLE]
    new = table(tmp_path / "new", rows=rows, kind=kind)
    with prepare("table", new, "--like", tmp_path / "a.h5", "--no-label") as file:
        assert list(file) == ["rows"] and sorted(file["rows"]) == ["id", "row", "x"]
        np.testing.assert_array_equal(file["rows/x"][:, 0], np.arange(20, 50))
        assert file["rows/row"][()].tolist() == list(range(30)) and file["rows/id"][2] == b"n2"
        assert file.attrs["classes"] == 2 and list(file.attrs["labels"]) == ["cat", "dog"]
    assert "30 unlabelled rows of 5" in prepare.summary
    assert read_info(tmp_path / "out.h5").rows["rows"] == 30
    with prepare("table", new, "--like", tmp_path / "out.h5", "--no-label", out="c.h5"):
        pass  # such a file has the recipe, too
    with pytest.raises(UsageError, match=r"has no rows to train on \(group train\): it holds rows alone"):
        open_data(tmp_path / "out.h5")
    assert "needs --like TRAIN.h5" in prepare("table", new, "--no-label", "--force")
    with h5py.File(tmp_path / "c.h5", "a", locking=False) as file:
        file.attrs["table"] = json.dumps(json.loads(file.attrs["table"]) | {"label": []})
    assert "has no column of labels: add --no-label" in prepare("table", new, "--like", tmp_path / "c.h5", "--force")
    again = ["table", new, "--force", "--no-label", "--like"]
    assert "absent.h5" in prepare(*again, tmp_path / "absent.h5")
    assert "was not made from a table" in prepare(*again, "digits")
    for option in (["--label", "kind"], ["--missing", "mean"], ["--scale", "2"], ["--test-fraction", "0.5"]):
        assert f"already says what {option[0]} would say" in prepare(*again, tmp_path / "a.h5", *option)


def test_long_texts_quotes_and_ids(tmp_path, prepare):
    """Of csv as spreadsheets write it; whole numbers beyond 2^53 are ids like any others."""
    texts = ['say "hi"', "two\nlines", "a,b", "\0é"]
    rows = [["id", "text", "n", "kind"], *([str(2**60 + i), texts[i % 4], str(i), "ab"[i % 2]] for i in range(20))]
    path = write_csv(tmp_path / "in.csv", rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with prepare("csv", path, "--id", "id") as file:
        assert by_row(file, "id")[0].tolist() == [str(2**60 + i).encode() for i in range(20)]
    assert recipe_of(tmp_path / "out.h5").columns[0].values == tuple(sorted(texts))


@pytest.mark.long
def test_thousands_of_columns(tmp_path, prepare):
    wide = [
        [*(f"column {i}" for i in range(3000)), "y"],
        *([*(f"t{i % 2}" for _ in range(3000)), "ab"[i % 2]] for i in range(4)),
    ]
    with prepare("csv", write_csv(tmp_path / "in.csv", wide), "--test-fraction", "0.5") as file:
        assert file["train/x"].shape == (2, 6000) and len(file.attrs["table"]) > 1 << 17
    assert len(recipe_of(tmp_path / "out.h5").features) == 6000


ROWS = "1,2,a\n" * 5 + "1,2,b\n" * 5


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            "a,b,y\n" + "".join(f"1,t{i},0\n1,u{i},1\n" for i in range(33)),
            ["--categories", "one-hot", "--columns", "a,b"],
            "column 'b' has 66 different texts",
        ),
        (
            "a,b,y\n1,t,0\n1,u,1\n",
            ["--one-hot", "1", "--categories", "one-hot", "--columns", "a,b"],
            "leave it out by --drop b, allow",
        ),
        ("a,b,y\n1,t,0\n", ["--one-hot", "0"], "1 or more, not 0"),
        ("a,b,y\n1,2024-01-31,0\n1,x,0\n", [], "line 2, column 'b': '2024-01-31' looks like a date or a time; derive"),
        ("a,b,y\n1,1/31/2024 10:30 PM,0\n", [], "date"),
        ("a,b,y\n1,1/2/2024,0\n1,3/4/2024,1\n", [], "in the formats '%d/%m/%Y' and '%m/%d/%Y'; say which by --dates"),
        ("a,b,y\n1,x,0\n", ["--categories", "hash:1"], "--categories is one-hot, target or hash:N"),
        ("a,b,y\n1,2024-01-31T10:30:00.5+01:00,0\n", [], "date"),
        ("a,b,y\n1,x,0\n1,10:30,0\n", [], "line 3, column 'b': '10:30' looks like a date or a time"),
        ("a,b,y\n1,1,0\n1,2,0\n1,2024-01-31,0\n", [], "'2024-01-31' is not a number; it looks like a date or a time"),
        ('a,b,y\n1,"1,234",0\n', [], "'1,234' looks like a number with thousands separators; write it"),
        (
            'a,b,y\n1,1,1\n1,2,1\n1,"1,234.5",0\n',
            [],
            "'1,234.5' is not a number; it looks like a number with thousands",
        ),
        ("a;b;y\n1;1.234.567,8;0\n", ["--delimiter", ";"], "thousands separators"),
        ("a;b;y\n1;3,14;0\n", ["--delimiter", ";", "--decimal", "."], "a number with a decimal comma"),
        (
            "a,b,y\n1,7,0\n1,x,0\n1,8,0\n",
            [],
            "line 3, column 'b': 'x' is not a number; correct it, read the column as texts",
        ),
        ("a,b,y\n1,7,0\n1,inf,1\n", [], "line 3, column 'b': inf is infinite"),
        ("a,b,y\n1,7,0\nNA,1e999,1\n", ["--missing", "mean"], "line 3, column 'b': inf is infinite"),
        ("a,b,y\n1,,0\n1,,1\n", ["--columns", "a,b"], "column 'b' has no value in any row; leave it out by --drop b"),
        ("a,a,y\n1,2,0\n", [], "has 2 columns named 'a'; give them different names, or leave them out by --drop"),
        (",a,y\n1,2,0\n", [], "column 0 has no name in the header; if it numbers the rows, add --drop 0 or"),
        ("red,1,2\nblue,2,3\n", [], "the first line holds numbers and texts; pass --header"),
        ("a,b,y\n1,2,0\n", ["--text", "y"], "column 'y' of --text is no feature"),
        ("a,b,y\n1,2,0\n", ["--id", "a,b"], "--id takes one column, not several"),
        ("2,a,b,c\n1,2,0,1\n", ["--header", "--label", "2"], "is the name of a column and the number of column 'b'"),
        ("a,b,y\n1,2,0\n", ["--label", ""], "no header with a column ''"),
        ("a,b,y\n1,2,0\n", ["--drop", "c"], "no header with a column 'c'"),
        ("a,b,y\n1,2,0\n", ["--drop", "y"], "must be different columns"),
        ("a,b,y\n1,2,0\n", ["--columns", "a,y"], "must be different columns"),
        ("a,b,y\n1,2,0\n", ["--drop", "a,b"], "must be different columns"),
        ("a,b,y\n" + "x" * 1001 + ",2,0\n", ["--id", "a"], "x... has 1001 bytes, more than 1000"),
        ("a,b,y\na\0,2,0\n", ["--id", "a"], "an id is 'a\\x00', which HDF5 cannot hold"),
        ("a,b,y\n1,2,0\n", ["--missing", "zero"], "invalid choice"),
        ("a,b,y\n" + "1e308,2,0\n" * 9 + ",2,1\n", ["--missing", "mean"], "the mean is infinite"),
        ('a,b,y\n1,"2,0\n', [], "line 2: a quote is opened, but not closed: unexpected end of data"),
        ("", [], "has 0 columns"),
        ("a,b\n", [], "has no rows"),
        ("1\n2\n", [], "has 1 columns (delimiter ',')"),
        ("1,2\n", ["--delimiter", ";;"], "the delimiter must be one character"),
        (
            "a,b\n\n1,2\n,2\n",
            ["--missing", "refuse"],
            "missing: 1 in column 'a' (the first in line 4); --missing mean or median fills",
        ),
        ("1,2\n1,2,3\n", [], "line 2 has 3 columns, but the first line has 2"),
        ("1,2\n1\n", [], "line 2 has 1 columns, but the first line has 2"),
        (
            "1,2\nnan,3\n",
            ["--missing", "refuse"],
            "values are missing: 1 in column 0 (the first in line 2); --missing mean",
        ),
        ("1,2\n1,\n", [], "all rows have the label 2"),
        ("1,2\n1,x\n", ["--regression"], "values to predict numbers"),
        ("a,b\n1,2\n", ["--label", "c"], "no header with a column 'c'; its first line is: a, b"),
        ("a,b\n1,2\n", ["--label", "b", "--no-header"], "no header with a column 'b'"),
        ("1,3\n", ["--label", "2"], "has 2 columns; there is no label column 2"),
        ("1,2\n1,2\n", [], "all rows have the label 2"),
        ("1,4,3\n", ["--group", "2"], "label, id, group and features must be different columns"),
        ("5,2,3\n5,,4\n", ["--group", "1"], "line 2, column 1: the group is missing (empty"),
        ("1,2\n2,3\n", ["--test-fraction", "0.1"], "test would have no rows"),
        ("1,2,a\n3,4," + "b" * 200_000 + "\n5,x,b\n", ["--no-header"], "line 2: field larger than field limit"),
        ("a" * 200_000 + ",2\n", ["--no-header"], "line 1: field larger than field limit"),
        ("1,2,a\0b\n3,4,c\n" * 20, ["--no-header"], "a label is 'a\\x00b', which HDF5 cannot hold"),
        ("1,2,a\n3,4,b\n5," + "y" * 5000 + ",b\n", ["--no-header"], "column 1: 'yyyy"),
        (",".join(f"column{i}" for i in range(5000)) + "\n", ["--label", "other"], "..."),
        (b"\xff\xfe1,2\n", [], "not a text file in UTF-8"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_tables(tmp_path, prepare, text, options, words):
    (tmp_path / "in.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in prepare("csv", tmp_path / "in.csv", *options)
    assert [each.name for each in tmp_path.iterdir()] == ["in.csv"]


def test_times_of_arrow(tmp_path, prepare):
    pa = pytest.importorskip("pyarrow")
    import datetime

    from pyarrow import parquet

    day, y = datetime.date(2024, 1, 31), ["a", "b"] * 5
    parquet.write_table(pa.table({"n": range(10), "day": [day] * 10, "l": [[1]] * 10, "y": y}), tmp_path / "in.parquet")
    with prepare("table", tmp_path / "in.parquet", "--drop", "l") as file:
        assert file["train/x"][0, 1:].tolist() == [2024, 1, 3, np.sin(w := 2 * np.pi * 31 / 365.25), np.cos(w), 0]
    (tmp_path / "out.h5").unlink()
    assert "column 'l' holds 'BIGINT[]', neither numbers" in prepare("table", tmp_path / "in.parquet", "--drop", "day")
    with prepare("csv", tmp_path / "in.parquet", "--drop", "l", "--id", "day") as file:
        assert file["train/id"][0] == b"2024-01-31"


def films(count):
    """A title that nearly always differs, a day as text, a studio of 70, a score that some rows lack."""
    rows = [
        (
            f"film {i}",
            f"{'JanFebMar'[i % 3 * 3 :][:3]} {1 + i % 28} {1998 + i % 2}",
            f"s{i % 70}",
            i / 8 if i % 9 else "",
        )
        for i in range(count)
    ]
    return [["Film title", "day", "studio", "score"], *(list(map(str, row)) for row in rows)]


def test_times_many_texts_titles_and_rows_without_a_label(tmp_path, prepare):
    path = write_csv(tmp_path / "in.csv", films(200))
    with prepare("csv", path, "--label", "score", "--categories", "hash:8") as file:
        x, rows = by_row(file)
    assert rows == [i for i in range(200) if i % 9]
    for says in (
        "14 features from 2 columns; hashed studio (8); times day; ",
        "left out Film title with 200 different texts (--text 'Film title' keeps it); 23 rows without a label left out",
    ):
        assert says in prepare.summary
    days = [datetime.date(1998 + i % 2, 1 + i % 3, 1 + i % 28) for i in range(200)]
    angles = [2 * math.pi * each.timetuple().tm_yday / 365.25 for each in days]
    want = np.zeros((200, 14))
    for i, (day, angle) in enumerate(zip(days, angles, strict=True)):
        since = (day - min(days)).days
        want[i, 8:] = day.year, day.month, day.isoweekday(), math.sin(angle), math.cos(angle), since
        want[i, zlib.crc32(f"s{i % 70}".encode()) % 8] = 1
    np.testing.assert_allclose(x, want[rows], atol=1e-12)
    recipe = recipe_of(tmp_path / "out.h5")
    assert recipe.features[7:11] == ["studio=#7", "day.year", "day.month", "day.weekday"]
    np.testing.assert_allclose(all_of(TableRows(path, recipe))[0], want, atol=1e-12)  # new rows need no label
    with prepare("csv", path, "--like", tmp_path / "out.h5", "--test-fraction", "1", out="like.h5") as file:
        np.testing.assert_allclose(by_row(file)[0], want[rows], atol=1e-12)
    with prepare(
        "csv", path, "--label", "score", "--dates", "drop", "--text", "studio", "--one-hot", "70", "--force"
    ) as file:
        assert file["train/x"].shape[1] == 70


def as_semicolons(path, text):
    path.with_suffix(".csv").write_text(text.replace(",", ";").replace(".", ","))


def as_gzip(path, text):
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(text.encode()))


def as_zstd(path, text):
    path.with_suffix(".csv").write_text(text)
    duckdb.execute(f"copy (from '{path}.csv') to '{path}.csv.zst' (header, compression zstd)")
    path.with_suffix(".csv").unlink()


def as_parts(path, text):
    head, *lines = text.splitlines(keepends=True)
    for name, part in (("2", lines[13:]), ("1", lines[:13])):
        path.with_name(f"{path.name}{name}.csv").write_text("".join([head, *part]))


def as_json(path, text):
    rows = list(csv.DictReader(text.splitlines()))
    rows = [row | {"age": int(row["age"]), "height": float(row["height"])} for row in rows]
    path.with_suffix(".json").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("form", [as_semicolons, as_gzip, as_zstd, as_parts, as_json])
def test_other_forms_of_a_table_come_out_the_same(tmp_path, prepare, form):
    text = table(tmp_path / "plain").read_text()
    with prepare("csv", tmp_path / "plain.csv", "--label", "kind", "--id", "name") as file:
        want = [file[f"train/{name}"][()].tolist() for name in ("x", "y", "row", "id")]
    (tmp_path / "out.h5").unlink()
    form(tmp_path / "other", text)
    with prepare("csv", tmp_path / "other*", "--label", "kind", "--id", "name") as file:
        assert [file[f"train/{name}"][()].tolist() for name in ("x", "y", "row", "id")] == want
    recipe = recipe_of(tmp_path / "out.h5")
    assert recipe.decimal == ("," if form is as_semicolons else ".")
    x, *_ = all_of(TableRows(tmp_path / "other*", recipe))
    np.testing.assert_array_equal(x, [[20 + i, i % 3 == 2, i % 3 == 0, i % 3 == 1, i / 4] for i in range(30)])


def test_json_that_mixes_numbers_and_texts(tmp_path, prepare):
    """A column has the kind of most of its values, in a list that is longer than the engine's sample, too."""
    rows = [{"title": "xyz"[i % 3], "size": i, "y": i / 3} for i in range(24_000)]
    for row, change in ((1, {"title": 1776}), (23_000, {"size": "NA"})):
        rows[row] |= change
    path = tmp_path / "in.json"
    path.write_text(json.dumps(rows))
    with prepare("csv", path) as file:
        assert recipe_of(file.filename).features == ["title=1776", "title=x", "title=y", "title=z", "size"]
        assert file["train/x"][:, 0].sum() + file["test/x"][:, 0].sum() == 1
    assert "1 missing number" in prepare.summary
    path.write_text(json.dumps([*rows, {"title": ["x"], "size": 1, "y": 1}]))
    assert "column 'title' holds 'JSON', neither numbers nor texts" in prepare("csv", path, "--force")


def test_a_name_with_signs_and_a_gzip_file_that_is_cut_off(tmp_path, prepare):
    as_gzip(tmp_path / "whole", table(tmp_path / "a[1]").read_text())
    (tmp_path / "a1.csv").write_text("x,y\n1,2\n")
    with prepare("csv", tmp_path / "a[1].csv", "--label", "kind", "--drop", "name") as file:
        assert file["train/x"].shape == (24, 5)
    (tmp_path / "cut.csv.gz").write_bytes((tmp_path / "whole.csv.gz").read_bytes()[:-20])
    assert "cut.csv.gz is cut off or damaged" in prepare("csv", tmp_path / "cut.csv.gz", "--label", "kind", "--force")


def test_times_of_one_form_in_another(tmp_path, prepare):
    """A recipe from texts reads a column of dates, and the other way round."""
    rows = [["day", "y"], *([f"2024-02-{1 + i:02}", "ab"[i % 2]] for i in range(20))]
    write_csv(tmp_path / "in.csv", rows)
    duckdb.execute(f"copy (select day::date as day, y from '{tmp_path}/in.csv') to '{tmp_path}/in.parquet'")
    found = {}
    for form in ("csv", "parquet"):
        with prepare("table", tmp_path / f"in.{form}", "--force"):
            recipe = recipe_of(tmp_path / "out.h5")
        found |= {(form, other): all_of(TableRows(tmp_path / f"in.{other}", recipe))[0] for other in ("csv", "parquet")}
    assert found["csv", "csv"][:, 0].tolist() == [2024] * 20 and not np.isnan(found["csv", "csv"]).any()
    for each in found.values():
        np.testing.assert_array_equal(each, found["csv", "csv"])


def test_where_a_row_stands_is_said_of_each_form(tmp_path, prepare):
    text = table(tmp_path / "plain", put((17, "age", "old"))).read_text().replace("n3,", '"n\n3",')
    for form, place in ((as_gzip, "line 19,"), (as_zstd, "line 19,"), (as_parts, "line 6 of ")):
        form(tmp_path / form.__name__, text)
        assert place in prepare("csv", tmp_path / f"{form.__name__}*", "--label", "kind", "--drop", "name")


def test_values_to_predict_with_decimal_commas(tmp_path, prepare):
    (tmp_path / "in.csv").write_text("a;y\n" + "".join(f"{i},5;{2 * i},25\n" for i in range(10)))
    with prepare("csv", tmp_path / "in.csv") as file:
        x, y = by_row(file)[0], by_row(file, "y")[0]
    assert x[:, 0].tolist() == [i + 0.5 for i in range(10)] and y.ravel().tolist() == [2 * i + 0.25 for i in range(10)]


def test_the_kind_of_a_column_is_that_of_most_values(tmp_path, prepare):
    change = put(*((row, "color", "1776") for row in (1, 2, 3)))
    with prepare("csv", table(tmp_path / "in", change), "--label", "kind", "--drop", "name") as file:
        assert by_row(file)[0][:3, 1].tolist() == [1, 1, 1]
    assert recipe_of(tmp_path / "out.h5").features[1] == "color=1776"


@pytest.mark.parametrize("kind", WRITE)
def test_a_column_whose_name_is_a_number_is_found_by_its_name(tmp_path, prepare, kind):
    """A year, beyond all numbers of columns; and a number that is its own column's."""
    rows = [["a", "1", "2021"], *([str(i), str(i + 5), str(i % 2)] for i in range(10))]
    for label, want in (
        ("2021", [["a", "1"], ["2021"]]),
        ("1", [["a", "2021"], ["1"]]),
        ("-1", [["a", "1"], ["2021"]]),
    ):
        more = ["--header"] if kind == "csv" and label != "2021" else []
        source = table(tmp_path / "in", rows=rows, kind=kind)
        with prepare("table", source, "--label", label, "--force", *more) as file:
            recipe = json.loads(file.attrs["table"])
            assert [[each["name"] for each in recipe["columns"]], recipe["label"]] == want


def test_a_constant_column_a_header_that_is_only_seen_by_a_line_of_numbers_and_tabs(tmp_path, prepare):
    (tmp_path / "in.tsv").write_text("a\t1999\tkind\n" + "".join(f"{i}\t7\t{'xy'[i % 2]}\n" for i in range(10)))
    with prepare("csv", tmp_path / "in.tsv") as file:
        assert file["train/x"].shape == (8, 2) and file["test/x"].shape == (2, 2)
    assert recipe_of(tmp_path / "out.h5").features == ["a", "1999"]
    (tmp_path / "in.csv").write_text(ROWS.replace("1,", "x,"))
    with prepare("csv", tmp_path / "in.csv", "--no-header", "--force"):
        recipe = recipe_of(tmp_path / "out.h5")
        assert recipe.features == ["0=x", "1"] and (recipe.label, recipe.header) == (("2",), False)


def test_a_recipe_of_an_older_version_has_the_same_columns(tmp_path, prepare):
    with prepare("csv", table(tmp_path / "in"), "--label", "kind", "--drop", "name") as file:
        columns = json.loads(file.attrs["table"])["columns"]
    assert [set(each) for each in columns] == [{"name", "number", "values", "fill"}] * 3
    path, new = write_csv(tmp_path / "in.csv", films(200)), tmp_path / "out.h5"
    with prepare("csv", path, "--label", "score", "--force") as file:
        written = json.loads(file.attrs["table"])["columns"]
    assert recipe_of(new).columns[0].hashed and {"part", "time"} <= set(written[1])
    said = prepare("csv", path, "--like", new, "--dates", "drop", out="like.h5")
    assert "--like already says what --dates would say" in said


def test_the_digest_is_that_of_the_rows(tmp_path, prepare):
    """Neither ids nor numbers of rows are in it: the same table, described otherwise, is the same data set."""
    digests = set()
    for options in (["--id", "name"], ["--drop", "name"]):
        with prepare("csv", table(tmp_path / "in"), *options, "--force") as file:
            digests.add(file.attrs["digest"].split()[0])
            assert ("id" in file["train"]) == ("--id" in options)
    assert len(digests) == 1


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_folder_of_tables_is_one_table(tmp_path, prepare, kind):
    """Its rows are those of its files in sorted order; files of other columns are refused by name."""
    folder, source = tmp_path / "in", tmp_path / f"whole.{kind}"
    folder.mkdir()
    (folder / "_SUCCESS").touch()  # as Spark leaves
    (folder / f".part.{kind}.crc").touch()
    options = "--header" if kind == "csv" else "--test-fraction=0.2"
    cuts = [(1, 4), (4, 20), (20, 31)]

    def write(path, begin, end, change=lambda rows: None):
        rows = [list(row) for row in [PEOPLE[0], *PEOPLE[begin:end]]]
        change(rows)
        if kind != "jsonl":
            return WRITE[kind](path, rows)
        lines = [
            json.dumps(dict(zip(rows[0], [row[0], int(row[1]), row[2], float(row[3]), row[4]], strict=True)))
            for row in rows[1:]
        ]
        path.write_text("\n".join(lines))
        return path

    write(source, 1, 31)
    for number, cut in enumerate(cuts):
        write(folder / f"part-{number}.{kind}", *cut)
    with prepare("table", source, options, out="one.h5") as one, prepare("table", folder, options) as many:
        assert one.attrs["digest"].split()[0] == many.attrs["digest"].split()[0]
        assert one["train/row"][:].tolist() == many["train/row"][:].tolist()
    if kind != "jsonl":
        write(folder / f"part-3.{kind}", 1, 4, lambda rows: rows[0].__setitem__(1, "years"))
        said = prepare("table", folder, options, "--force")
        assert f"part-3.{kind}" in said and "all files must have the same columns" in said
    (folder / "other.tsv").touch()
    kinds = " and ".join(sorted((f".{kind}", ".tsv")))
    assert f"the folder {folder} has {kinds} files; give files of one kind" in prepare("table", folder, "--force")
    for path in folder.iterdir():
        path.unlink()
    assert f"the folder {folder} has no .parquet, .csv, .tsv or .json files" in prepare("table", folder, "--force")


def test_parquet_files_of_other_types_are_refused(tmp_path, prepare):
    """DuckDB would cast them to the types of the first file: 2.5 became 3."""
    folder = tmp_path / "in"
    folder.mkdir()
    with duckdb.connect() as db:
        for name, value in (("a", "1"), ("b", "2.5::double")):
            db.execute(f"copy (select {value} as size, 'x' as kind) to '{folder}/{name}.parquet'")
    problem = f"the column 'size' is DOUBLE in {folder}/b.parquet, but INTEGER in {folder}/a.parquet"
    assert problem in prepare("table", folder)
    (folder / "b.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-9])
    assert "b.parquet" in prepare("table", folder)
