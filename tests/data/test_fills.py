"""Missing numbers of a table become what the rows that train say, and not those that validation holds out."""

import json

import h5py
import numpy as np
import pytest
from batches import PLACEMENTS
from tables import write_csv

from hpcdl.data import fills, hdf5, open_data, row_cache
from hpcdl.data.fills import with_model_fills
from hpcdl.data.format import read_info
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_table import prepare_table
from hpcdl.errors import UsageError

VALIDATION = {"validation": 0.3, "seed": 1}
ROWS = 60


def prepared(folder, x, way, name="a", **options):
    """A data file of a table: the row's number, a color, and two columns of numbers, x (rows, 2), NaN where missing."""
    cells = [["" if np.isnan(each) else repr(float(each)).removesuffix(".0") for each in row] for row in x]
    rows = [[k, "rb"[k % 2], *row, "xyz"[k % 3]] for k, row in enumerate(cells)]
    path = write_csv(folder / f"{name}.csv", [["number", "color", "a", "b", "kind"], *rows])
    how = {"missing": way} if "like" not in options else {}
    prepare_table(path, Output(folder / f"{name}.h5", force=True), **how, **options)
    return folder / f"{name}.h5"


def made(folder, way, whole=False):
    """Such a file, whose held-out rows are far from the others; x; and the numbers of the rows that train.
    whole: its rows are bytes, and the median of those that train is not whole."""
    train, held, test = (part.astype(int) for part in numbers_of(prepared(folder, np.zeros((ROWS, 2)), way)))
    x, rising = np.zeros((ROWS, 2)), np.arange(len(train))
    rising[-len(train) // 4 :] += 40  # so that the median is not the mean
    x[train] = np.column_stack([rising, 100 + rising[::-1]])
    x[held] = 255 if whole else 10_000.25
    for column, step in ((0, 1), (1, -1)):  # known are an even number of those that train, and an odd one in all
        x[train[::step][: 2 - len(train) % 2], column] = np.nan
        x[[*held[::step][: 1 + len(held) % 2], test[column]], column] = np.nan
    return prepared(folder, x, way), x, train


def numbers_of(path, **options):
    """The numbers of the rows that train, that are held out, and that test."""
    data = open_data(path, dtype="float64", **VALIDATION | options)
    found = [split.rows(0, split.examples)[0][:, 0] for split in (data.train, data.validation, data.test)]
    data.close()
    return found


def filled(x, train, way):
    """By numpy: all rows as features, and the fills of the columns."""
    fill = getattr(np, f"nan{way}")(x[train], axis=0)
    numbers = np.arange(len(x))
    return np.column_stack([numbers, numbers % 2, 1 - numbers % 2, np.where(np.isnan(x), fill, x)]), fill


def fills_in(recipe):
    return [column["fill"] for column in recipe["columns"][2:]]


@pytest.fixture
def table(world, mpi_tmp_path):
    """A function as `made`, one file for all ranks."""

    def make(*arguments, **options):
        made_here = made(mpi_tmp_path, *arguments, **options) if world.rank == 0 else None
        return world.bcast(made_here)

    return make


@pytest.mark.parametrize("way", ["mean", "median"])
@pytest.mark.parametrize("place", PLACEMENTS)
def test_by_the_rows_that_train(table, world, place, way, monkeypatch):
    monkeypatch.setattr(fills, "MEDIAN_BYTES", 1)
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 300)  # several slabs and blocks
    path, x, train = table(way)
    want, fill = filled(x, train, way)
    assert (fill < 200).all() and (np.array(fills_in(json.loads(attributes(path)["table"]))) > fill + 1).all()
    data = open_data(path, comm=world, placement=place, dtype="float64", **VALIDATION)
    np.testing.assert_allclose(fills_in(data.schema.recipe), fill, rtol=1e-13)
    for split in (data.train, data.validation, data.test):
        found, _ = split.rows(0, split.examples)
        np.testing.assert_allclose(found, want[found[:, 0].astype(int)], rtol=1e-13)
    for batch in data.batches(0, 16, (world.rank, world.size)):
        np.testing.assert_allclose(batch.x, want[batch.x[:, 0].astype(int)], rtol=1e-13)
    data.close()
    data = open_data(path, comm=world, placement=place, dtype="float64", standardize=True, **VALIDATION)
    text = np.isin(range(want.shape[1]), (1, 2))  # features of texts stay 0 and 1
    mean, deviation = want[train].mean(axis=0), want[train].std(axis=0)
    np.testing.assert_allclose(data.statistics["mean"], np.where(text, 0, mean), rtol=1e-12)
    np.testing.assert_allclose(data.statistics["deviation"], np.where(text, 1, deviation), rtol=1e-12)
    data.close()


