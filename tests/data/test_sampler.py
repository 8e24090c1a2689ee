"""Orders and shares: the shares of any number of ranks are the same batches, and an epoch visits every row once."""

from pathlib import Path

import numpy as np
import pytest

from hpcdl.data.order.sampler import WindowOrder, global_order, local_order, local_share, steps_per_epoch

CASES = [(100, 10), (100, 7), (101, 64), (5, 1), (5, 8), (1, 1), (97, 3)]


def test_orders_are_permutations_that_depend_on_seed_and_epoch():
    orders = [global_order(0, 50, 0), global_order(0, 50, 1), global_order(1, 50, 0)]
    orders += [local_order(0, 50, 0, 0), local_order(0, 50, 0, 1), local_order(0, 50, 1, 0)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(50))
    assert len({tuple(order) for order in orders}) == len(orders)
    np.testing.assert_array_equal(orders[1], global_order(0, 50, 1))


@pytest.mark.parametrize("counts", [[10], [4, 4, 4], [1, 1, 1, 1], [0, 9, 0, 2], [30, 1, 7], [3, 0, 0]])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_local_shares_visit_every_row_once_in_even_batches(counts, batch_size):
    before = np.cumsum([0, *counts])
    examples = int(before[-1])
    steps = steps_per_epoch(examples, batch_size)
    at = [0] * len(counts)
    totals = []
    for step in range(steps):
        shares = [local_share(*before[rank : rank + 2], examples, steps, step) for rank in range(len(counts))]
        for rank, share in enumerate(shares):
            assert share.start == at[rank] <= share.stop
            at[rank] = share.stop
        lengths = [share.stop - share.start for share in shares]
        assert [share.offset for share in shares] == list(np.cumsum([0, *lengths])[:-1])
        assert {share.total for share in shares} == {sum(lengths)}
        totals.append(sum(lengths))
    assert at == counts
    assert min(totals) >= 1 and max(totals) <= batch_size and max(totals) - min(totals) <= 1


def rows_of(order, start, stop):
    """order[start:stop], as rows of blocks that follow one another."""
    first = np.cumsum([0, *order.counts])
    visited = []
    for slot, begin, end in order.slots(start, stop):
        assert begin < end
        rows = np.concatenate([first[order.blocks[at]] + order.rows(at)[part] for at, part in order.pieces(slot)])
        visited += rows[order.within(slot, len(rows))][begin:end].tolist()
    return visited


@pytest.mark.parametrize("window", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("counts", [[10], [4, 4, 3], [0, 5, 0, 0, 2], [1] * 9, [20, 1, 0, 7]])
def test_windows_hold_every_row_once_and_an_epoch_can_start_anywhere(counts, window):
    order = WindowOrder(5, 2, np.array(counts), window)
    whole = rows_of(order, 0, sum(counts))
    assert sorted(whole) == list(range(sum(counts)))
    assert order.examples().tolist() == whole
    for start in range(sum(counts) + 1):
        for stop in range(start, sum(counts) + 1):
            assert rows_of(order, start, stop) == whole[start:stop]
    for slot in range(len(order.ends)):  # what a reader has to hold
        places = [place for place, _ in order.pieces(slot)]
        assert len(places) <= window and all(slot - window < place <= slot for place in places)


def test_a_window_of_one_block_is_the_order_of_versions_without_windows():
    fixed = [8, 10, 7, 11, 9, 0, 2, 3, 1, 5, 6, 4]
    assert rows_of(WindowOrder(5, 2, np.array([4, 0, 3, 5]), 1), 0, 12) == fixed
    assert rows_of(WindowOrder(5, 2, np.array([4, 0, 3, 5]), 3), 0, 12) == [10, 8, 11, 2, 0, 7, 9, 3, 5, 1, 6, 4]


def test_orders_of_blocks_differ_between_epochs():
    first, second = (WindowOrder(0, epoch, np.full(20, 30), 4) for epoch in (0, 1))
    assert list(first.blocks) != list(second.blocks) != sorted(second.blocks)
    assert list(first.rows(0)) != list(second.rows(0)) != list(second.rows(1))
    assert list(first.within(5, 30)) != list(second.within(5, 30)) != list(second.within(6, 30))


def mixing(order):
    """Means, as parts of all rows: how far a row goes from its place in the file; how far neighbours in the file are
    apart in the epoch; how far neighbours in the epoch are apart in the file. 1/3 each for a shuffle of all rows."""
    place = np.argsort(order)
    means = np.abs(place - np.arange(len(order))).mean(), np.abs(np.diff(place)).mean(), np.abs(np.diff(order)).mean()
    return [float(each) / len(order) for each in means]


def test_mixing_by_windows_as_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for window in (1, 2, 8, 32, 0):
        orders = [
            rows_of(WindowOrder(seed, 0, np.full(100, 100), window), 0, 10000)
            if window
            else global_order(seed, 10000, 0)
            for seed in range(10)
        ]
        means = np.mean([mixing(np.array(order)) for order in orders], axis=0)
        line = f"| {window or 'a shuffle of all rows'} | " + " | ".join(f"{each:.3f}" for each in means) + " |"
        assert line in page, line
