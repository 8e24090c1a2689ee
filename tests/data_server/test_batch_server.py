"""Data servers: the very batches that a worker would make itself, from ranks that hold the examples for it."""

import gc
import time
import weakref

import h5py
import numpy as np
import pytest
from batches import assert_same, assert_same_rows, copied
from serving import alone, served
from sparse_files import make_sparse, write_sparse

from hpcdl.comm.progress import activity
from hpcdl.data import Batch, hdf5, open_data
from hpcdl.data.placement import FileRows, MemoryRows
from hpcdl.data_server import batch_server
from hpcdl.data_server.batch_server import ClientBatches
from hpcdl.data_server.data_messages import BatchFormat, up
from hpcdl.errors import UsageError
from hpcdl.runs import signals

pytestmark = pytest.mark.four

CASES = [
    ("images", {"augment": "shift:1,flip", "standardize": True}),
    ("images", {"partition": "dirichlet:0.3", "validation": 0.1}),
    ("images", {"placement": "partitioned", "partition": "by-label", "validation": 0.2, "standardize": True}),
    ("images", {"placement": "streamed", "augment": "shift:1", "validation": 0.1, "standardize": True}),
    ("sparse", {"validation": 0.2, "partition": "by-label"}),
    ("sparse", {"placement": "partitioned", "partition": "dirichlet:0.3"}),
    ("sparse", {"placement": "streamed", "validation": 0.1}),
    ("values", {}),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 330)  # 11 rows of 30 bytes


@pytest.fixture
def path(world, mpi_tmp_path, request):
    """100 training and 20 test images of 4 classes, or with values to predict; or sparse rows; or the embedded text."""
    kind = getattr(request, "param", "images")
    if kind == "text":
        return kind
    if world.rank == 0 and kind == "sparse":
        write_sparse(mpi_tmp_path / "images.h5", *make_sparse(), attributes={"classes": 3})
    elif world.rank == 0:
        random = np.random.default_rng(0)
        with h5py.File(mpi_tmp_path / "images.h5", "w") as file:
            for part, rows in (("train", 100), ("test", 20)):
                file[f"{part}/x"] = random.integers(0, 256, (rows, 6, 5)).astype("u1")
                file[f"{part}/y"] = np.arange(rows) / 8 if kind == "values" else np.arange(rows) * 7 % 4
            file.attrs.update(classes=0 if kind == "values" else 4, scale=1 / 255)
    world.Barrier()
    return mpi_tmp_path / "images.h5"


@pytest.fixture
def each_world(world):
    """A function: run body(world, servers) with 1, 2 and 3 servers, as long as a worker is left."""

    def run(body):
        for servers in (1, 2, 3):
            if servers < world.size:
                body(world, servers)
                world.Barrier()

    return run


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("path", "options"), CASES, ids=str, indirect=["path"])
def test_the_very_batches(each_world, path, options):
    def body(data, number, workers, everyone):
        mine, share = alone(path, number, workers, seed=3, **options), (number, workers)
        last = None
        for epoch in range(3):
            steps = mine.batches(epoch, 15, share, 2 if epoch == 1 else 0)  # one epoch from its middle
            for batch, own in zip(data.batches(epoch, 15, share, 2 if epoch == 1 else 0), steps, strict=True):
                own = copied(own)
                assert_same(batch, own)
                parts = [batch.x.data, batch.x.indices] if data.sparse else [batch.x]
                assert all(part.ctypes.data % 64 == 0 and part.flags.c_contiguous for part in parts)
                if last is not None:
                    assert_same(*last)  # valid until the next but one
                last = batch, own
        source = data.batches(3, 15, share)
        assert_same(next(source), next(mine.batches(3, 15, share)))
        source.close()
        cursor, own, before = data.cursor(15, share), mine.cursor(15, share), []
        for place in [(0, 0), (0, 1), (0, 3), (2, 2), (2, 3), (0, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]:
            now = cursor.take(*place), copied(own.take(*place))
            data.test.rows(0, 1)  # what was asked for before this has come by now
            for one, two in [*before, now]:
                assert_same(one, two)
            before = [now]
        cursor.close()
        own.close()
        mine.close()

    each_world(lambda world, servers: served(world, servers, path, body, seed=3, **options))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("path", "options"), [*CASES, ("text", {})], ids=str, indirect=["path"])
