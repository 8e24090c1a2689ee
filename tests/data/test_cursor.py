"""Random access: a cursor's batches are those of `batches`, in sequence and by jumps."""

import threading

import numpy as np
import pytest
from batches import assert_same, copied

from hpcdl.data import from_arrays, hdf5, open_data, sampler
from hpcdl.data.placement import FileRows
from hpcdl.errors import UsageError

CASES = [
    {},
    {"validation": 0.2},
    {"augment": "shift:1,flip"},
    {"partition": "by-label"},
    {"partition": "dirichlet:0.3", "augment": "flip"},
    {"placement": "partitioned"},
    {"placement": "streamed"},
    {"placement": "streamed", "shuffle_window": 1},
    {"placement": "streamed", "shuffle_window": 2, "augment": "shift:1", "validation": 0.1},
]
JUMPS = [(0, 0), (0, 1), (0, 5), (0, 2), (1, 1), (1, 2), (1, 6), (2, 0), (2, 1), (0, 6), (1, 0), (1, 1), (5, 4), (4, 4)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 330)  # 11 rows of 30 bytes


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hpcdl-prefetch")]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_cursor_takes_the_very_batches(file, options, ahead):
    data = open_data(file, seed=3, **options)
    share = (0, 1) if "placement" in options else (1, 3)
    wanted = {(e, b.step): copied(b) for e in range(6) for b in data.batches(e, 15, share)}
    cursor = data.cursor(15, share, ahead)
    last = None
    for place in [*[(e, s) for e in range(3) for s in range(cursor.steps)], *filter(wanted.get, JUMPS)]:
        batch = cursor.take(*place)
        assert_same(batch, wanted[place])
        if last is not None:  # valid until the next but one is taken
            assert_same(last[0], last[1])
        last = batch, wanted[place]
        if not ahead:
            assert not threads()
    cursor.close()
    assert not threads()
    assert_same(cursor.take(0, 1), wanted[0, 1])
    cursor.close()
    data.close()


def test_the_order_of_an_epoch_is_drawn_once(images, monkeypatch):
    drawn = []
    original = sampler.global_order
    monkeypatch.setattr(sampler, "global_order", lambda *what: drawn.append(what[2]) or original(*what))
    data = from_arrays(*images()[:2])
    cursors = [data.cursor(10), data.cursor(10), data.cursor(10)]
    for epoch in range(3):
        for step in (0, 1, 5, 3, 8):
            for cursor in cursors:
                cursor.take(epoch, step)
    assert drawn == [0, 1, 2]


@pytest.mark.parametrize(("options", "pairs"), [({}, 2), ({"augment": "shift:1"}, 4)])
def test_memory_is_used_again(images, options, pairs):
    cursor = from_arrays(*images()[:2], **options).cursor(10)
    kept = [cursor.take(epoch, step).x for epoch in range(4) for step in (0, 1, 2, 7, 8)]
    assert len({x.ctypes.data for x in kept}) == pairs
    cursor.close()


def test_in_sequence_the_next_batch_is_made_ahead_through_the_end_of_an_epoch(images, monkeypatch):
    data = from_arrays(*images()[:2], augment="shift:1")
    made = threading.Semaphore(0)
    original = data._reader.rows.gather
    monkeypatch.setattr(data._reader.rows, "gather", lambda *what: (original(*what), made.release()))
    cursor = data.cursor(50)
    cursor.take(0, 0)
    cursor.take(0, 1)
    for _ in range(3):  # the two that were taken, and the first of the next epoch
        assert made.acquire(timeout=10)
    cursor.close()


def test_a_block_is_read_when_a_row_of_another_one_is_needed(file, monkeypatch):
    data = open_data(file, placement="streamed", shuffle_window=1)
    read = []
    original = FileRows.read
    monkeypatch.setattr(FileRows, "read", lambda self, start, *rest: read.append(start) or original(self, start, *rest))
    cursor = data.cursor(3, (0, 1), ahead=False)
    rows = np.concatenate([cursor.take(0, step).index for step in range(0, 34, 2)])
    assert sorted(read) == sorted(set(rows // 11 * 11)) and len(read) >= 9
    data.close()


def test_an_error_is_raised_at_its_step_and_again(tmp_path, images, write):
    x, y, x_test, y_test = images(kind="f4")
    x[60, 0, 3] = np.inf
    data = open_data(write(tmp_path / "bad.h5", x, y, x_test, y_test), placement="streamed")
    for ahead in (True, False):
        cursor, step = data.cursor(1, (0, 1), ahead), 0
        with pytest.raises(UsageError, match="in row 60"):
            for step in range(100):
                cursor.take(0, step)
        assert 0 < step < 99
        with pytest.raises(UsageError, match="in row 60"):
            cursor.take(0, step)
        assert cursor.take(0, 0).step == 0
        cursor.close()
        assert not threads()
    data.close()


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("batch_size", [1, 7, 15, 60, 1000])
def test_no_batch_has_more_rows(file, options, batch_size):
    data = open_data(file, seed=3, **options)
    for share in [(0, 1)] if "placement" in options else [(0, 1), (0, 3), (2, 3), (6, 7)]:
        rows = max(len(batch.y) for batch in data.batches(0, batch_size, share))
        assert rows <= data.most_rows(batch_size, share) <= rows + ("partition" in options)
    data.close()


def test_refusals(file):
    data = open_data(file, placement="partitioned")
    with pytest.raises(UsageError, match="holds the rows of share"):
        data.cursor(10, (1, 2))
    with pytest.raises(UsageError, match="batch size must be 1 or more"):
        data.cursor(0)
    for step in (-1, 10):
        with pytest.raises(UsageError, match=f"10 steps has no step {step}"):
            data.cursor(10).take(0, step)
    data.close()
