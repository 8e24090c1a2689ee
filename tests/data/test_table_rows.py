"""New rows of a table by a recipe: found by name, block by block, from csv, Parquet and Arrow alike."""

import csv
import dataclasses
import math
import sys

import numpy as np
import pytest
from tables import WRITE, all_of, reasons_of, write_csv

from hpcdl.data.formats import table_source
from hpcdl.data.formats.recipe import Column, Recipe
from hpcdl.data.formats.table_rows import TableRows
from hpcdl.errors import UsageError

RECIPE = Recipe(
    (Column("age", 0, None, 40.0), Column("color", 1, ("blue", "red")), Column("size", 3, None, 0.5)),
    label=("kind",),
    id="name",
    missing="mean",
)
TABLE = [
    ["size", "other", "name", "color", "age"],
    ["1.5", "x", "9007199254740993", "red", "7"],
    ["", "y", "b", "green", "8"],
    ["-2", "z,z", 'c "c"\nc', "NA", " 9 "],
    ["3e2", "", "é", "blue", "?"],
]
X = [[7, 0, 1, 1.5], [8, 0, 0, 0.5], [9, 0, 0, -2], [40, 1, 0, 300]]
IDS = ["9007199254740993", "b", 'c "c"\nc', "é"]


@pytest.mark.parametrize("most", [1, 1000])
@pytest.mark.parametrize("kind", WRITE)
def test_rows_of_each_kind(tmp_path, kind, most):
    path = WRITE[kind](tmp_path / f"in.{kind}", TABLE)
    rows = TableRows(path, RECIPE)
    rows.most = most
    x, numbers, ids, *counts = all_of(rows)
    np.testing.assert_array_equal(x, X)
    assert x.dtype == np.float64 and numbers == [0, 1, 2, 3] and counts == [0, 3, 1]
    assert rows.ids and ids == IDS


@pytest.mark.parametrize("kind", WRITE)
def test_rows_with_missing_values_have_a_reason_in_the_place_of_an_answer(tmp_path, kind):
    path = WRITE[kind](tmp_path / f"in.{kind}", TABLE)
    columns = tuple(dataclasses.replace(column, fill=None) for column in RECIPE.columns)
    lost = {1: "size", 2: "color", 3: "age"}
    for missing in ("drop", "refuse"):
        rows = TableRows(path, dataclasses.replace(RECIPE, columns=columns, missing=missing))
        x, numbers, ids, *counts = all_of(rows)
        np.testing.assert_array_equal(x, [X[0], *np.zeros((3, 4))])
        assert numbers == [0, 1, 2, 3] and ids == IDS and counts == [3, 0, 0]
        assert reasons_of(rows) == {row: f"column '{name}': a value is missing" for row, name in lost.items()}


def test_rows_that_a_recipe_cannot_take(tmp_path):
    lines = [
        "age,size,color",
        "1,x,red",
        "1,1_0,blue",
        "1,2,red",
        "",
        "1,\u0663,red",
        "2,inf,red",
        "y,1e999,red",
        ",,",
        "3,z,",
    ]
    (tmp_path / "in.csv").write_text("\n".join(lines), encoding="utf-8")
    rows = TableRows(tmp_path / "in.csv", RECIPE)
    x, *_, refused, filled, unseen = all_of(rows)
    words = {0: "size': 'x'", 1: "size': '1_0'", 3: "size': '\u0663'", 5: "age': 'y'", 7: "size': 'z'"}
    reasons = {row: f"column '{each} is not a number" for row, each in words.items()}
    assert reasons_of(rows) == reasons | {4: "column 'size': inf is infinite"}
    assert x[2].tolist() == [1, 0, 1, 2] and x[6].tolist() == [40, 0, 0, 0.5] and not x[[0, 1, 3, 4, 5, 7]].any()
    assert (refused, filled, unseen) == (6, 3, 0)


@pytest.mark.parametrize("kind", WRITE)
def test_blocks_can_be_called_in_any_order_or_not_at_all(tmp_path, kind, monkeypatch):
    table = [["age", "color", "size", "name"], *([str(i), ("red", "blue")[i % 2], "1", f"r{i}"] for i in range(20))]
    rows = TableRows(WRITE[kind](tmp_path / f"in.{kind}", table), RECIPE)
    rows.most = 2
    calls = list(rows.blocks())
    for call in (*calls[::-2], *calls[::3]):
        block = call()
        np.testing.assert_array_equal(block.x[:, 0], block.numbers)
        assert block.ids == [f"r{i}" for i in block.numbers] and 1 <= len(block.x) <= 2
    parsed = []
    read = table_source.Cells.__init__
    monkeypatch.setattr(table_source.Cells, "__init__", lambda cells, *about: parsed.append(1) or read(cells, *about))
    assert len([call() for call in list(rows.blocks())[1::4]]) == len(parsed) > 1