@pytest.mark.parametrize("place", PLACEMENTS)
def test_bytes_whose_fills_are_not_whole(table, world, place):
    path, x, train = table("median", whole=True)
    want, fill = filled(x, train, "median")
    assert read_info(path).kinds["train"] == np.uint8 and not (fill == np.rint(fill)).any()
    data = open_data(path, comm=world, placement=place, **VALIDATION)
    for split in (data.train, data.validation, data.test):
        found, _ = split.rows(0, split.examples)
        np.testing.assert_array_equal(found, want[found[:, 0].astype(int)])
    data.close()


def attributes(path):
    with h5py.File(path, "r", locking=False) as file:
        return dict(file.attrs)


def stays(path, **options):
    """Rows and recipe are those of the file, to the bit."""
    data = open_data(path, dtype="float64", **options)
    with h5py.File(path, locking=False) as file:
        x = file["train/x"][()]
        found, _ = data.train.rows(0, data.train.examples)
        np.testing.assert_array_equal(found, x[np.isin(x[:, 0], found[:, 0])])
        assert data.schema.recipe == json.loads(file.attrs["table"])
    return data.digest


def test_what_stays_as_the_file_has_it(tmp_path, alone):
    """Without validation; in a file without marks, as of an older version; of --like. And the digest."""
    path, x, _ = made(tmp_path, "mean")
    digest, one = stays(path), open_data(path, **VALIDATION)
    assert one.digest == digest == attributes(path)["digest"].split()[0]
    assert one.schema.recipe != json.loads(attributes(path)["table"])
    stays(prepared(tmp_path, x[::-1], None, "b", like=path), **VALIDATION)
    with h5py.File(path, "a") as file:
        del file["test/filled"]
    assert stays(path, **VALIDATION) == digest


def test_rows_that_a_job_keeps(tmp_path, alone):
    """Are those of the file for one training, and filled in anew for another."""
    path, x, train = made(tmp_path, "median")
    want, _ = filled(x, train, "median")
    before = open_data(path, keep=True, dtype="float64")
    others = [open_data(path, dtype="float64", keep=True, **VALIDATION) for _ in range(2)]
    stays(path)
    for data in others:
        found, _ = data.train.rows(0, data.train.examples)
        np.testing.assert_array_equal(found, want[found[:, 0].astype(int)])
    shares = [np.shares_memory(others[1].train.source.x, each.train.source.x) for each in (before, others[0])]
    assert shares == [False, True]
    row_cache.clear()


def test_by_the_recipe_of_a_model(tmp_path, alone):
    path, *_ = made(tmp_path, "mean")
    info, model = read_info(path), open_data(path, **VALIDATION).schema.recipe
    assert with_model_fills(info, model).schema.recipe == model and with_model_fills(info, model).fills
    for recipe in (None, info.schema.recipe, model | {"columns": model["columns"][1:]}):
        assert with_model_fills(info, recipe) is info
    refusing = [column | {"fill": None} for column in model["columns"]]
    assert with_model_fills(info, model | {"columns": refusing, "missing": "refuse"}) is info


def test_a_column_of_which_nothing_is_left_and_marks_that_are_none(tmp_path, alone):
    path, x, train = made(tmp_path, "mean")
    x[train, 0] = np.nan
    prepared(tmp_path, x, "mean")
    said = "column a: the mean of the rows that --validation leaves is unknown: none of them has a value; hold out"
    with pytest.raises(UsageError, match=said):
        open_data(path, **VALIDATION)
    stays(path)
    with h5py.File(path, "a") as file:
        del file["train/filled"]
        file["train/filled"] = np.zeros(3)
    said = r"train/filled is float64 of shape \(3,\); it must be uint8 of shape \(48, 1\)"
    with pytest.raises(UsageError, match=said):
        open_data(path, **VALIDATION)
