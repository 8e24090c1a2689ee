"""Everyone sends everything to everyone: (N - 1) K values per rank, in one step."""

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce.direct import direct_all_reduce


def test_counts(bare):
    comm, length = Communicator(bare, allreduce="direct"), 1009
    comm.all_reduce(np.ones(length))
    counted = comm.traffic["all_reduce"]
    assert (counted.messages, counted.bytes) == (comm.size - 1, (comm.size - 1) * length * 8)


class Recorder:
    """A communicator that only notes to whom its rank sends."""

    def __init__(self, rank, size):
        self.Get_rank, self.Get_size, self.sent_to = lambda: rank, lambda: size, []

    def Isend(self, vector, to):
        self.sent_to.append(to)
        return MPI.REQUEST_NULL

    def Irecv(self, vector, source):
        return MPI.REQUEST_NULL


def test_no_two_ranks_send_to_the_same_one_at_the_same_time_and_there_is_one_step():
    for size in range(2, 8):
        recorders = [Recorder(rank, size) for rank in range(size)]
        for each in recorders:
            assert len([*direct_all_reduce.steps(each, np.ones(3))]) == 1
        turns = list(zip(*(each.sent_to for each in recorders), strict=True))
        assert len(turns) == size - 1 and all(sorted(turn) == list(range(size)) for turn in turns)
