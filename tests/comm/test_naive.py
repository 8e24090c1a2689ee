"""The driver's link carries 2 (N - 1) K values."""

import numpy as np

from hpcdl.comm import Communicator


def test_counts(bare):
    comm, length = Communicator(bare, allreduce="naive"), 1009
    comm.all_reduce(np.ones(length))
    counted = comm.traffic["all_reduce"]
    messages = comm.size - 1 if comm.rank == 0 else 1
    assert (counted.messages, counted.bytes) == (messages, messages * length * 8)
    sent = np.array([counted.bytes])
    comm.reduce(sent)
    assert comm.rank != 0 or sent[0] == 2 * (comm.size - 1) * length * 8  # all of it passes the driver's link
