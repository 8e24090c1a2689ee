"""Placement streamed: blocks of a file in random order; the same batches whatever the number of ranks."""

import h5py
import numpy as np
import pytest

from hpcdl.data import hdf5, open_data
from hpcdl.data.placement import FileRows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 330)  # 11 rows of 30 bytes


@pytest.fixture
def data(file):
    data = open_data(file, placement="streamed")
    assert data.train.source.block == 11
    yield data
    data.close()


def kept(batches):
    return [(batch.x.copy(), batch.y.copy(), batch.index.copy(), batch.total) for batch in batches]


def test_an_epoch_can_start_at_any_step_and_reads_only_what_it_needs(data, monkeypatch):
    whole = kept(data.batches(0, 10))
    read = []
    original = FileRows.read
    monkeypatch.setattr(FileRows, "read", lambda self, start, *rest: read.append(start) or original(self, start, *rest))
    for start in (0, 5, 9, 10):
        read.clear()
        rest = kept(data.batches(0, 10, start=start))
        assert len(rest) == 10 - start
        for one, two in zip(rest, whole[start:], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        needed = {int(row) // 11 * 11 for _, _, index, _ in rest for row in index}
        assert len(read) == len(needed) and set(read) == needed


def test_two_blocks_are_in_memory(data, monkeypatch):
    arrays = set()
    original = FileRows.read

    def read(self, start, stop, into, augment):
        arrays.add(id(into[0]))
        return original(self, start, stop, into, augment)

    monkeypatch.setattr(FileRows, "read", read)
    assert len(kept(data.batches(0, 3))) == 34
    assert len(arrays) == 2


def test_moves_are_those_of_rows_in_memory(file):
    plain = open_data(file, placement="streamed", validation=0.1)
    data = open_data(file, placement="streamed", validation=0.1, augment="shift:1,flip")
    x, _, index, _ = kept(data.batches(0, 25))[0]
    moves = data._reader.augment.moves(0, 0, 25, 0, 25)
    still = (moves.down == 0) & (moves.right == 0) & (moves.mirrored == 0)
    assert still.any() and (x != plain.train.take(index)[0]).any()
    np.testing.assert_array_equal(x[still], plain.train.take(index)[0][still])
    plain.close()
    data.close()


def test_chunks_of_the_file_are_not_cut(tmp_path, images):
    x, y, x_test, y_test = images()
    with h5py.File(tmp_path / "chunked.h5", "w") as file:
        file.create_dataset("train/x", data=x, chunks=(4, 6, 5), compression="gzip")
        file["train/y"], file["test/x"], file["test/y"] = y, x_test, y_test
    data = open_data(tmp_path / "chunked.h5", placement="streamed")
    assert data.train.source.block == 8
    np.testing.assert_array_equal(np.sort(np.concatenate([b.index for b in data.batches(0, 9)])), np.arange(100))
    data.close()
