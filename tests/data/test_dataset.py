"""Batches and splits: the same examples in the same order whatever the number of ranks, and one's own arrays."""

import logging

import numpy as np
import pytest
from batches import PLACEMENTS, assert_same, copied

from hpcdl.data import Batch, from_arrays, hdf5, open_data
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU


def copies(batches):
    return list(map(copied, batches))


def assert_all_same(one, two):
    for pair in zip(one, two, strict=True):
        assert_same(*pair)


def joined(shares):
    """The batches that the ranks' shares of each step make together."""
    return [
        Batch(*(np.concatenate([getattr(part, name) for part in parts]) for name in "xy"), parts[0].total,
              parts[0].epoch, parts[0].step, np.concatenate([part.index for part in parts]))
        for parts in zip(*shares, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("augment", ["", "shift:1,flip"])
@pytest.mark.parametrize("place", ["shared", "streamed"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 7, 11, 30, 1000])
def test_shares_of_any_number_of_ranks_are_the_batches(file, numbers, size, batch_size, place, augment, monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 330)  # 11 rows of 30 bytes
    data = open_data(file, placement=place, augment=augment)
    whole = copies(data.batches(3, batch_size))
    shares = [copies(data.batches(3, batch_size, share=(rank, size))) for rank in range(size)]
    assert_all_same(joined(shares), whole)
    assert np.ptp([[len(batch.x) for batch in share] for share in shares], axis=0).max() <= 1
    assert len(whole) == data.steps_per_epoch(batch_size)
    assert [batch.total for batch in whole] == [len(batch.x) for batch in whole]
    index = np.concatenate([batch.index for batch in whole])
    np.testing.assert_array_equal(np.sort(index), np.arange(100))
    if not augment:
        np.testing.assert_array_equal(numbers(np.concatenate([batch.x for batch in whole])), index)
    np.testing.assert_array_equal(np.concatenate([batch.y for batch in whole]), index * 7 % 4)
    assert all(batch.x.flags.c_contiguous and batch.x.shape[1] == 30 for batch in whole)
    data.close()


@pytest.mark.parametrize("place", PLACEMENTS)
def test_epochs_differ_and_depend_on_the_seed(file, place):
    sets = [open_data(file, placement=place, seed=seed) for seed in (0, 1)]
    orders = [np.concatenate([batch.index for batch in data.batches(e, 9)]) for data in sets for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("options", [{}, {"augment": "shift:1,flip"}, {"partition": "by-label"}, {"validation": 0.2}])
def test_an_epoch_can_start_at_any_step(images, options):
    data = from_arrays(*images()[:2], **options)
    for share in ((0, 1), (2, 3)):
        whole = copies(data.batches(1, 16, share=share))
        for start in range(len(whole) + 1):
            assert_all_same(copies(data.batches(1, 16, share=share, start=start)), whole[start:])


def test_a_batch_is_valid_until_the_next_but_one(images):
    for options in ({}, {"augment": "shift:1"}):
        data = from_arrays(*images()[:2], **options)
        wanted = [copy for epoch in range(3) for copy in copies(data.batches(epoch, 30))]
        last = None
        for batch, want in zip((b for epoch in range(3) for b in data.batches(epoch, 30)), wanted, strict=True):
            assert_same(batch, want)
            if last is not None:
                assert_same(*last)
            last = batch, want
        kept = [batch.x for batch in data.batches(0, 10)]  # memory is used again
        assert len({x.ctypes.data for x in kept}) == (3 if options else 2)


@pytest.mark.parametrize("options", [{}, {"augment": "shift:1,flip"}, {"placement": "streamed"}], ids=str)
def test_batches_on_a_gpu_are_the_same(file, gpu, options):
    """x and y come on the device; each is valid until the next but one, and the host's arrays are pinned."""
    data = open_data(str(file), seed=3, **options)
    for epoch in (0, 1):  # the second epoch uses the arrays of the first
        wanted = copies(data.batches(epoch, 13, (1, 2)))
        data.to(gpu)
        pinned, found, before = gpu.xp.counts["pinned"], [], None
        for batch in data.batches(epoch, 13, (1, 2)):
            assert gpu.holds(batch.x) and gpu.holds(batch.y) and isinstance(batch.index, np.ndarray)
            if before is not None:
                assert np.array_equal(gpu.host(before.x), found[-1].x)
            before = batch
            x, y = gpu.host(batch.x), gpu.host(batch.y)
            found.append(Batch(x, y, batch.total, batch.epoch, batch.step, batch.index))
            assert all(gpu.holds(part.x) for part in batch.split(2))
        assert_all_same(found, wanted)
        assert gpu.xp.counts["pinned"] > pinned
        data.to(CPU)
    data.close()


def test_two_iterators_do_not_share_memory(images):
    data = from_arrays(*images()[:2])
    list(data.batches(0, 50))
    wanted = [copies(data.batches(epoch, 30)) for epoch in (0, 1)]
    before = []
    for pair in zip(data.batches(0, 30), data.batches(1, 30), *wanted, strict=True):
        for batch, want in [*before, (pair[0], pair[2]), (pair[1], pair[3])]:
            assert_same(batch, want)
        before = [(pair[0], pair[2]), (pair[1], pair[3])]


def test_micro_batches_are_views(images):
    (batch,) = from_arrays(*images()[:2]).batches(0, 100, share=(0, 9))
    assert len(batch.x) == 12
    parts = batch.split(5)
    assert [len(part.x) for part in parts] == [3, 3, 2, 2, 2]
    assert all(np.shares_memory(part.x, batch.x) and part.total == 100 for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.index for part in parts]), batch.index)
    np.testing.assert_array_equal(np.concatenate([part.y for part in parts]), batch.y)
    assert [len(part.x) for part in batch.split(20)] == [1] * 12 + [0] * 8


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_validation_is_stratified_disjoint_and_fixed(file, images, numbers, placement):
    y = images()[1]
    data = open_data(file, placement=placement, validation=0.2, seed=1)
    assert (data.examples, data.train.examples, data.validation.examples) == (80, 80, 20)
    x_held, y_held = data.validation.rows(0, 20)
    held = numbers(x_held)
    np.testing.assert_array_equal(np.bincount(y_held), [5, 5, 5, 5])
    np.testing.assert_array_equal(y_held, y[held])
    for epoch in range(2):
        batches = copies(data.batches(epoch, 9))
        rows = np.concatenate([numbers(batch.x) for batch in batches])
        np.testing.assert_array_equal(np.sort([*rows, *held]), np.arange(100))
        for batch in batches:  # the numbers of a batch's rows are those of data.train
            np.testing.assert_array_equal(data.train.take(batch.index)[0], batch.x)
            np.testing.assert_array_equal(data.train.take(batch.index)[1], batch.y)
    again = open_data(file, validation=0.2, seed=1)
    np.testing.assert_array_equal(numbers(again.validation.rows(0, 20)[0]), held)
    other = open_data(file, validation=0.2, seed=2)
    assert set(numbers(other.validation.rows(0, 20)[0])) != set(held)
    for one in (data, again, other):
        one.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_of_a_split(file, images, placement):
    x, y, x_test, y_test = images()
    data = open_data(file, placement=placement)
    for split, rows, labels in ((data.train, x, y), (data.test, x_test, y_test)):
        got = split.rows(5, 9)
        np.testing.assert_array_equal(got[0], rows[5:9].reshape(4, -1))
        np.testing.assert_array_equal(got[1], labels[5:9])
        got = split.take([19, 3, 3, 0])
        np.testing.assert_array_equal(got[0], rows[[19, 3, 3, 0]].reshape(4, -1))
        np.testing.assert_array_equal(got[1], labels[[19, 3, 3, 0]])
        assert got[0].dtype == np.float32 and got[0].flags.c_contiguous
        assert split.rows(4, 4)[0].shape == (0, 30)
        for wrong in ([-1], [0, split.examples]):
            with pytest.raises(IndexError, match="row numbers go from 0"):
                split.take(wrong)
    data.close()


def test_bad_batches_are_refused_when_asked_for(images):
    data = from_arrays(*images()[:2])
    for arguments, message in [
        ({"batch_size": 0}, "batch size must be 1 or more"),
        ({"batch_size": 10, "start": 11}, "10 steps cannot start at step 11"),
        ({"batch_size": 10, "start": -1}, "cannot start"),
        ({"batch_size": 10, "share": (2, 2)}, "must be \\(rank, size\\)"),
    ]:
        with pytest.raises(UsageError, match=message):
            data.batches(0, **arguments)


def rows_of(*splits):
    return sorted(tuple(row) for split in splits for row in split.rows(0, split.examples)[0] * 3 / split.source.scale)


def test_own_arrays_are_used_in_place():
    x, y = np.random.default_rng(0).random((10, 3)).astype("f4"), np.arange(10) % 3
    x.flags.writeable = False
    data = from_arrays(x, y, x[:4], y[:4], name="mine", scale=2)
    assert (data.name, data.features, data.classes, data.examples) == ("mine", (3,), 3, 10)
    assert np.shares_memory(data.train.source.x, x) and np.shares_memory(data.train.source.y, y)
    assert not data.train.source.x.flags.writeable
    np.testing.assert_array_equal(data.test.rows(0, 4)[0], 2 * x[:4])
    held = from_arrays(x, y, validation=0.3)
    assert (held.train.examples, held.validation.examples) == (7, 3) and np.shares_memory(held.train.source.x, x)
    assert rows_of(held.train, held.validation) == rows_of(data.train)
    assert x.flags.writeable is False and y.flags.writeable is True
    assert from_arrays(x, y).test is None


def test_own_arrays_of_any_form():
    values = from_arrays([[1.0, 2], [3, 4]], [0.5, 1.5], dtype="float64")
    assert values.classes == 0 and values.train.rows(0, 2)[1].dtype == np.float64
    flags = from_arrays(np.eye(4, dtype=bool), np.array([True, False, False, True]))
    assert flags.classes == 2 and flags.train.rows(0, 4)[0].sum() == 4
    strided = np.arange(24, dtype="f2").reshape(4, 6)[:, ::2]
    np.testing.assert_array_equal(from_arrays(strided, [0, 1, 2, 1]).train.rows(0, 4)[0], strided)
    assert from_arrays(np.eye(3), [0, 1, 1], classes=5).classes == 5
    assert from_arrays(np.eye(3), [0, 1, 2], classes=0).train.rows(0, 3)[1].dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.eye(3), [0, 1]), {}, "x has 3 rows, but y has shape \\(2,\\)"),
        ((np.eye(3), [0, 0, 0]), {}, "classes=1 does not fit"),
        ((np.eye(3), [0.0, 1, 1]), {"classes": 2}, "classes=2 does not fit"),
        ((np.eye(3), [0, 1, 2]), {"classes": 2}, "label 2 in row 2"),
        ((np.eye(3) * np.nan, [0, 1, 2]), {}, "x has a NaN"),
        ((np.eye(3), [0, 1, np.nan]), {}, "y has a NaN"),
        ((np.eye(3), ["a", "b", "c"]), {}, "y holds elements of type"),
        ((np.zeros(3), [0, 1, 2]), {}, "shape \\(rows, features...\\)"),
        ((np.zeros((0, 3)), []), {}, "without a 0"),
        ((np.eye(3), [0, 1, 2], np.eye(3)), {}, "x_test and y_test must be given together"),
        ((np.eye(3), [0, 1, 2], None, [0]), {}, "x_test and y_test must be given together"),
        ((np.eye(3), [0, 1, 2], np.eye(2), [0, 1]), {}, "x has rows of shape \\(3,\\), but x_test"),
        ((np.eye(3), [0, 1, 2]), {"augment": "flip"}, "needs images"),
        ((np.eye(3), [0, 1, 2]), {"partition": "column:owner"}, "arrays have no such column"),
    ],
)
def test_bad_arrays_are_refused(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        from_arrays(*arguments, **options)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_a_visit_gathers_any_rows_in_any_order(file, numbers, batch_size):
    data = open_data(file, validation=0.2)
    order = np.random.default_rng(0).permutation(80)[:25]
    for _ in range(2):
        found = copies(data.visit(order, batch_size))
        np.testing.assert_array_equal(np.concatenate([batch.index for batch in found]), order)
        assert [batch.total for batch in found[:-1]] == [batch_size] * (len(found) - 1)
        for batch in found:
            assert len(batch.y) == batch.total
            x, y = data.train.take(batch.index)
            assert np.array_equal(batch.x, x) and np.array_equal(batch.y, y)
    assert list(data.visit(order[:0], 3)) == []


def test_rows_are_divided_among_clients(file, world):
    data = open_data(file, partition="shards:2", seed=3, validation=0.2)
    rows = data.divide(9)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(80))
    assert max(len(np.unique(data.train.take(own)[1])) for own in rows) <= 4
    for count in (0, 81):
        with pytest.raises(UsageError, match="80 training examples cannot be divided"):
            data.divide(count)


def test_opening_says_nothing(file, capfd, caplog):
    with caplog.at_level(logging.INFO, "hpcdl"):
        list(open_data(file).batches(0, 10))
    assert capfd.readouterr() == ("", "") and not caplog.records
