"""Framed messages of several ranks come each in order, and no receive is left posted for one that sends no more."""

from types import SimpleNamespace

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.counting import Counters
from hpcdl.comm.framing import Frame, Inbox
from hpcdl.comm.progress import activity
from hpcdl.comm.trace import Traffic

NOTE = Frame(3, ["rank", ("numbers", 2)], payload=8, number=np.int64)
TELLING = Frame(5, ["loss", "bytes", "messages"])


def test_a_header_is_its_numbers_in_order():
    """What is not said is 0; what is changed later changes the message."""
    header = NOTE.header(numbers=[4, 5])
    vector = NOTE.vector(header)
    assert vector.dtype == np.int64 and vector.tolist() == [0, 4, 5] and NOTE.bytes == vector.nbytes
    header["rank"] = 9
    assert vector.tolist() == [9, 4, 5] and NOTE.read(np.append(vector, 7)) == header


def test_a_header_tells_what_its_sender_has_sent_with_it():
    traffic, tags, header = Traffic(push=Counters(bytes=1000, messages=4)), [], TELLING.header(loss=0.5)
    comm = SimpleNamespace(traffic=traffic, ipush=lambda array, to, tag: tags.append((to, tag)))
    TELLING.send(comm, 1, header)
    assert TELLING.vector(header).tolist() == [0.5, 1024, 5]
    TELLING.send(comm, 1, header, np.zeros(3), np.zeros(1))
    assert TELLING.vector(header).tolist() == [0.5, 1056, 7]
    assert tags == [(1, 5), (1, 5), (1, 6), (1, 7)]
    traffic["all_reduce"].messages = None  # a library's own hides them
    TELLING.send(comm, 1, header)
    assert header["bytes"] == 1024 and np.isnan(header["messages"])


def test_each_rank_is_heard_in_its_order(bare):
    comm, rounds = Communicator(bare, "ring"), 5
    if comm.rank > 0:
        for i in range(rounds * comm.rank):
            requests = NOTE.send(comm, 0, NOTE.header(rank=comm.rank, numbers=i), np.full(4, i))
            comm.wait_until(lambda requests=requests: all(each.done for each in requests))
    else:
        inbox = Inbox(comm, NOTE, range(1, comm.size))
        heard = {rank: [] for rank in range(1, comm.size)}
        while inbox.pending:
            comm.wait_until(inbox.arrived, patient=True)
            for source in inbox.arrived():
                header, values = inbox.take(source), np.empty(4, int)
                NOTE.fill(comm, source, values)
                assert header["rank"] == source and (values == header["numbers"][0]).all()
                heard[source].append(int(values[0]))
                if len(heard[source]) < rounds * source:
                    inbox.listen(source)
        assert heard == {rank: list(range(rounds * rank)) for rank in heard}
    assert not activity.in_flight
