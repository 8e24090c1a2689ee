"""Requests of several ranks come each in order, and no receive is left posted for a rank that will not send again."""

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox
from hpcdl.comm.progress import activity


def test_each_rank_is_heard_in_its_order(each_group):
    def body(bare):
        comm, rounds = Communicator(bare, "ring"), 5
        if comm.rank > 0:
            for i in range(rounds * comm.rank):
                comm.push(np.array([comm.rank, i]), 0, tag=3)
        else:
            inbox = Inbox(comm, 3, range(1, comm.size), 2, np.int64)
            heard = {rank: [] for rank in range(1, comm.size)}
            while inbox.pending:
                comm.wait_until(inbox.arrived, patient=True)
                for source in inbox.arrived():
                    message = inbox.take(source)
                    assert message[0] == source
                    heard[source].append(message[1])
                    if len(heard[source]) < rounds * source:
                        inbox.listen(source)
            assert heard == {rank: list(range(rounds * rank)) for rank in heard}
        assert not activity.in_flight
        comm.free()

    each_group(body)


def test_look_takes_messages_in_without_waiting(world):
    if world.size == 1:
        return
    comm = Communicator(world, "ring")
    if comm.rank == 1:
        comm.push(np.arange(4.0), 0, tag=3)
    elif comm.rank == 0:
        inbox = Inbox(comm, 3, [1], 4, float)
        while not inbox.arrived():
            inbox.look()
        assert np.array_equal(inbox.take(1), np.arange(4.0)) and not activity.in_flight
    comm.free()
