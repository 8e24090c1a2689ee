"""Sparse data files: the batches of arrays under every placement, and what is wrong with a file in one line."""

import h5py
import numpy as np
import pytest
from batches import PLACEMENTS
from sparse_files import make_sparse, put_sparse, write_sparse

from hpcdl.csr import CSR
from hpcdl.data import from_arrays, hdf5, open_data
from hpcdl.data.format import read_info
from hpcdl.data.formats.sparse_file import SparseSet
from hpcdl.data.placement import FileRows
from hpcdl.errors import UsageError


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 400)  # 33 elements, or 50 starts


@pytest.fixture
def path(world, mpi_tmp_path):
    if world.rank == 0:
        write_sparse(mpi_tmp_path / "sparse.h5", *make_sparse(), attributes={"classes": 3}, chunks=(7,))
    world.Barrier()
    return mpi_tmp_path / "sparse.h5"


def dense(x):
    assert isinstance(x, CSR) and x.indptr[0] == 0
    return x.dense()


def visited(data, epoch, share=(0, 1), size=10):
    return [(dense(b.x).copy(), b.y.copy(), b.index.copy()) for b in data.batches(epoch, size, share)]


def test_what_a_file_says(path):
    info = read_info(path)
    x, _, x_test, _ = make_sparse()
    assert info.sparse and info.features == (23,) and info.rows == {"train": 60, "test": 16, "rows": 0}
    assert info.elements == {"train": np.count_nonzero(x), "test": np.count_nonzero(x_test)}
    assert info.kinds["train"] == np.float64 and info.classes == 3


@pytest.mark.parametrize("how", [{}, {"validation": 0.2}, {"partition": "by-label"}, {"partition": "dirichlet:0.5"}])
def test_shared_is_as_from_arrays(world, path, how):
    x, y, x_test, y_test = make_sparse()
    opened = open_data(path, comm=world, dtype="float64", seed=3, **how)
    given = from_arrays(CSR.of(x), y, CSR.of(x_test), y_test, dtype="float64", seed=3, **how)
    share = world.rank, world.size
    for epoch in (0, 1):
        for one, two in zip(visited(opened, epoch, share), visited(given, epoch, share), strict=True):
            for a, b in zip(one, two, strict=True):
                np.testing.assert_array_equal(a, b)
    assert opened.sparse and opened.digest == given.digest
    for split in ("test", "validation") if how.get("validation") else ("test",):
        a, b = (getattr(each, split).rows(2, 9) for each in (opened, given))
        np.testing.assert_array_equal(dense(a[0]), dense(b[0]))
        np.testing.assert_array_equal(a[1], b[1])
    opened.close()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_row_once(world, path, placement, dtype):
    x, _, x_test, y_test = make_sparse()
    data = open_data(path, comm=world, placement=placement, dtype=dtype, validation=0.15, seed=1)
    seen = []
    for rows, labels, index in visited(data, 0, (world.rank, world.size), 13):
        numbers = data.train.take(index)
        np.testing.assert_array_equal(rows, dense(numbers[0]))
        np.testing.assert_array_equal(labels, numbers[1])
        assert rows.dtype == dtype
        places = rows[:, 0].astype(int) - 1  # row 3 is empty, and row 5 full
        plain = ~np.isin(index, np.flatnonzero((places < 0) | (rows[:, 1] == 7.25)))
        np.testing.assert_array_equal(rows[plain & (places >= 0)], x[places[plain & (places >= 0)]])
        seen += index.tolist()
    everyone = np.sort(np.concatenate(world.allgather(seen)))
    np.testing.assert_array_equal(everyone, np.arange(data.examples))
    assert data.examples == 51 and data.validation.examples == 9
    np.testing.assert_array_equal(dense(data.test.rows(0, 16)[0]), x_test)
    np.testing.assert_array_equal(data.test.rows(0, 16)[1], y_test)
    order = np.array([15, 3, 3, 0, 9])
    np.testing.assert_array_equal(dense(data.test.take(order)[0]), x_test[order])
    assert data.train.take([])[0].shape == (0, 23)
    train = np.concatenate([dense(each.rows(0, each.examples)[0]) for each in (data.train, data.validation)])
    np.testing.assert_array_equal(train[np.lexsort(train.T)], x[np.lexsort(x.T)])
    data.close()