def test_the_very_rows_and_what_is_known_of_them(world, path, options):
    def body(data, number, workers, everyone):
        mine = alone(path, number, workers, dtype="float64", **options)
        for name in ("name", "features", "classes", "dtype", "examples", "sparse", "digest"):
            assert getattr(data, name) == getattr(mine, name)
        assert np.array_equal(data.class_counts, mine.class_counts)
        assert data.schema.describe() == mine.schema.describe() and data.vocabulary is data.schema.vocabulary
        assert data.steps_per_epoch(7) == mine.steps_per_epoch(7)
        assert data.statistics.keys() == mine.statistics.keys()
        assert all(np.array_equal(data.statistics[name], mine.statistics[name]) for name in data.statistics)
        for one, two in ((data.train, mine.train), (data.test, mine.test), (data.validation, mine.validation)):
            assert (one is None) == (two is None)
            for start, stop in ((0, 5), (3, 3), (4, 6)) if one else ():
                for a, b in zip(one.rows(start, stop), two.rows(start, stop), strict=True):
                    assert_same_rows(a, b)
            for index in ([4, 0, 4], []) if one else ():
                for a, b in zip(one.take(index), two.take(index), strict=True):
                    assert_same_rows(a, b)
        for wrong in (lambda: data.test.rows(0, data.test.examples + 1), lambda: data.test.take([-1])):
            with pytest.raises(IndexError, match=f"row numbers go from 0 to {data.test.examples - 1}"):
                wrong()
        for wrong in ({"batch_size": 0}, {"batch_size": 10, "share": (2, 2)}, {"batch_size": 10, "start": 10**4}):
            with pytest.raises(UsageError):
                data.batches(0, **wrong)
        mine.close()

    served(world, max(1, world.size // 2), path, body, dtype="float64", **options)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{"augment": "shift:1"}, {"placement": "streamed"}], ids=str)
def test_steps_drawn_by_whoever_comes_first(each_world, path, options):
    """Asynchronous workers ask for whole batches, with gaps; no batch is asked for ahead."""

    def body(data, number, workers, everyone):
        mine, cursor = open_data(path, **options), data.cursor(15, (0, 1), ahead=False)
        sent = everyone.traffic["push"].messages
        places = [divmod(count, 7) for count in range(number, 30, workers)]
        for place in places:
            assert_same(cursor.take(*place), copied(next(mine.batches(place[0], 15, (0, 1), place[1]))))
        assert everyone.traffic["push"].messages == sent + len(places)
        cursor.close()
        mine.close()

    each_world(lambda world, servers: served(world, servers, path, body, **options))


@pytest.mark.mpi(min_size=2)
def test_on_a_gpu(world, path, gpu):
    """Received in pinned memory, copied to the device; each batch is valid until the next but one."""

    def body(data, number, workers, everyone):
        mine, share, last = open_data(path), (number, workers), None
        data.to(gpu)
        for epoch in (0, 1):
            for batch, own in zip(data.batches(epoch, 15, share), mine.batches(epoch, 15, share), strict=True):
                assert gpu.holds(batch.x) and gpu.holds(batch.y)
                host = Batch(gpu.host(batch.x), gpu.host(batch.y), batch.total, epoch, batch.step, batch.index)
                assert_same(host, own)
                if last is not None:
                    np.testing.assert_array_equal(gpu.host(last[0].x), last[1])
                last = batch, own.x.copy()
        mine.close()

    served(world, 1, path, body)


@pytest.mark.mpi(min_size=2)
def test_two_iterators_and_rows_between_them(each_world, path):
    def body(data, number, workers, everyone):
        mine, share = open_data(path), (number, workers)
        wanted = [[copied(batch) for batch in mine.batches(epoch, 30, share)] for epoch in (0, 1)]
        before = []
        for pair in zip(data.batches(0, 30, share), data.batches(1, 30, share), *wanted, strict=True):
            np.testing.assert_array_equal(data.test.rows(2, 9)[0], mine.test.rows(2, 9)[0])
            for one, two in [*before, (pair[0], pair[2]), (pair[1], pair[3])]:
                assert_same(one, two)
            before = [(pair[0], pair[2]), (pair[1], pair[3])]
        mine.close()

    each_world(lambda world, servers: served(world, servers, path, body))


def rows_held() -> list:
    """The objects of this process that hold rows of a data set."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), MemoryRows | FileRows)]


@pytest.mark.mpi(min_size=2)
def test_workers_hold_no_rows_and_three_batches(each_world, path):
    gone = weakref.proxy(set())  # as libraries leave them: to ask for its class raises ReferenceError
    earlier = rows_held()  # of other tests

    def body(data, number, workers, everyone):
        assert len(rows_held()) == len(earlier) and gc.is_tracked(gone)
        kept = [batch.x for epoch in range(3) for batch in data.batches(epoch, 15, (number, workers))]
        assert len({x.ctypes.data for x in kept if len(x)}) == 3
        assert data.most_rows(15, (number, workers)) == max(map(len, kept))

    each_world(lambda world, servers: served(world, servers, path, body))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, {"partition": "dirichlet:0.3"}], ids=str)
def test_bytes_and_messages(each_world, path, options):
    """One message each way for a batch; an answer is a header and the rows, each part rounded up to a cache line."""

    def body(data, number, workers, everyone):
        push, mine = everyone.traffic["push"], open_data(path, **options)
        before = push.bytes, push.messages
        rows = [len(batch.y) for epoch in (0, 1) for batch in data.batches(epoch, 15, (number, workers))]
        asked = len(rows) + 1 + 1  # the most rows of a batch; the first batch of the epoch that does not come
        assert (push.bytes - before[0], push.messages - before[1]) == (64 * asked, asked)
        assert [span[0] for span in everyone.timeline.spans].count("wait for data") == len(rows)
        data.test.rows(0, 20)
        rows.append(len(next(mine.batches(2, 15, (number, workers))).y))
        mine.close()
        batches = sum(64 + up(n * 30 * 4) + up(n * 8) + n * 8 for n in rows)
        return 64 + batches + 64 + up(20 * 30 * 4) + up(20 * 8)

    def run(world, servers):
        result = world.gather(served(world, servers, path, body, **options))
        for server in range(servers) if world.rank == 0 else ():
            _, sent, description = result[server]
            answers = [8 + description + each for each in result[servers + server :: servers]]
            assert sent == sum(answers)

    each_world(run)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("path", ["sparse"], indirect=True)
def test_what_is_sent_of_sparse_rows_is_what_there_is(world, path):
    """A message is as long as its elements ask for, although a worker has room for the longest rows."""
    form, sizes = BatchFormat(23, np.dtype("f4"), np.dtype("i8"), sparse=True), []

    def body(data, number, workers, everyone):
        cursor = data.cursor(10, (number, workers), ahead=False)
        for step in range(3):
            batch = cursor.take(0, step)
            rows, elements = len(batch.y), batch.x.nnz
            sizes.append(form.size(rows, elements))
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
def test_a_server_ends_with_the_largest_status(each_world, path):
    def run(world, servers):
        def body(data, number, workers, everyone):
            left_open = data.cursor(10, (number, workers))
            left_open.take(0, 0)
            data.close(number)
            data.close(9)  # twice is once
            assert not activity.in_flight

        status = served(world, servers, path, body)
        if world.rank < servers:
            last = world.size - servers - 1
            assert status[0] == max([number for number in range(last + 1) if number % servers == world.rank], default=0)

    each_world(run)


@pytest.mark.mpi(min_size=2)
def test_a_server_that_nobody_asks_is_not_taken_for_hung(world, path):
    served(world, 1, path, lambda *_: time.sleep(1.0), timeout=0.4)


@pytest.mark.mpi(min_size=2)
def test_a_signal_of_a_server_reaches_its_workers(each_world, path, monkeypatch):
    monkeypatch.setattr(batch_server, "SETTLED", 0.0)

    def run(world, servers):
        signals.received[:] = ["SIGUSR1"] if world.rank < servers else []

        def body(data, number, workers, everyone):
            for _ in data.batches(0, 30, (number, workers)):
                pass
            assert signals.received == ["SIGUSR1"]

        try:
            served(world, servers, path, body)
        finally:
            signals.received.clear()

    each_world(run)


def test_a_signal_is_told_when_all_have_had_it(path, monkeypatch):
    """A second one ends a worker at once, so the server's must not come before the worker's own."""
    server = batch_server.BatchServer(None, open_data(path), clients=[])
    assert server._signal() == 0
    monkeypatch.setattr(signals, "received", ["SIGTERM"])
    assert server._signal() == 0
    server.signalled -= batch_server.SETTLED
    assert server._signal() == 15


@pytest.mark.parametrize("options", [{}, {"augment": "shift:1"}], ids=str)
def test_the_next_batch_is_made_before_it_is_asked_for(path, options, monkeypatch):
    data = open_data(path, **options)
    form = BatchFormat(*data.train.form)
    line = ClientBatches(data, form, 15, (0, 1))
    made = []
    original = ClientBatches._take
    monkeypatch.setattr(ClientBatches, "_take", lambda self, *what: made.append(what[:2]) or original(self, *what))

    def asked(epoch, step, ahead=True):
        message = line.take(epoch, step, ahead)
        batch = next(data.batches(epoch, 15, (0, 1), step))
        answer = form.parts(message, len(batch.y))
        assert_same(Batch(answer.x, answer.y, *answer.header.item()[1:4], answer.index), batch)

    assert not line.make()  # nothing is known yet
    asked(0, 5)
    assert line.make() and made == [(0, 5), (0, 6)]
    assert not line.make()  # one is enough
    asked(0, 6)
    assert made == [(0, 5), (0, 6)]
    assert line.make() and made[-1] == (1, 0)
    asked(1, 4)  # a jump: the guess was wrong, and so would be the next
    assert not line.make() and made[-1] == (1, 4)
    asked(1, 5)
    assert not line.make()
    asked(1, 6)
    assert line.make() and made[-1] == (2, 0)
    asked(2, 0, ahead=False)
    assert not line.make()
    line.close()
    data.close()


def test_a_guess_that_fails_is_told_when_it_is_asked_for(tmp_path):
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/x"], file[f"{part}/y"] = np.ones((50, 30), "f4"), np.arange(50) % 4
        file["train/x"][40] = np.nan
    data = open_data(tmp_path / "bad.h5", placement="streamed")
    line, good = ClientBatches(data, BatchFormat(*data.train.form), 1, (0, 1)), 0
    while line.make() or good < 50:
        try:
            line.take(0, good, True)
        except UsageError as error:
            assert "in row 40" in str(error)
            break
        good += 1
    blocks = np.concatenate([batch.index // 2 for batch in until_refused(data.batches(0, 1))])
    assert good == len(blocks) and 20 not in blocks
    with pytest.raises(UsageError, match="in row 40"):
        line.take(0, good, True)
    line.close()
    data.close()


def until_refused(batches):
    try:
        yield from batches
    except UsageError:
        return
