"""A communicator that counts what really passes through it, so that the bytes a run reports are measured.

The algorithms are handed this subclass of `mpi4py.MPI.Intracomm` and know nothing of it. Each operation in flight
gets an instance of its own with tags of its own, so that the messages of two operations never meet. Counting costs
about 1 us a call. Persistent and partitioned sends, and pickled messages (which serve set-up only), are not
counted.
"""

from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

TAGS = 32  # each operation in flight has this many tags; MPI guarantees at least 32,768
LANES = 1024


@dataclass
class Counters:
    """What one rank spent on one kind of operation. `messages` is None when a library's own collective hides them."""

    calls: int = 0
    bytes: int = 0
    messages: int | None = 0
    seconds: float = 0.0
    blocked_seconds: float = 0.0


def nbytes(buffer) -> int:
    """The payload of an mpi4py buffer argument: an array, or [array, (count,) type]."""
    if isinstance(buffer, np.ndarray):
        return buffer.nbytes
    if isinstance(buffer, list | tuple):
        counts = [item for item in buffer[1:] if isinstance(item, int)]
        types = [item for item in buffer if isinstance(item, MPI.Datatype)]
        if counts and types:
            return counts[0] * types[0].Get_size()
        return nbytes(buffer[0])
    return 0 if buffer is MPI.IN_PLACE else memoryview(buffer).nbytes


class CountingIntracomm(MPI.Intracomm):
    """`CountingIntracomm(comm)` behaves as `comm`, adds what it sends to `counters` and shifts all tags to its lane."""

    def __init__(self, comm: MPI.Intracomm):
        self.counters = Counters()
        self.lane = 0

    def count(self, buffer):
        self.counters.bytes += nbytes(buffer)
        if self.counters.messages is not None:
            self.counters.messages += 1

    def shift(self, tag: int) -> int:
        return self.lane * TAGS + (0 if tag == MPI.ANY_TAG else tag)

    def Sendrecv(self, sendbuf, dest, sendtag=0, recvbuf=None, source=MPI.ANY_SOURCE, recvtag=MPI.ANY_TAG, status=None):
        self.count(sendbuf)
        tags = self.shift(sendtag), self.shift(recvtag)
        return MPI.Intracomm.Sendrecv(self, sendbuf, dest, tags[0], recvbuf, source, tags[1], status)

    def Sendrecv_replace(self, buf, dest, sendtag=0, source=MPI.ANY_SOURCE, recvtag=MPI.ANY_TAG, status=None):
        self.count(buf)
        return MPI.Intracomm.Sendrecv_replace(self, buf, dest, self.shift(sendtag), source, self.shift(recvtag), status)


def _counted_send(name):
    send = getattr(MPI.Intracomm, name)

    def method(self, buf, dest, tag=0):
        self.count(buf)
        return send(self, buf, dest, self.shift(tag))

    return method


def _shifted_receive(name):
    receive = getattr(MPI.Intracomm, name)

    def method(self, buf, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, *status):
        return receive(self, buf, source, self.shift(tag), *status)

    return method


def _counted_collective(name):
    collective = getattr(MPI.Intracomm, name)

    def method(self, sendbuf, *arguments, **options):
        payload = arguments[0] if sendbuf is MPI.IN_PLACE else sendbuf  # in place, the receive buffer is the payload
        self.count(payload)
        self.counters.messages = None
        return collective(self, sendbuf, *arguments, **options)

    return method


for _name in ("Send", "Bsend", "Ssend", "Rsend", "Isend", "Ibsend", "Issend", "Irsend"):
    setattr(CountingIntracomm, _name, _counted_send(_name))
for _name in ("Recv", "Irecv"):
    setattr(CountingIntracomm, _name, _shifted_receive(_name))
for _name in ("Allreduce", "Reduce", "Bcast", "Allgather", "Gather", "Scatter", "Alltoall", "Reduce_scatter_block"):
    setattr(CountingIntracomm, _name, _counted_collective(_name))
    setattr(CountingIntracomm, "I" + _name.lower(), _counted_collective("I" + _name.lower()))