def test_blank_lines_line_ends_and_a_byte_order_mark(tmp_path):
    text = "\ufeffage,size,color\r\n\r\n1,2,red\r\n \r\n3,4,blue"
    (tmp_path / "in.csv").write_text(text, newline="", encoding="utf-8")
    rows = TableRows(tmp_path / "in.csv", RECIPE)
    x, numbers, ids, *_ = all_of(rows)
    assert x.tolist() == [[1, 0, 1, 2], [3, 1, 0, 4]] and numbers == [0, 1] and ids is None and not rows.ids


def test_without_a_header_columns_go_by_number(tmp_path):
    recipe = Recipe((Column("0", 0), Column("2", 2, ("a", "b"))), ("3",), "1", header=False, delimiter="\t")
    path = write_csv(tmp_path / "in.csv", [["1", "i", "b"], ["2", "", "a"]], delimiter="\t")
    x, numbers, ids, *_ = all_of(TableRows(path, recipe))
    assert x.tolist() == [[1, 0, 1], [2, 1, 0]] and numbers == [0, 1] and ids == ["i", ""]
    write_csv(path, [["1", "i"]], delimiter="\t")
    with pytest.raises(UsageError, match="has 2 columns and no column 2"):
        TableRows(path, recipe)


@pytest.mark.parametrize("length", [1, 5000])
def test_numbers_are_what_numpy_reads_and_what_python_reads(tmp_path, length):
    values = np.random.default_rng(0).normal(size=(length, 3)) * 10.0 ** np.arange(-200, 250, 150)
    recipe = Recipe(tuple(Column(name, at) for at, name in enumerate("abc")))
    plain = write_csv(tmp_path / "a.csv", [list("abc"), *values.tolist()])
    quoted = write_csv(tmp_path / "b.csv", [list("abc"), *values.tolist()], quoting=csv.QUOTE_ALL)
    for path in (plain, quoted):
        np.testing.assert_array_equal(all_of(TableRows(path, recipe))[0], values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no column 'age', which the training data had; its columns are: $"),
        ("size,color\n1,red\n", "has no column 'age'"),
        ("age,age,size,color\n1,1,1,red\n", "has 2 columns named 'age'"),
        ("age,size,color\n1,2,red\n1,2,red,4\n", "line 3 has 4 columns, but the first line has 3"),
        ('age,size,color\n1,2,"' + "x" * 200_000, "line 2: field larger than field limit"),
        ('age,size,color\n"\n1",2,red\n1,"2\n3"\n', "line 4 has 2 columns"),
        (None, "cannot be read: No such file"),
        (b"PAR1 and so on", "cannot be read"),
        (b"ARROW1 and so on", "cannot be read"),
        (b"FEA1 and so on", "write it as version 2"),
    ],
)
def test_bad_tables_are_one_line(tmp_path, text, words):
    path = tmp_path / "in.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=words) as error:
        all_of(TableRows(path, RECIPE))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_arrow_types(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import datetime
    import decimal

    from pyarrow import parquet

    columns = {
        "int": pa.array([1, None], pa.int8()),
        "float": pa.array([0.5, math.nan], pa.float32()),
        "bool": pa.array([True, None]),
        "decimal": pa.array([decimal.Decimal("1.25"), None]),
        "texts": pa.array(["7", None]),
        "words": pa.array(["a", "b"]).dictionary_encode(),
        "null": pa.nulls(2),
        "id": pa.array([2**60 + 1, 2], pa.int64()),
        "day": pa.array([datetime.date(2024, 1, 31), None]),
        "list": pa.array([[1], None]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    numbers = tuple(Column(name, 0, None, 9.0) for name in ("int", "float", "bool", "decimal", "texts", "null"))
    recipe = Recipe((*numbers, Column("words", 0, ("b",))), id="id", missing="mean")
    x, _, ids, *counts = all_of(TableRows(tmp_path / "in.parquet", recipe))
    assert x.tolist() == [[1, 0.5, 1, 1.25, 7, 9, 0], [9, 9, 9, 9, 9, 9, 1]]
    assert ids == [str(2**60 + 1), "2"] and counts == [0, 7, 1]
    for name, words in (("day", "holds dates or times; derive numbers"), ("list", "neither numbers nor texts")):
        with pytest.raises(UsageError, match=f"column '{name}' {words}|column '{name}' .*{words}"):
            all_of(TableRows(tmp_path / "in.parquet", Recipe((Column(name, 0),))))


def test_arrow_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "in.feather").write_bytes(b"ARROW1")
    with pytest.raises(UsageError, match=r"pip install 'hpcdl\[arrow\]'"):
        TableRows(tmp_path / "in.feather", RECIPE)
