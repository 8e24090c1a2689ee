"""Data servers of sparse rows: the very batches, in messages as long as their elements; a training with them."""

import numpy as np
import pytest
from serving import alone, served
from sparse_files import make_sparse, write_sparse

from hpcdl.csr import CSR
from hpcdl.data import hdf5
from hpcdl.data_server.data_messages import BatchFormat, up
from hpcdl.models import make_model
from hpcdl.random import Random

pytestmark = pytest.mark.four

CASES = [
    {},
    {"validation": 0.2, "partition": "by-label"},
    {"placement": "partitioned", "validation": 0.1},
    {"placement": "partitioned", "partition": "dirichlet:0.3"},
    {"placement": "streamed", "validation": 0.1},
]


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 400)


@pytest.fixture
def path(world, mpi_tmp_path):
    if world.rank == 0:
        write_sparse(mpi_tmp_path / "sparse.h5", *make_sparse(), attributes={"classes": 3})
    world.Barrier()
    return mpi_tmp_path / "sparse.h5"


def assert_rows(one, two):
    assert isinstance(one, CSR) and isinstance(two, CSR)
    for name in ("data", "indices"):
        a, b = (getattr(each, name)[: each.nnz] for each in (one, two))
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype and a.ctypes.data % 64 == 0
    np.testing.assert_array_equal(one.indptr, two.indptr)
    assert one.shape == two.shape


def plain(batch):
    return batch.x.copy(), batch.y.copy(), batch.index.copy(), (batch.total, batch.epoch, batch.step)


def assert_same(batch, own):
    assert_rows(batch.x, own[0])
    np.testing.assert_array_equal(batch.y, own[1])
    np.testing.assert_array_equal(batch.index, own[2])
    assert (batch.total, batch.epoch, batch.step) == own[3]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_very_batches_and_rows(world, path, options):
    def body(data, number, workers, everyone):
        mine, share = alone(path, number, workers, seed=3, **options), (number, workers)
        assert data.sparse and mine.sparse and data.digest == mine.digest
        last = None
        for epoch in range(2):
            pairs = zip(data.batches(epoch, 15, share), mine.batches(epoch, 15, share), strict=True)
            for batch, own in pairs:
                own = plain(own)
                assert_same(batch, own)
                if last is not None:
                    assert_same(*last)  # valid until the next but one
                last = batch, own
        cursor, own = data.cursor(15, share), mine.cursor(15, share)
        for place in [(0, 0), (0, 1), (0, 2), (0, 3), (2, 3), (0, 2), (2, 0), (2, 1)]:
            batch, copied = cursor.take(*place), plain(own.take(*place))
            assert_rows(data.test.rows(2, 9)[0], mine.test.rows(2, 9)[0])
            assert_same(batch, copied)
        cursor.close()
        own.close()
        for index in ([4, 0, 4], []):
            one, two = (each.train.take(index) for each in (data, mine))
            assert_rows(one[0], two[0])
            np.testing.assert_array_equal(one[1], two[1])
        mine.close()

    for servers in range(1, min(3, world.size)):
        served(world, servers, path, body, seed=3, **options)
        world.Barrier()


@pytest.mark.mpi(min_size=2)
def test_what_is_sent_is_what_there_is(world, path):
    """A message is as long as its elements ask for, although a worker has room for the longest rows."""
    form, sizes = BatchFormat(23, np.dtype("f4"), np.dtype("i8"), sparse=True), []

    def body(data, number, workers, everyone):
        cursor = data.cursor(10, (number, workers), ahead=False)
        for step in range(3):
            batch = cursor.take(0, step)
            sizes.append(form.size(len(batch.y), batch.x.nnz))
            rows, elements = len(batch.y), batch.x.nnz
            assert sizes[-1] <= 64 + up(8 * (rows + 1)) + up(8 * rows) + up(8 * rows) + up(4 * elements) + 4 * elements
            assert len(cursor.messages[0]) > sizes[-1]
        return everyone.traffic["push"].bytes

    result = served(world, 1, path, body)
    sent = world.gather(sum(sizes), root=0)
    if world.rank == 0:
        _, given, introduction = result
        workers = world.size - 1
        assert given == sum(sent) + workers * (64 + 8 + introduction)  # and MOST_ROWS; how long the text is, and it


@pytest.mark.mpi(min_size=2)
def test_a_training_is_the_same_to_the_bit(world, path):
    def body(data, number, workers, everyone):
        mine = alone(path, number, workers, seed=1)
        model = make_model("softmax", data.features, data.classes, "float32", sparse=True)
        results = []
        for each in (data, mine):
            parameters = model.initialize(Random(0))
            gradient = np.zeros_like(parameters)
            for batch in each.batches(0, 12, (number, workers)):
                gradient[:] = 0
                model.loss_and_gradient(parameters, batch, gradient)
                parameters -= 0.1 / batch.total * gradient
            results.append(parameters)
        np.testing.assert_array_equal(*results)
        mine.close()

    served(world, 1, path, body, seed=1)
