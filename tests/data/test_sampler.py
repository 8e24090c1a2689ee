"""Orders and shares: the shares of any number of ranks are the same batches, and an epoch visits every row once."""

import numpy as np
import pytest

from hpcdl.data.sampler import BlockOrder, global_order, local_order, local_share, steps_per_epoch

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


@pytest.mark.parametrize("counts", [[10], [4, 4, 3], [0, 5, 0, 0, 2], [1] * 9])
def test_block_pieces_cover_the_order(counts):
    order = BlockOrder(5, 2, np.array(counts))
    whole = [(block, row) for block in order.blocks for row in order.rows(block)]
    assert sorted(whole) == [(block, row) for block, count in enumerate(counts) for row in range(count)]
    for start in range(sum(counts) + 1):
        for stop in range(start, sum(counts) + 1):
            pieces = list(order.pieces(start, stop))
            assert all(first < last for _, first, last in pieces)
            got = [(block, row) for block, first, last in pieces for row in order.rows(block)[first:last]]
            assert got == whole[start:stop]


def test_block_order_shuffles_blocks_and_rows():
    first, second = (BlockOrder(0, epoch, np.full(20, 30)) for epoch in (0, 1))
    assert list(first.blocks) != list(second.blocks) != sorted(second.blocks)
    assert list(first.rows(0)) != list(second.rows(0)) != list(second.rows(1))
