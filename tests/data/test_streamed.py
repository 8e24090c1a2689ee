"""Placement streamed: blocks of a file in random order; the same batches whatever the number of ranks."""

import itertools
import time

import h5py
import numpy as np
import pytest
from batches import dense
from sparse_files import make_sparse, write_sparse

from hpcdl.csr import CSR
from hpcdl.data import hdf5, open_data
from hpcdl.data.batch import BatchBuffers
from hpcdl.data.formats.prepare import Output
from hpcdl.data.order.readers import BlockMemory, StreamReader
from hpcdl.data.placement import FileRows, MemoryRows
from hpcdl.errors import UsageError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 330)  # 11 rows of 30 bytes


def kept(batches):
    return [(batch.x.copy(), batch.y.copy(), batch.index.copy(), batch.total) for batch in batches]


def test_an_epoch_can_start_at_any_step_and_reads_only_what_it_needs(file, monkeypatch):
    data = open_data(file, placement="streamed", shuffle_window=1)
    whole = kept(data.batches(0, 10))
    read = []
    original = FileRows.read
    monkeypatch.setattr(FileRows, "read", lambda self, start, *rest: read.append(start) or original(self, start, *rest))
    for start in (0, 5, 9, 10):
        read.clear()
        data._reader.free.clear()  # blocks that are in memory
        rest = kept(data.batches(0, 10, start=start))
        assert len(rest) == 10 - start
        for one, two in zip(rest, whole[start:], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        needed = {int(row) // 11 * 11 for _, _, index, _ in rest for row in index}
        assert len(read) == len(needed) and set(read) == needed
    data.close()


def files(tmp_path, images):
    x, y, x_test, y_test = make_sparse()
    yield write_sparse(tmp_path / "sparse.h5", x, y, x_test, y_test, attributes={"classes": 3})
    with h5py.File(tmp_path / "dense.h5", "w") as file:
        file["train/x"], file["train/y"], file["test/x"], file["test/y"] = images()
    yield tmp_path / "dense.h5"
    for name, made, cut in (("dense", images(), np.asarray), ("sparse", (x, y, x_test, y_test), CSR.of)):
        x, y, x_test, y_test = made
        parts = {"train": (x.shape, [cut(x)], y, {}), "test": (x_test.shape, [cut(x_test)], y_test, {})}
        Output(f"{tmp_path}/{name}/", shard_size=900).write(parts, x.dtype, 1.0, None, 10, sparse=name == "sparse")
        yield tmp_path / name


@pytest.mark.parametrize("window", [1, 3, 40])
def test_the_order_is_that_of_any_number_of_ranks_wherever_it_stops(tmp_path, images, window, monkeypatch):
    """The rows themselves are compared, while the thread reads the next block into the memory of an old one."""
    original = MemoryRows.gather
    monkeypatch.setattr(MemoryRows, "gather", lambda self, *what: time.sleep(0.001) or original(self, *what))
    random = np.random.default_rng(window)
    for path in files(tmp_path, images):
        if path.is_dir() and window != 3:
            continue
        data = open_data(path, placement="streamed", shuffle_window=window, validation=0.15, seed=4)
        steps = data.steps_per_epoch(7)
        whole = np.concatenate([batch.index.copy() for batch in data.batches(1, 7)])
        np.testing.assert_array_equal(np.sort(whole), np.arange(data.examples))
        for ranks in range(1, 8):
            stops = [0, *np.sort(random.integers(0, steps + 1, 3)).tolist(), steps]
            seen = []
            for leg, (start, stop) in enumerate(itertools.pairwise(stops)):
                size = (ranks + leg) % 7 + 1
                shares = [data.batches(1, 7, (rank, size), start) for rank in range(size)]
                for batches in itertools.islice(zip(*shares, strict=True), stop - start):
                    for batch in batches:
                        x, y = data.train.take(batch.index)
                        np.testing.assert_array_equal(dense(batch.x), dense(x))
                        np.testing.assert_array_equal(batch.y, y)
                        seen += batch.index.tolist()
                for each in shares:
                    each.close()
            assert seen == whole.tolist()
        data.close()


@pytest.mark.parametrize(("window", "blocks"), [(1, 2), (3, 4), (8, 9), (20, 10)])
def test_a_window_of_blocks_and_one_are_in_memory(file, monkeypatch, window, blocks):
    data = open_data(file, placement="streamed", shuffle_window=window)
    places, made = set(), []
    original, init = FileRows.read, BlockMemory.__init__

    def read(self, start, stop, into):
        places.add(into[0].ctypes.data)
        return original(self, start, stop, into)

    monkeypatch.setattr(FileRows, "read", read)
    monkeypatch.setattr(BlockMemory, "__init__", lambda self, *what: made.append(1) or init(self, *what))
    for epoch in range(3):
        assert len(kept(data.batches(epoch, 3))) == 34
    assert len(places) == blocks and len(made) == 1
    data.close()


def test_blocks_of_unequal_sizes(file):
    """Blocks of a folder of files end where a file ends."""
    data = open_data(file, placement="streamed")
    data.train.source.starts = np.array([0, 5, 5, 30, 31, 100])
    for window in (1, 2, 5):
        reader = StreamReader(data.train.source, np.array([4, 30, 99]), 0, None, window)
        for size in (1, 3):
            buffers = [BatchBuffers(2, data.train.form) for _ in range(size)]
            seen = []
            shares = [reader.batches(1, 9, (rank, size), range(11), buffers[rank]) for rank in range(size)]
            for batches in zip(*shares, strict=True):
                for batch in batches:
                    rows = np.delete(np.arange(100), [4, 30, 99])[batch.index]
                    np.testing.assert_array_equal(batch.x, data.train.take(rows)[0])
                    seen += batch.index.tolist()
            assert sorted(seen) == list(range(97))
    data.close()


def test_bad_windows(file):
    for window in (0, 5000):
        with pytest.raises(UsageError, match="--shuffle-window is a number of blocks from 1 to 4096"):
            open_data(file, placement="streamed", shuffle_window=window)


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
