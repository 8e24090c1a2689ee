"""What rows mean goes through a file and a checkpoint as it is; classes are matched by name."""

import json

import numpy as np
import pytest

from hpcdl.data import open_data
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.schema import Schema
from hpcdl.errors import UsageError

COLUMN = {"name": "age", "number": 0, "values": None, "fill": 3.5}


@pytest.mark.parametrize(
    "schema",
    [
        Schema(),
        Schema(0.25, ("cat", "dog")),
        Schema(vocabulary=Vocabulary("bytes")),
        Schema(vocabulary=Vocabulary(["a", "é"]), recipe={"columns": [COLUMN]}),
    ],
)
def test_through_json(schema):
    again = Schema.read(json.loads(json.dumps(schema.describe())), "x")
    assert again.describe() == schema.describe()


@pytest.mark.parametrize(
    "found", [None, [], {}, {"scale": 1}, {"scale": 0}, {"labels": [1]}, {"recipe": 3}, {"scale": "1"}]
)
def test_anything_else_is_refused(found):
    whole = Schema().describe() | found if isinstance(found, dict) and found not in ({}, {"scale": 1}) else found
    with pytest.raises(UsageError, match=r"a\.h5 should have valid"):
        Schema.read(whole, "a.h5")


def test_names():
    assert Schema().names(3) == ["0", "1", "2"] and Schema(labels=("a", "b")).names(2) == ["a", "b"]
    assert Schema(vocabulary=Vocabulary(["x", "y"])).names(2) == ["x", "y"]


def test_classes_are_matched_by_name():
    mine = Schema(labels=("ant", "bee", "cat"))
    assert mine.class_numbers(mine, 3, 3, "x") is None
    assert mine.class_numbers(Schema(labels=("cat", "ant")), 3, 2, "x").tolist() == [2, 0]
    with pytest.raises(UsageError, match="x has the class 'zebra', which the model does not know; it knows 'ant'"):
        mine.class_numbers(Schema(labels=("ant", "bee", "zebra")), 3, 3, "x")
    assert Schema().class_numbers(Schema(labels=("3", "5")), 10, 2, "x").tolist() == [3, 5]
    assert Schema().class_numbers(Schema(), 10, 4, "x") is None
    with pytest.raises(UsageError, match="and 3 more"):
        mine.class_numbers(Schema(), 3, 8, "x")


def test_other_words_and_other_columns_are_refused():
    text, other = Schema(vocabulary=Vocabulary(["a", "b"])), Schema(vocabulary=Vocabulary(["a", "c"]))
    text.refuse_other_columns(text, "x")
    with pytest.raises(UsageError, match="x has a vocabulary of 2 tokens, but the model was trained with another"):
        text.refuse_other_columns(other, "x")
    with pytest.raises(UsageError, match="x has no vocabulary"):
        text.refuse_other_columns(Schema(), "x")
    table = Schema(recipe={"columns": [COLUMN]})
    table.refuse_other_columns(table, "x")
    table.refuse_other_columns(Schema(), "x")  # which says nothing of columns
    said = r"'age' \(a number, filled with 2\) instead of 'age' \(a number, filled with 3.5\)"
    with pytest.raises(UsageError, match=said):
        table.refuse_other_columns(Schema(recipe={"columns": [COLUMN | {"fill": 2.0}]}), "x")


def test_a_file_says_it(tmp_path, write):
    table = json.dumps({"columns": [COLUMN], "label": ["y"]})
    rows = np.ones((4, 2), "f4"), np.arange(4) % 2
    path = write(tmp_path / "a.h5", *rows, *rows, labels=["cat", "dog"], scale=0.5, table=table)
    data = open_data(str(path))
    assert data.schema.labels == ("cat", "dog") and data.schema.scale == 0.5 and data.schema.outputs == ["y"]
    assert data.schema.recipe["columns"] == [COLUMN] and data.source == str(path)
    data.close()
    assert open_data("digits").source == "digits"
