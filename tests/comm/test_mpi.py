"""The library's own: the payload is counted, the messages are not known."""

import numpy as np
import pytest

from hpcdl.comm import Communicator


def test_counts(world):
    comm = Communicator(world, allreduce="mpi")
    comm.all_reduce(np.ones(1009, "float32"))
    comm.iall_reduce(np.ones(10)).wait()
    counted = comm.traffic["all_reduce"]
    assert (counted.calls, counted.bytes, counted.messages) == (2, 4036 + 80, None)
    assert comm.traffic.messages is None
    comm.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("length", [10, 1000, 300_000])
def test_ranks_that_have_something_in_flight_match_those_that_have_not(length, world):
    comm = Communicator(world, allreduce="mpi")
    vector, box = np.full(length, comm.rank + 1.0), np.zeros(10)
    coming = comm.iwait(box, source=1) if comm.rank == 0 else None
    comm.all_reduce(vector)
    if comm.rank == 1:
        comm.push(np.ones(10), to=0)
    if coming:
        coming.wait()
        assert (box == 1).all()
    assert (vector == comm.size * (comm.size + 1) / 2).all()
    comm.free()
