"""What was done with a table: kept as JSON and read back, and each way in which it is none."""

import json

import h5py
import numpy as np
import pytest

from hpcdl.data.formats.recipe import Column, Recipe, recipe_of
from hpcdl.errors import UsageError

AGE, COLOR = Column("age", 0, None, 1.5), Column("color", 2, ("blue", "red"))
RECIPE = Recipe((AGE, COLOR), ("kind",), "name", "mean", True, ";")


def test_it_comes_back_from_json():
    assert Recipe.read(json.loads(json.dumps(RECIPE.describe())), "there") == RECIPE
    plain = Recipe((Column("0", 0), Column("1", 1)), header=False)
    assert Recipe.read(json.loads(json.dumps(plain.describe())), "there") == plain


WHOLE = RECIPE.describe()
FIELDS = [{"columns": []}, {"columns": 3}, {"columns": [3]}, {"columns": WHOLE["columns"] * 2}, {"missing": "zero"}]
FIELDS += [{"header": 1}, {"delimiter": ""}, {"label": "kind"}, {"label": [3]}, {"id": 3}, {"id": "age"}]
COLUMN = [{"number": -1}, {"number": 0.0}, {"number": True}, {"name": None}, {"fill": float("nan")}, {"fill": "1"}]
COLUMN += [{"fill": 10**400}, {"values": "ab"}, {"values": ["a"]}, {"fill": None}]
COLUMN += [{"fill": None, "values": values} for values in (["a", "a"], [])]
WRONG = [[], None, "text", {name: value for name, value in WHOLE.items() if name != "columns"}]
WRONG += [WHOLE | change for change in FIELDS]
WRONG += [WHOLE | {"columns": [WHOLE["columns"][0] | change]} for change in COLUMN]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_recipe(wrong):
    with pytest.raises(UsageError, match=r"^file.h5: its table is no recipe of a table: [^\n]+$"):
        Recipe.read(wrong, "file.h5: its table")


def test_a_data_file_keeps_it(tmp_path):
    path = tmp_path / "it.h5"
    with h5py.File(path, "w") as file:
        file["train/x"], file["train/y"] = np.zeros((2, 3)), np.zeros(2)
    assert recipe_of(path) is None
    for said, words in [
        (json.dumps(RECIPE.describe()), None),
        ("{", "in JSON"),
        ("[" * 100_000, "in JSON"),
        (3, "must be a text"),
        ("[]", "no recipe"),
        (json.dumps(Recipe((AGE,)).describe()), "is a recipe of 1 features, but the rows .* have shape \\(3,\\)"),
    ]:
        with h5py.File(path, "a") as file:
            file.attrs["table"] = said
        if words is None:
            assert recipe_of(path) == RECIPE
        else:
            with pytest.raises(UsageError, match=words):
                recipe_of(path)
    with h5py.File(path, "a") as file:  # longer than what HDF5 keeps beside a file's head
        long = Recipe((AGE, Column("c", 1, tuple(str(number) * 40 for number in range(5000)))))
        del file["train"]
        file["rows/x"] = np.zeros((1, 5001))
        file.attrs["table"] = json.dumps(long.describe())
    assert recipe_of(path) == long
