"""Methods of compression that know more than a vector: in training they give the steps that their papers have."""

import numpy as np
import pytest
from paths import agree

from hpcdl.strategies import all_reduce

pytestmark = pytest.mark.four

WAYS = {"whole": {}, "in buckets": {"overlap": True, "bucket_mib": 1e-6}}


@pytest.fixture(params=WAYS)
def way(request):
    """Arguments of the strategy: the gradient reduced at once, and in buckets."""
    return WAYS[request.param]


def same_bits(run, comm):
    return all(np.array_equal(run.parameters, other) for other in comm.allgather(run.parameters))


def test_powersgd_of_full_rank_is_no_compression(way, follow, alone, comm):
    reference = alone(optimizer="adam")
    run = follow(comm, all_reduce.train, optimizer="adam", own=way | {"compress": "powersgd:rank=99,ratio=0"})
    agree(run, reference, 1e-10)
    assert same_bits(run, comm)
    run = follow(comm, all_reduce.train, optimizer="adam", own=way | {"compress": "powersgd:rank=1"})
    assert comm.size == 1 or np.abs(run.path[-1] - reference.path[-1]).max() > 1e-3
    assert same_bits(run, comm)


def test_resumed_is_never_stopped(way, resumes, world):
    _, run = resumes(4, all_reduce.train, own=way | {"compress": "powersgd:rank=1"}, optimizer="momentum")
    assert run.state.tracked["residual"].array.any() == run.state.tracked["factors"].array.any() == (world.size > 1)
