"""Rows held out by owner: all rows of an owner or none, about the fraction, the same under every placement."""

import h5py
import numpy as np
import pytest
from batches import PLACEMENTS

from hpcdl.data import from_arrays, open_data
from hpcdl.data.data_options import DataOptions, held_out_owners
from hpcdl.errors import UsageError

OWNERS = np.repeat(np.arange(40) * 7 - 20, np.arange(40) % 4 + 1)[np.random.default_rng(5).permutation(100)]


@pytest.fixture
def path(world, mpi_tmp_path, images, write):
    if world.rank == 0:
        write(mpi_tmp_path / "owned.h5", *images(), classes=4)
        with h5py.File(mpi_tmp_path / "owned.h5", "a") as file:
            file["train/document"], file["train/other"] = OWNERS, np.zeros(100, "u1")
    world.Barrier()
    return mpi_tmp_path / "owned.h5"


@pytest.mark.parametrize("place", PLACEMENTS)
def test_whole_owners_under_every_placement(world, path, images, numbers, place):
    how = {"comm": world, "validation": 0.2, "validation_by": "document"}
    plain = open_data(path, placement=place, seed=3, **how)
    data = open_data(path, placement=place, standardize=True, seed=3, **how)
    held = numbers(plain.validation.rows(0, plain.validation.examples)[0])
    rest = numbers(plain.train.rows(0, plain.examples)[0])
    assert len(held) == 20 and sorted([*held, *rest]) == list(range(100))  # owners have 1 to 4 rows: no need for 21
    assert not {*OWNERS[held]} & {*OWNERS[rest]} and len({*OWNERS[held]}) > 4
    np.testing.assert_array_equal(held, held_out_owners(OWNERS, "document", options(0.2, 3)))
    x = images()[0].reshape(100, -1)[np.sort(rest)].astype("f8")
    np.testing.assert_allclose(data.statistics["mean"], x.mean(axis=0))  # the rows held out do not count
    seen = np.concatenate([batch.index.copy() for batch in data.batches(0, 16, (world.rank, world.size))])
    assert sorted(np.concatenate(world.allgather(seen))) == list(range(80))
    for each in (plain, data):
        each.close()


def options(fraction, seed=0):
    return DataOptions("iid", np.dtype("f4"), seed, fraction, "", False)


def test_fractions_and_seeds():
    for fraction in (0.01, 0.05, 0.3, 0.9):
        drawn = {tuple(held_out_owners(OWNERS, "document", options(fraction, seed))) for seed in range(5)}
        assert len(drawn) > 3 and all(abs(len(rows) - 100 * fraction) <= 1 for rows in drawn)
    assert len(held_out_owners(np.repeat([5, 6, 7], [40, 20, 40]), "a", options(0.05))) == 20  # the smallest owner


@pytest.mark.parametrize("counts", [[100], [99, 1], [98, 1, 1], [45, 55]])
def test_owners_that_are_too_large(counts):
    owners, fraction = np.repeat(np.arange(len(counts)), counts), 0.9 if counts[0] == 45 else 0.3
    message = f"has {max(counts)} of the 100 training rows, so whole owners cannot make up {fraction} of the rows"
    with pytest.raises(UsageError, match=f"^--validation-by a: the owner {np.argmax(counts)} {message}"):
        held_out_owners(owners, "a", options(fraction))


def test_refusals(path, images):
    with pytest.raises(UsageError, match=r"in train/group; columns with one: document, other$"):
        open_data(path, validation=0.1, validation_by="group")
    with pytest.raises(UsageError, match=r"^--validation-by other: the owner 0 has 100 of the 100"):
        open_data(path, validation=0.1, validation_by="other")
    with pytest.raises(TypeError):
        from_arrays(*images()[:2], validation_by="document")  # arrays have no columns
