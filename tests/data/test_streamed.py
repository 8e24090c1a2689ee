"""Placement streamed: blocks of a file in random order; the same batches whatever the number of ranks."""

import threading

import h5py
import numpy as np
import pytest

from hpcdl.data import hdf5, open_data
from hpcdl.data.placement import FileRows
from hpcdl.errors import UsageError


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


@pytest.mark.parametrize("batch_size", [1, 4, 11, 30, 100, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_of_any_number_of_ranks_are_the_same_complete_batches(data, images, numbers, batch_size, size):
    y = images()[1]
    whole = kept(data.batches(2, batch_size))
    rows = np.concatenate([index for _, _, index, _ in whole])
    np.testing.assert_array_equal(np.sort(rows), np.arange(100))
    np.testing.assert_array_equal(numbers(np.concatenate([x for x, _, _, _ in whole])), rows)
    np.testing.assert_array_equal(np.concatenate([labels for _, labels, _, _ in whole]), y[rows])
    shares = [kept(data.batches(2, batch_size, share=(rank, size))) for rank in range(size)]
    for step, batch in enumerate(whole):
        for part in range(3):
            np.testing.assert_array_equal(np.concatenate([share[step][part] for share in shares]), batch[part])
        assert {share[step][3] for share in shares} == {len(batch[0])}


def test_blocks_and_rows_are_shuffled(data):
    first, second = (np.concatenate([index for _, _, index, _ in kept(data.batches(e, 10))]) for e in (0, 1))
    assert list(first) != list(second)
    blocks = first // 11
    changes = np.flatnonzero(np.diff(blocks))
    assert len(changes) == 9  # each of the ten blocks comes once
    assert list(blocks[[0, *(changes + 1)]]) != sorted(set(blocks))
    assert (np.diff(first[blocks == 3]) < 0).any()


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


@pytest.mark.parametrize("size", [1, 3])
def test_augmented_stream(file, numbers, size):
    plain = open_data(file, placement="streamed", validation=0.1)
    data = open_data(file, placement="streamed", validation=0.1, augment="shift:1,flip")
    whole = kept(data.batches(0, 25))
    shares = [kept(data.batches(0, 25, share=(rank, size))) for rank in range(size)]
    for step, (x, _, index, _) in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([share[step][0] for share in shares]), x)
        assert (x != plain.train.take(index)[0]).any()
    # The same moves as with the rows in memory.
    moves = data._reader.augment.moves(0, 0, 25, 0, 25)
    still = (moves.down == 0) & (moves.right == 0) & (moves.mirrored == 0)
    x, _, index, _ = whole[0]
    assert still.any()
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


def test_a_bad_value_is_raised_at_the_consumer(tmp_path, images, write):
    x, y, x_test, y_test = images(kind="f4")
    x[60, 0, 3] = np.inf
    data = open_data(write(tmp_path / "bad.h5", x, y, x_test, y_test), placement="streamed")
    with pytest.raises(UsageError, match=r"train/x has a NaN or an infinity \(as float32\) in row 60"):
        list(data.batches(0, 10))
    data.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hpcdl-prefetch")]


def test_a_consumer_that_stops_early_leaves_no_thread(data):
    for batch in (stream := data.batches(0, 7)):
        if batch.step == 2:
            break
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hpcdl-prefetch")]
    assert len(kept(data.batches(0, 7))) == 15
