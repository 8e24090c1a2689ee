"""Nobody leaves before everybody has come, in ceil(log2 N) rounds."""

import math

from hpcdl.comm import Communicator


def test_nobody_leaves_before_the_last_has_come(bare):
    comm = Communicator(bare)
    for last in range(comm.size):  # the last one enters only when all others have told it that they are inside
        request = None
        if comm.rank != last:
            request = comm.ibarrier()
            assert not request.test()  # the last one has not come: it waits for the sign that follows
            comm.notify(last, tag=7)
        else:
            for other in range(comm.size):
                if other != last:
                    comm.wait(source=other, tag=7)
            request = comm.ibarrier()
        request.wait()
    rounds = math.ceil(math.log2(comm.size))
    assert comm.traffic["barrier"].messages == comm.size * rounds
    assert comm.traffic["barrier"].bytes == 0
    comm.barrier()