def test_a_digest_is_of_rows_not_of_chunks(tmp_path):
    x, y, x_test, y_test = make_sparse()
    given = from_arrays(CSR.of(x), y, CSR.of(x_test), y_test, dtype="float64").digest
    for number, how in enumerate(({}, {"chunks": (5,)}, {"indptr": "i4"}, {"indices": "i8", "indptr": "u4"})):
        path = write_sparse(tmp_path / f"{number}.h5", x, y, x_test, y_test, **how)
        assert open_data(path).digest == given
    x[7, 2] += 1
    assert open_data(write_sparse(tmp_path / "other.h5", x, y, x_test, y_test)).digest != given


def test_kinds_and_scale(tmp_path):
    x, y, x_test, y_test = make_sparse()
    for kind in ("u1", "i2", ">i4", "f2", "f4"):
        path = write_sparse(tmp_path / f"{kind}.h5", x.astype(kind), y, x_test.astype(kind), y_test, {"scale": 0.5})
        for placement in PLACEMENTS:
            data = open_data(path, placement=placement)
            np.testing.assert_array_equal(dense(data.train.rows(0, 60)[0]), x.astype(kind).astype("f4") * 0.5)
            data.close()


def test_values_to_predict_and_a_column(world, mpi_tmp_path):
    x, _, _, _ = make_sparse()
    path = mpi_tmp_path / "values.h5"
    if world.rank == 0:
        write_sparse(path, x, np.arange(60) / 8)
        with h5py.File(path, "a") as file:
            file["train/owner"] = np.arange(60) % 5
    world.Barrier()
    for placement in ("shared", "partitioned"):
        data = open_data(path, comm=world, placement=placement, partition="column:owner")
        rows = np.concatenate([index for _, _, index in visited(data, 0, (world.rank, world.size))])
        owners = world.allgather(set((rows % 5).tolist()))
        assert sum(map(len, owners)) == 5 and set().union(*owners) == set(range(5)) and data.test is None
        data.close()


def test_blocks_are_bounded_where_long_rows_stand_together(tmp_path):
    x = np.zeros((200, 60))
    x[:, 0] = 1
    x[100:110] = 2  # 600 of 790 elements in ten rows
    path = write_sparse(tmp_path / "long.h5", x, np.arange(200) % 2)
    rows = FileRows(read_info(path), "train", np.dtype("f8"))
    lengths = np.count_nonzero(x, axis=1)
    blocks = [lengths[start : start + rows.block].sum() for start in range(0, 200, rows.block)]
    assert rows.block == 1 and max(blocks) == 60  # a row is more than a slab
    rows.close()
    x[100:110, 5:] = 0
    path = write_sparse(tmp_path / "shorter.h5", x, np.arange(200) % 2)
    rows = FileRows(read_info(path), "train", np.dtype("f8"))
    lengths = np.count_nonzero(x, axis=1)
    blocks = [lengths[start : start + rows.block].sum() for start in range(0, 200, rows.block)]
    assert 1 < rows.block < 400 // 12 and max(blocks) * 12 <= 2 * 400
    rows.close()


def test_streamed_reads_blocks_only(path, monkeypatch):
    read, original = [], SparseSet.read
    monkeypatch.setattr(SparseSet, "read", lambda self, a, b, *rest: read.append(b - a) or original(self, a, b, *rest))
    data = open_data(path, placement="streamed")
    block = data.train.source.block
    visited(data, 0)
    assert sum(read) == 60 and max(read) == block < 20


def test_zeros_stay_zero(path):
    for how in ({"standardize": True}, {"augment": "shift:1"}, {"augment": "flip"}):
        for placement in PLACEMENTS:
            with pytest.raises(UsageError, match="sparse rows cannot be standardized or augmented"):
                open_data(path, placement=placement, **how)
    data = open_data(path, standardize="auto")
    assert data.statistics == {} and data.scales is None


def change_part(name, change):
    def apply(file):
        value = file[f"train/x/{name}"][...]
        del file[f"train/x/{name}"]
        file[f"train/x/{name}"] = change(value)

    return apply


def set_at(place, value):
    def change(values):
        values[place] = value
        return values

    return change


def swapped(values):
    values[[30, 31]] = values[[31, 30]]
    return values


def attribute(value):
    return lambda file: file["train/x"].attrs.__setitem__("features", value)


