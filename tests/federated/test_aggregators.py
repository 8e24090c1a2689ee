"""Aggregators: sums over the clients of all ranks, modulo 2^64; late answers come a round late."""

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.federated.aggregators import LateSum, SumAggregator


def test_sums_may_wrap_around_as_masks_make_them(world):
    """Whatever is added on the way and taken off again modulo 2^64 leaves no trace."""
    comm = Communicator(world, "ring")
    random = np.random.default_rng(world.rank)
    masks = random.integers(-(2**63), 2**63, (50, 9))
    total = SumAggregator(comm, 9)
    for _ in range(2):
        total.begin([])
        for client, mask in enumerate(masks):
            total.add(client, mask + np.arange(9))
            total.add(client, -mask)
        assert np.array_equal(total.finish(), 50 * world.size * np.arange(9))
    comm.free()


def test_what_is_late_comes_in_the_next_round_and_once(world):
    comm = Communicator(world, "ring")
    late, came = LateSum(comm, 4), []
    assert np.array_equal(late.tracked()["pending"].array, np.zeros(4))
    for answers in (2, 0, 5, 1):
        late.begin([])
        for client in range(answers):
            late.add(client, np.arange(4))
        total = np.full(4, 100)
        late.add_pending_to(total)
        came.append(total)
        assert np.array_equal(late.tracked()["pending"].array, answers * world.size * np.arange(4))
    assert np.array_equal(came, [100 + world.size * sent * np.arange(4) for sent in (0, 2, 0, 5)])
    comm.free()
