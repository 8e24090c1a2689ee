"""Everyone sends everything to everyone: (N - 1) K values per rank, in one step."""

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.allreduce.direct import direct


def test_counts(each_group):
    def body(bare):
        comm, length = Communicator(bare, allreduce="direct"), 1009
        comm.all_reduce(np.ones(length))
        counted = comm.traffic["all_reduce"]
        assert (counted.messages, counted.bytes) == (comm.size - 1, (comm.size - 1) * length * 8)
        comm.free()

    each_group(body)


def test_one_step(world):
    steps = 0
    for requests in direct.steps(world, np.ones(3)):
        for request in requests:
            request.Wait()
        steps += 1
    assert steps == 1
