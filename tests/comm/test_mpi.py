"""The library's own: the payload is counted, the messages are not known."""

import numpy as np

from hpcdl.comm import Communicator


def test_counts(world):
    comm = Communicator(world, allreduce="mpi")
    comm.all_reduce(np.ones(1009, "float32"))
    comm.iall_reduce(np.ones(10)).wait()
    counted = comm.traffic["all_reduce"]
    assert (counted.calls, counted.bytes, counted.messages) == (2, 4036 + 80, None)
    assert comm.traffic.messages is None
