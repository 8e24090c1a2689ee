"""Rows that stay for others: one copy, whoever opens them, and the same data as when opened alone."""

import os

import numpy as np
import pytest

from hpcdl.data import open_data, opening, row_cache

pytestmark = pytest.mark.four


@pytest.fixture
def made(monkeypatch):
    """The arenas that have been made since; what is kept goes at the end."""
    found = []

    class Counted(opening.Arena):
        def __init__(self, comm, specs):
            super().__init__(comm, specs)
            found.append(self)

    monkeypatch.setattr(opening, "Arena", Counted)
    yield found
    row_cache.clear()


def seen(data, comm):
    """All that a training reads of it."""
    share = (0, 1) if comm is None else (comm.rank, comm.size)
    batches = [[(b.x.copy(), b.y.copy()) for b in data.batches(epoch, 7, share)] for epoch in (0, 3)]
    splits = [data.train, data.validation, data.test]
    rows = [each.rows(0, each.examples) for each in splits if each is not None]
    found = [array for part in [*batches, rows] for pair in part for array in pair]
    return found, (data.digest, data.source, data.order, data.statistics.keys())


def same(one, other):
    assert one[1] == other[1] and len(one[0]) == len(other[0])
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one[0], other[0], strict=True))


OPTIONS = [
    {"seed": 0},
    {"seed": 5, "validation": 0.2},
    {"seed": 1, "validation": 0.2, "standardize": True},
    {"seed": 2, "augment": "shift:1", "dtype": "float64", "partition": "by-label"},
]


def test_groups_take_the_rows_that_the_job_has_opened(shared_file, world, made):
    group = world.Split(world.rank % 2, world.rank)
    wanted = []
    for options in OPTIONS:
        alone = open_data(shared_file, comm=group, **options)
        wanted.append(seen(alone, group))
        alone.close()
    for dtype in ("float32", "float64"):
        open_data(shared_file, comm=world, keep=True, dtype=dtype).close()
    before = len(made)
    for options, found in zip(OPTIONS * 2, wanted * 2, strict=True):
        data = open_data(shared_file, comm=group, **options)
        same(seen(data, group), found)
        arrays = row_cache.find(str(shared_file), np.dtype(options.get("dtype", "float32")), group).arrays
        assert data.train.source.x.base is not None and np.shares_memory(data.train.source.x, arrays[0])
        data.close()
    assert len(made) == before == len(OPTIONS) + 2
    group.Free()


def test_what_is_drawn_and_measured_is_remembered(file, made, monkeypatch):
    open_data(file, keep=True).close()
    passes = []
    originals = {name: getattr(opening, name) for name in ("read_y", "file_slabs", "file_digest")}

    def counted(name):
        def call(*arguments):
            passes.append(name)
            return originals[name](*arguments)

        return call

    for name in originals:
        monkeypatch.setattr(opening, name, counted(name))
    for _ in range(3):
        for seed in (1, 2):
            data = open_data(file, validation=0.2, seed=seed, standardize=True)
            assert len(data.digest) == 32
            data.close()
    assert sorted(passes) == ["file_digest", "file_slabs", "file_slabs", "read_y", "read_y"]


def test_a_file_that_was_written_anew_is_read_anew(file, images, write, made):
    open_data(file, keep=True).close()
    x, y, x_test, y_test = images()
    write(file.with_name("new.h5"), x[::-1], y[::-1], x_test, y_test, classes=4)
    os.replace(file.with_name("new.h5"), file)
    data = open_data(file)
    assert np.array_equal(data.train.source.x, x[::-1].reshape(len(x), -1)) and len(made) == 2
    data.close()


def test_other_placements_and_types_are_opened_as_ever(file, made):
    open_data(file, keep=True).close()
    before = len(made)
    for options in ({"placement": "partitioned"}, {"placement": "streamed"}, {"dtype": "float64"}):
        open_data(file, **options).close()
    assert len(made) == before + 2  # a file has none
    row_cache.clear()
    open_data(file).close()
    assert len(made) == before + 3
