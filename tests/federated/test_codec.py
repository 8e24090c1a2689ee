"""Fixed point of what clients send: it holds the largest sum there may be, and says who went too far."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.errors import TrainingError
from hpcdl.federated.codec import RANGE_BITS, Codec, fraction_bits
from hpcdl.kernels import fixed_point


def test_fixed_point_holds_the_largest_sum_there_may_be():
    for examples in (1, 29, 1437, 60000, 2**20, 2**20 - 1):
        bits = fraction_bits(examples)
        assert 2 * examples * 2**RANGE_BITS * 2**bits <= 2**63
        limit = np.nextafter(2.0**RANGE_BITS, 0)
        fixed, back = np.zeros(2, np.int64), np.zeros(2)
        fixed_point.encode(np.array([limit, -limit]), examples * 2.0**bits, fixed)
        total = fixed + fixed  # this round's and the late ones'
        fixed_point.decode(back, 2.0**-bits / examples / 2, total)
        assert np.allclose(back, [limit, -limit], rtol=1e-12) and abs(int(total[0])) < 2**63
    values = np.random.default_rng(0).standard_normal(1000)
    fixed, back = np.zeros(1000, np.int64), np.zeros(1000)
    fixed_point.encode(values, 2.0**30, fixed)
    fixed_point.decode(back, 2.0**-30, fixed)
    assert 0 < np.abs(back - values).max() <= 2.0**-31


@pytest.mark.parametrize("far", [2.0**RANGE_BITS, -(2.0**RANGE_BITS), 1e200, np.inf, np.nan])
def test_all_ranks_hear_who_went_too_far(far, world):
    comm, codec = Communicator(world, "ring"), Codec(np.zeros(3), 9)
    codec.encode(5, np.array([0.0, np.nextafter(2.0**RANGE_BITS, 0), 0.0]), 1)
    codec.refuse_far_changes(comm, 0)
    if world.rank == world.size - 1:
        codec.encode(7, np.array([0.0, far, 0.0]), 1)
    with pytest.raises(TrainingError, match="client 7 has a 2-norm of 1024 or more, or is not finite, in round 4; a"):
        codec.refuse_far_changes(comm, 3)
    comm.free()
