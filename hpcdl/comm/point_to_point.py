"""Messages between two ranks: push, pull, notify and wait."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm.barrier import EMPTY
from hpcdl.comm.door import Door, flat
from hpcdl.comm.exposed import Exposed
from hpcdl.comm.progress import activity, clock, nap_until
from hpcdl.comm.requests import Request
from hpcdl.comm.staging import staged
from hpcdl.comm.steps import block
from hpcdl.comm.told import SOME
from hpcdl.errors import UsageError

ANY = MPI.ANY_SOURCE


class Arrival(NamedTuple):
    """What `wait` received: from which rank, and how many elements."""

    source: int
    size: int


def arrival(status: MPI.Status, vector: np.ndarray) -> Arrival:
    """What the status says of a message into `vector`."""
    return Arrival(status.source, status.Get_elements(MPI.BYTE) // vector.itemsize)


def one_message(start: Callable[[], MPI.Request]) -> Iterator[list[MPI.Request]]:
    """The steps of an operation of one message, which start() sends; from here on its bytes count."""
    yield [start()]


def send(message: tuple[MPI.Intracomm, np.ndarray, int, int]) -> tuple[int, int]:
    """Send, and wait until the vector may be changed; returns the nanoseconds of the wait, and no bytes beside."""
    comm, vector, to, tag = message
    request = comm.Isend(vector, to, tag)
    start = clock()
    block(request.Test)
    return clock() - start, 0


def receive(message: tuple[MPI.Intracomm, np.ndarray, int, int, MPI.Status]) -> tuple[int, int]:
    """Wait for a message; returns the nanoseconds of the wait, and no bytes beside."""
    comm, vector, source, tag, status = message
    request = comm.Irecv(vector, source, tag)
    start = clock()
    block(lambda: request.Test(status))
    return clock() - start, 0


class PointToPoint(Door):
    """The operations of two ranks, which may never be answered. Tags are the caller's."""

    @staged(back=False, collective=False)
    def ipush(
        self,
        array: np.ndarray,
        to: int,
        tag: int = 0,
        into: Exposed | None = None,
        at: int = 0,
        op: str = "replace",
    ) -> Request:
        """Send `array` to rank `to`, which takes it by `wait(array, source)`.

        into: write it straight into what `to` exposes, from element `at` on, while that rank computes; op "sum"
        adds it.
        """
        vector = flat(array)
        self._check_rank(to)
        self._check_tag(tag)
        comm, peer = self._counted("push", self.mpi), self._peer("to", to)
        if into is None:
            return self._request("push", one_message(lambda: comm.Isend(vector, to, tag)), comm, peer=peer, other=to)
        into.check_transfer(vector, to, at)
        if op not in ("replace", "sum"):
            raise UsageError(f"push: unknown op {op!r}; known: replace, sum")
        put = into.window.Rput if op == "replace" else into.window.Raccumulate
        options = {} if op == "replace" else {"op": MPI.SUM}

        def write() -> "MPI.Request":
            comm.count(vector, to)
            return put(vector, to, target=at, **options)

        return self._request("push", one_message(write), comm, lambda: into.window.Flush(to), peer=peer, other=to)

    def push(
        self,
        array: np.ndarray,
        to: int,
        tag: int = 0,
        into: Exposed | None = None,
        at: int = 0,
        op: str = "replace",
    ) -> None:
        vector = self._short_vector(array) if into is None else None
        if vector is None or not self._known(to, tag):
            self.ipush(array, to, tag, into, at, op).wait()
            return
        comm = self._counted("push", self.mpi)
        message, peer = (comm, vector, to, tag), self._peer("to", to)
        self._short_way("push", comm.counters, send, message, peer=peer, awaits=self._awaits(to))

    @staged(out=False, collective=False)
    def ipull(self, array: np.ndarray, source: int, of: Exposed, at: int = 0) -> Request:
        """Fetch into `array` the elements from `at` on of what rank `source` exposes, while that rank computes."""
        vector = flat(array)
        self._check_rank(source)
        of.check_transfer(vector, source, at)
        comm = self._counted("pull", self.mpi)
        comm.count(EMPTY, source)  # the values are sent by `source`; what this rank sends is the question
        return self._request(
            "pull",
            iter([[of.window.Rget(vector, source, target=at)]]),
            comm,
            peer=self._peer("from", source),
            other=source,
        )

    def pull(self, array: np.ndarray, source: int, of: Exposed, at: int = 0) -> None:
        self.ipull(array, source, of, at).wait()

    def inotify(self, to: int, tag: int = 0) -> Request:
        """Give rank `to` a sign, an empty message, for which it can `wait(source=...)`."""
        self._check_rank(to)
        self._check_tag(tag)
        comm = self._counted("notify", self.mpi)
        steps = one_message(lambda: comm.Isend(EMPTY, to, tag))
        return self._request("notify", steps, comm, peer=self._peer("to", to), other=to)

    def notify(self, to: int, tag: int = 0) -> None:
        if activity.in_flight or not self._known(to, tag):
            self.inotify(to, tag).wait()
            return
        comm = self._counted("notify", self.mpi)
        message, peer = (comm, EMPTY, to, tag), self._peer("to", to)
        self._short_way("notify", comm.counters, send, message, peer=peer, awaits=self._awaits(to))

    @staged(collective=False)
    def iwait(self, array: np.ndarray | None = None, source: int = ANY, tag: int = 0) -> Request:
        """Pause until a push (into `array`) or, without an array, a notification comes; the result is its `Arrival`."""
        vector = EMPTY if array is None else flat(array)
        if source != ANY:
            self._check_rank(source)
        self._check_tag(tag)
        comm, status = self._counted("wait", self.mpi), MPI.Status()
        peer = None if source == ANY else self._peer("from", source)
        steps = iter([[comm.Irecv(vector, source, tag)]])
        other = SOME if source == ANY else source
        return self._request("wait", steps, comm, lambda: arrival(status, vector), [status], peer, other)

    def wait(self, array: np.ndarray | None = None, source: int = ANY, tag: int = 0) -> Arrival:
        vector = self._short_vector(EMPTY if array is None else array)
        if vector is None or not self._known(0 if source == ANY else source, tag):
            return self.iwait(array, source, tag).wait()
        comm, status = self._counted("wait", self.mpi), MPI.Status()
        peer = None if source == ANY else self._peer("from", source)
        awaits = self._awaits(SOME if source == ANY else source)
        self._short_way("wait", comm.counters, receive, (comm, vector, source, tag, status), peer=peer, awaits=awaits)
        return arrival(status, vector)

    def wait_until(
        self,
        condition: Callable[[], object],
        meanwhile: Callable[[], bool] | None = None,
        patient: bool = False,
    ) -> None:
        """Pause until `condition()`, in naps, while what is in flight goes on; the options are those of `nap_until`."""
        waited = nap_until(condition, "wait", meanwhile, patient, self._awaits(SOME))
        self.traffic["wait"].seconds += waited
        self.traffic["wait"].blocked_seconds += waited
