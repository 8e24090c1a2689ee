"""Parameters on their way to actors: the newest, one message at a time, and an empty one at the end."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.kernels.device import CPU
from hpcdl.rl.parameter_broadcast import Publisher, Receiver
from hpcdl.rl.tally import BytesByKind

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.four]
SIZE = 100_000


def version(number):
    return np.full(SIZE, float(number))


def test_a_slow_actor_gets_the_newest_and_has_one_message_under_way(bare):
    """Rank 0 publishes; rank 1 is slow, the others take each version as it comes."""
    comm = Communicator(bare)
    by_kind = BytesByKind(comm.traffic)
    if comm.rank == 0:
        publisher = Publisher(comm, range(1, comm.size), by_kind)
        for number in range(5):
            parameters = version(number)
            publisher.publish(parameters, CPU)
            parameters[:] = -1  # what the learner makes of its vector then travels with no message
            comm.wait_until(lambda: all(publisher._free(each) for each in range(2, comm.size)))
        sent = 1 + 5 * (comm.size - 2)
        assert by_kind.sent["parameters"] == comm.traffic.bytes == sent * 8 * SIZE
        assert publisher.behind == {1}
        publisher.catch_up(version(99), CPU)  # it has not taken the first one
        assert by_kind.sent["parameters"] == sent * 8 * SIZE
        bare.Barrier()
        comm.wait_until(lambda: publisher._free(1))
        publisher.catch_up(version(4), CPU)
        assert by_kind.sent["parameters"] == (sent + 1) * 8 * SIZE and not publisher.behind
        publisher.catch_up(version(100), CPU)  # nobody is behind
        publisher.close()
        assert by_kind.sent["parameters"] == (sent + 1) * 8 * SIZE == comm.traffic.bytes
    else:
        receiver = Receiver(comm, 0, np.zeros(SIZE), by_kind)
        if comm.rank > 1:
            receiver.first()
            seen = [receiver.parameters[0]]
            while seen[-1] < 4:
                comm.wait_until(lambda: receiver.coming.done)
                seen.append(receiver.newest()[0])
            assert seen == sorted(seen) and seen[0] >= 0 and (receiver.parameters == 4).all()
        bare.Barrier()
        if comm.rank == 1:
            receiver.first()
            assert set(receiver.parameters) in ({0}, {4})  # the newest may have come as soon as it had the first
        receiver.close()
        assert receiver.over and (receiver.parameters == 4).all()
        assert (receiver.newest() == 4).all()  # and nothing more comes
        assert by_kind.sent["parameters"] == 0 == comm.traffic.bytes
    for request in list(activity.in_flight):  # all that was sent has been taken
        request.test()
    bare.Barrier()
    assert not activity.in_flight and not bare.Iprobe()
    comm.free()