def nothing_written(file):
    del file["train/x/data"], file["train/x/indices"], file["train/x/indptr"], file["train/y"]
    for name in ("data", "indices"):
        file.create_dataset(f"train/x/{name}", (10**12,), "f4" if name == "data" else "i4", chunks=(1000,))
    file["train/x/indptr"] = np.array([0, 10**12])
    file["train/y"] = np.zeros(1)


def much_claimed(file):
    nothing_written(file)
    file["train/x/data"][:10], file["train/x/indices"][:10] = 1, np.arange(10)


def elsewhere(file):
    del file["train/x/indices"]
    count = len(file["train/x/data"])
    file.create_dataset("train/x/indices", (count,), "i4", external=[("/etc/passwd", 0, 4 * count)])


def dense_test(file):
    del file["test/x"]
    file["test/x"] = np.ones((16, 23))


def no_rows(file):
    del file["train/x"], file["train/y"]
    put_sparse(file.create_group("train/x"), np.zeros((0, 23)))
    file["train/y"] = np.zeros(0, int)


BAD = [
    (change_part("indptr", set_at(7, 10**6)), "train/x/indptr does not rise from 0 to"),
    (change_part("indptr", set_at(0, 1)), "train/x/indptr should go from 0 to"),
    (change_part("indptr", set_at(-1, 5)), "train/x/indptr should go from 0 to"),
    (change_part("indptr", lambda v: v[:-1]), "train/x/indptr should go from 0 to"),
    (change_part("indptr", lambda v: np.append(v, v[-1])), "train/x has 61 rows, but train/y has shape (60,)"),
    (change_part("indptr", lambda v: v.astype("f8")), "train/x/indptr is float64 of shape (61,); for sparse rows"),
    (change_part("indptr", lambda v: v[:0]), "has shape (0,); it must be (rows + 1,): where rows"),
    (change_part("indices", set_at(40, 23)), "train/x has a column outside of 0 to 22"),
    (change_part("indices", set_at(40, -1)), "train/x has a column outside of 0 to 22"),
    (change_part("indices", lambda v: set_at(40, 2**40)(v.astype("i8"))), "train/x has a column outside of 0 to 22"),
    (change_part("indices", swapped), "do not ascend; sort them"),
    (change_part("indices", lambda v: v[:-1]), "columns in indices; each element must have one"),
    (change_part("data", set_at(20, np.nan)), "train/x has a NaN or an infinity (as float32) in row 5;"),
    (change_part("data", lambda v: v[:, None]), "train/x/data is float64 of shape"),
    (change_part("data", lambda v: v.astype("S4")), "train/x/data is |S4 of shape"),
    (attribute(22), "rows have shape (22,) in train/x, but (23,) in test/x"),
    (attribute(0), "its attribute features is 0; it is the number of columns"),
    (attribute(2**31), "its attribute features is 2147483648; it is the number of columns"),
    (attribute("many"), "its attribute features is 'many'"),
    (lambda file: file["train/x"].attrs.__delitem__("features"), "its attribute features is missing"),
    (lambda file: file["train/x"].__delitem__("indptr"), "has no data set train/x/indptr"),
    (lambda file: file.attrs.__setitem__("base", 2), "the attribute base is 2; it must be 0 or 1"),
    (lambda file: file.attrs.__setitem__("vocabulary", "bytes"), "a text has tokens (rows, length)"),
    (nothing_written, "train/x/data has shape (1000000000000,), but nothing was ever written into it"),
    (much_claimed, "bytes of memory, and this machine has"),
    (elsewhere, "train/x/indices has its elements in another file"),
    (dense_test, "the rows of train are sparse, but the rows of test are not"),
    (no_rows, "train has no rows"),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("change", "words"), BAD, ids=[words[:40] for _, words in BAD])
def test_bad_files(tmp_path, placement, change, words):
    path = write_sparse(tmp_path / "bad.h5", *make_sparse())
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(UsageError) as found:
        data = open_data(path, placement=placement)
        visited(data, 0)
        data.test.rows(0, 16)
    assert words in str(found.value) and "\n" not in str(found.value), found.value


def test_rows_without_labels(tmp_path):
    x, *_ = make_sparse()
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        put_sparse(file.create_group("rows/x"), x)
    rows = FileRows(read_info(tmp_path / "rows.h5"), "rows", np.dtype("f8"))
    np.testing.assert_array_equal(rows.read(10, 20).x.dense(), x[10:20])
    rows.close()
