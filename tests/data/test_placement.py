"""Placements over several ranks: one copy per node, own rows only, and errors that all ranks share."""

import logging

import h5py
import numpy as np
import pytest
from batches import PLACEMENTS

from hpcdl.data import open_data, opening
from hpcdl.errors import UsageError


def epoch(data, world, **arguments):
    """An epoch of this rank, and of all: for each step the row numbers that all ranks had."""
    mine = [
        (b.x.copy(), b.y.copy(), b.index.copy(), b.total)
        for b in data.batches(share=(world.rank, world.size), **arguments)
    ]
    steps = world.allgather([index for _, _, index, _ in mine])
    return mine, [np.concatenate(parts) for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize("place", PLACEMENTS)
@pytest.mark.parametrize("options", [{}, {"validation": 0.2}, {"augment": "shift:1,flip"}])
def test_an_epoch_over_all_ranks(shared_file, world, images, numbers, place, options):
    data = open_data(shared_file, comm=world, placement=place, **options)
    for number in range(2):
        mine, whole = epoch(data, world, epoch=number, batch_size=9)
        np.testing.assert_array_equal(np.sort(np.concatenate(whole)), np.arange(data.examples))
        for (x, y, index, total), together in zip(mine, whole, strict=True):
            assert total == len(together)
            want_x, want_y = data.train.take(index)
            np.testing.assert_array_equal(y, want_y)
            if "augment" not in options:
                np.testing.assert_array_equal(x, want_x)
        if place == "shared":  # what one rank alone would have seen
            alone = open_data(shared_file, **options)
            one = [batch.index for batch in alone.batches(number, 9)]
            assert all(np.array_equal(a, b) for a, b in zip(one, whole, strict=True))
    np.testing.assert_array_equal(numbers(data.test.rows(0, 20)[0]), np.arange(20))
    if data.validation:
        held = numbers(data.validation.rows(0, 20)[0])
        trained = numbers(data.train.rows(0, 80)[0])
        np.testing.assert_array_equal(np.sort([*held, *trained]), np.arange(100))
    data.close()


@pytest.mark.parametrize("spec", ["iid", "by-label", "shards:2", "dirichlet:0.3"])
@pytest.mark.parametrize("place", ["shared", "partitioned"])
def test_partitions_over_all_ranks(shared_file, world, numbers, place, spec):
    data = open_data(shared_file, comm=world, placement=place, partition=spec)
    mine, whole = epoch(data, world, epoch=0, batch_size=16)
    np.testing.assert_array_equal(np.sort(np.concatenate(whole)), np.arange(100))
    for (x, _, index, total), together in zip(mine, whole, strict=True):
        np.testing.assert_array_equal(numbers(x), index)
        assert total == len(together)
    mine_again, _ = epoch(data, world, epoch=1, batch_size=16)
    rows, again = (set(np.concatenate([index for _, _, index, _ in part])) for part in (mine, mine_again))
    local = place == "partitioned" or spec != "iid"
    assert (rows == again) == (local or world.size == 1)
    if place == "partitioned":
        assert len(data._reader.rows) == len(rows)  # no other row is in memory
        with pytest.raises(UsageError, match="holds the rows of share"):
            data.batches(0, 16, share=(0, world.size + 1))
    data.close()


@pytest.mark.parametrize("spec", ["iid", "by-label", "dirichlet:0.3"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_rank_may_hold_the_parts_of_several(shared_file, world, spec, workers):
    """Those who serve others hold what these would hold: part i lies with rank i mod size."""
    numbers = list(range(world.rank, workers, world.size))
    options = {"placement": "partitioned", "partition": spec, "validation": 0.2}
    data = open_data(shared_file, comm=world, parts=(numbers, workers), **options)
    shared = open_data(shared_file, partition=spec, validation=0.2) if spec != "iid" else None
    seen = []
    for number in numbers:
        for batch in data.batches(1, 16, (number, workers)):
            np.testing.assert_array_equal(batch.x, data.train.take(batch.index)[0])
            seen.append(batch.index.copy())
        if shared is not None:
            pairs = zip(shared.batches(1, 16, (number, workers)), data.batches(1, 16, (number, workers)), strict=True)
            assert all(np.array_equal(one.index, two.index) and np.array_equal(one.x, two.x) for one, two in pairs)
    rows = np.concatenate([np.empty(0, int), *seen])
    assert len(data._reader.rows) == len(rows)  # no other row is in memory
    np.testing.assert_array_equal(np.sort(np.concatenate(world.allgather(rows))), np.arange(80))
    with pytest.raises(UsageError, match="holds the rows of share"):
        data.cursor(16, (workers, workers + 1))
    data.close()


@pytest.mark.parametrize("place", ["shared", "partitioned"])
def test_a_column_says_whose_rows_are_whose(world, write, images, mpi_tmp_path, place):
    path, owners = mpi_tmp_path / "owned.h5", np.arange(100) ** 2 % 11
    if world.rank == 0:
        write(path, *images(), classes=4)
        with h5py.File(path, "a") as made:
            made["train/writer"], made["train/half"] = owners, owners[:50]
    world.Barrier()
    data = open_data(path, comm=world, placement=place, partition="column:writer", validation=0.1)
    kept = data.train.numbers
    mine, whole = epoch(data, world, epoch=0, batch_size=16)
    np.testing.assert_array_equal(np.sort(np.concatenate(whole)), np.arange(90))
    seen = world.allgather({int(owners[kept[row]]) for _, _, index, _ in mine for row in index})
    assert sum(map(len, seen)) == len(set.union(*seen)) == len(set(owners[kept]))
    if place == "shared":
        for count in (0, len(set(owners[kept]))):
            whose = [set(owners[kept[own]]) for own in data.divide(count)]
            assert whose == [{who} for who in sorted(set(owners[kept]))]
        with pytest.raises(UsageError, match="the column holds 6 owners, not 3"):
            data.divide(3)
    data.close()
    for name in ("half", "absent"):
        with pytest.raises(UsageError, match=f"no whole number for each row in train/{name}; .*: writer"):
            open_data(path, comm=world, placement=place, partition=f"column:{name}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["shared", "partitioned"])
def test_ranks_of_a_node_share_memory(shared_file, world, place, monkeypatch):
    reads = []
    original = opening.read_x
    monkeypatch.setattr(opening, "read_x", lambda *what: reads.append(what[1:3]) or original(*what))
    data = open_data(shared_file, comm=world, placement=place)
    shared = [group for group, x in reads if place == "shared" or x.base is not None]
    assert len(shared) == (2 if world.rank == 0 else 0)  # read once
    split = data.train if place == "shared" else data.test
    rows = split.source.x
    if world.rank == 0:
        rows.flags.writeable = True
        rows[7, 3] = 201
    world.Barrier()
    assert split.rows(7, 8)[0][0, 3] == 201
    assert rows.flags.writeable == (world.rank == 0)
    world.Barrier()
    data.close()
    data.close()  # twice is once


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["shared", "partitioned"])
def test_without_room_every_rank_has_its_own_copy(shared_file, world, no_room, caplog, place):
    no_room(rank=0)  # the only rank that asks for any
    with caplog.at_level(logging.WARNING):
        data = open_data(shared_file, comm=world, placement=place)
    warned = world.allgather([record.getMessage() for record in caplog.records])
    assert ["own copy" in message for message in warned[0]] == [True] and not any(warned[1:])
    rows = data.test.source.x
    rows.flags.writeable = True
    rows[0, 0] = 100 + world.rank
    world.Barrier()
    assert rows[0, 0] == 100 + world.rank
    _, whole = epoch(data, world, epoch=0, batch_size=9)
    np.testing.assert_array_equal(np.sort(np.concatenate(whole)), np.arange(100))
    data.close()


@pytest.mark.parametrize("place", PLACEMENTS)
def test_an_error_of_one_rank_is_an_error_of_all(shared_file, world, place, write, images, mpi_tmp_path):
    for name, message in (("absent.h5", "does not exist"), ("digts", "did you mean")):
        with pytest.raises(UsageError, match=message):
            open_data(name, comm=world, placement=place)
    x, y, x_test, y_test = images()
    if world.rank == 0:
        write(mpi_tmp_path / "bad.h5", x, y, x_test, y_test + 1, classes=4)
    world.Barrier()
    with pytest.raises(UsageError, match="label 4 in row"):
        open_data(mpi_tmp_path / "bad.h5", comm=world, placement=place).test.rows(0, 1)
    world.Barrier()
    if place == "partitioned":
        # A NaN in row 60 is found by the rank that holds it, and known to all.
        if world.rank == 0:
            x = x.astype("f4")
            x[60, 0, 0] = np.nan
            write(mpi_tmp_path / "nan.h5", x, y, x_test, y_test)
        world.Barrier()
        with pytest.raises(UsageError, match="row 60"):
            open_data(mpi_tmp_path / "nan.h5", comm=world, placement=place)


def test_programs_may_end_without_closing(launch, file):
    program = f"""
from mpi4py import MPI
from hpcdl.data import open_data
data = [open_data({str(file)!r}, comm=MPI.COMM_WORLD, placement=place) for place in {PLACEMENTS}]
for one in data:
    next(one.batches(0, 10, share=(MPI.COMM_WORLD.rank, 3)))
print("done")
"""
    done = launch(3, "-c", program, check=0)
    assert done.stdout.count("done") == 3 and "Traceback" not in done.stderr
