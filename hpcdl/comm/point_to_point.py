"""Point-to-point operations: push, pull, notify and wait."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import from_numpy_dtype

from hpcdl.comm.call_path import CallPath, flat
from hpcdl.comm.collective_schedule import Delivery, Step
from hpcdl.comm.diagnostics.call_signature import SOME
from hpcdl.comm.primitives.barrier import EMPTY
from hpcdl.comm.progress import activity, clock, nap_until
from hpcdl.comm.requests import Request
from hpcdl.comm.rma_window import ExposedArray
from hpcdl.comm.staging import staged
from hpcdl.errors import UsageError

ANY = MPI.ANY_SOURCE
"""The `source` of a `wait` that takes a message of any rank."""


class Arrival(NamedTuple):
    """Result of `wait`: the source rank and the number of elements."""

    source: int
    size: int


def arrival(comm: MPI.Intracomm, vector: np.ndarray, source: int, status: MPI.Status | None) -> Arrival:
    """Return the Arrival of a message in `vector`. UsageError if it ends in mid-element or (status None) is longer."""
    if status is None:
        what = f"a message of {source_text(source)} is longer than the receiving array of {vector.size} {vector.dtype}"
        raise UsageError(f"rank {comm.rank}: {what}; pass `wait` an array as long as the pushed one")
    size, rest = divmod(status.Get_elements(MPI.BYTE), vector.itemsize)
    if rest:
        what = f"{size * vector.itemsize + rest} bytes, not a whole number of {vector.dtype}"
        advice = "pass `wait` an array of the pushed array's type"
        raise UsageError(f"rank {comm.rank}: the message of rank {status.source} has {what}; {advice}")
    return Arrival(status.source, size)


def source_text(source: int) -> str:
    """Return the text for the source of a message."""
    return "some rank" if source == ANY else f"rank {source}"


def plain_send(comm: MPI.Intracomm, vector: np.ndarray, to: int, tag: int) -> Iterator[Step]:
    """Send a message and yield the step that waits for it; sent here, its bytes count as those of the operation."""
    yield [comm.Isend(vector, to, tag)]


def send(message: tuple[MPI.Intracomm, np.ndarray, int, int]) -> tuple[int, int]:
    """Send a vector, and wait until it may be changed; return the nanoseconds waited, and 0 (no other bytes)."""
    comm, vector, to, tag = message
    request = comm.Isend(vector, to, tag)
    start = clock()
    activity.block(request.Test)
    return clock() - start, 0


def receive(message: tuple[MPI.Intracomm, np.ndarray, int, int, MPI.Status]) -> tuple[int, int]:
    """Wait for a message; return the nanoseconds waited, and 0, the bytes moved without a message."""
    comm, vector, source, tag, status = message
    request = comm.Irecv(vector.view(np.uint8), source, tag)  # with other types MPICH aborts at half an element
    start = clock()
    try:
        activity.block(lambda: request.Test(status))
    except MPI.Exception as error:
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            arrival(comm, vector, source, None)
        raise
    return clock() - start, 0


LABEL = np.dtype([("kind", "S24"), ("size", np.int64)])
MOST_BYTES = 2**31 - 1  # of a datatype that every library supports


def labelled_datatype(label: np.ndarray, vector: np.ndarray) -> MPI.Datatype:
    """Return the datatype of a label and a vector, at any addresses, as one message."""
    whole = vector.nbytes <= MOST_BYTES
    kinds = [MPI.BYTE, MPI.BYTE if whole else from_numpy_dtype(vector.dtype)]
    lengths = [label.nbytes, vector.nbytes if whole else vector.size]
    return MPI.Datatype.Create_struct(lengths, [MPI.Get_address(label), MPI.Get_address(vector)], kinds).Commit()


def labelled_send(comm: MPI.Intracomm, vector: np.ndarray, to: int, tag: int, kind: str) -> Iterator[Step]:
    """Send a message with a label, its kind and size; yield the step that waits for it."""
    label = np.array([(kind.encode(), vector.size)], LABEL)
    message = labelled_datatype(label, vector)
    request = comm.Isend([MPI.BOTTOM, 1, message], to, tag)
    message.Free()
    yield [request]


def plain_receive(
    comm: MPI.Intracomm, vector: np.ndarray, source: int, tag: int, then: Callable[[Arrival], object]
) -> Iterator[Step]:
    """Yield the step that receives a message and then calls then(arrival)."""
    request = comm.Irecv(vector.view(np.uint8), source, tag)
    yield Delivery([request], 1, lambda _, status: then(arrival(comm, vector, source, status)))


def labelled_receive(
    comm: MPI.Intracomm, vector: np.ndarray, source: int, tag: int, then: Callable[[Arrival], object], kind: str
) -> Iterator[Step]:
    """As `plain_receive`, for a labelled message. UsageError if its length differs from the vector's, or its kind."""
    label = np.zeros(1, LABEL)

    def arrived(_: int, status: MPI.Status | None) -> None:
        sent, size = label["kind"][0].decode(), int(label["size"][0])
        if status is None or (sent, size) != (kind, vector.size):
            what = f"{size} {sent}" if sent else "more bytes"
            whom = source_text(source if status is None else status.source)
            advice = "send and receive tensors of equal length and type"
            raise UsageError(f"rank {comm.rank} expects {vector.size} {kind}, and {whom} has sent {what}; {advice}")
        then(Arrival(status.source, size))

    message = labelled_datatype(label, vector)
    request = comm.Irecv([MPI.BOTTOM, 1, message], source, tag)
    message.Free()
    yield Delivery([request], 1, arrived)


class PointToPoint(CallPath):
    """The point-to-point operations of a communicator. The caller chooses the tags."""

    @staged(back=False, collective=False)
    def ipush(
        self,
        array: np.ndarray,
        to: int,
        tag: int = 0,
        into: ExposedArray | None = None,
        at: int = 0,
        op: str = "replace",
    ) -> Request:
        """Send `array` to rank `to`, which receives it by `wait(array, source)`. into: write it into the exposed array
        of `to` instead, from element `at` on, while that rank computes; op "sum" adds it."""
        vector = flat(array)
        if into is None:
            return self._send("push", vector, to, tag)
        self._check(to, tag)
        into.check_transfer(vector, to, at)
        if op not in ("replace", "sum"):
            raise UsageError(f"push: unknown op {op!r}; known: replace, sum")

        def write(comm: Any, vector: np.ndarray, to: int, _tag: int) -> Iterator[Step]:
            comm.count(vector, to)
            if op == "replace":
                yield [into.window.Rput(vector, to, target=at)]
            else:
                yield [into.window.Raccumulate(vector, to, target=at, op=MPI.SUM)]

        return self._send("push", vector, to, tag, write, finish=lambda: into.window.Flush(to))

    def push(
        self,
        array: np.ndarray,
        to: int,
        tag: int = 0,
        into: ExposedArray | None = None,
        at: int = 0,
        op: str = "replace",
    ) -> None:
        """The blocking form of `ipush`."""
        vector = self._fast_vector(array) if into is None else None
        if vector is None or not self._known(to, tag):
            self.ipush(array, to, tag, into, at, op).wait()
        else:
            self._fast_send("push", vector, to, tag)

    def inotify(self, to: int, tag: int = 0) -> Request:
        """Send rank `to` a notification, an empty message that it receives by `wait(source=...)`."""
        return self._send("notify", EMPTY, to, tag)

    def notify(self, to: int, tag: int = 0) -> None:
        """The blocking form of `inotify`."""
        if activity.in_flight or not self._known(to, tag):
            self.inotify(to, tag).wait()
        else:
            self._fast_send("notify", EMPTY, to, tag)

    def ipush_labelled(self, array: np.ndarray, kind: str, to: int, tag: int = 0) -> Request:
        """As `ipush`, for `iwait_labelled`: the message also carries the array's length and `kind`."""
        return self._send("push", flat(array), to, tag, labelled_send, kind)

    def _send(
        self, name: str, vector: np.ndarray, to: int, tag: int, steps: Any = plain_send, *more: Any, finish: Any = None
    ) -> Request:
        self._check(to, tag)
        comm = self._counted(name, self.mpi)
        sending, peer = steps(comm, vector, to, tag, *more), self._peer("to", to)
        return Request(self, name, sending, comm.counters, finish, peer, to)

    def _fast_send(self, name: str, vector: np.ndarray, to: int, tag: int) -> None:
        comm, peer = self._counted(name, self.mpi), self._peer("to", to)
        self._fast_path(name, comm.counters, send, (comm, vector, to, tag), peer=peer, awaits=self._wait_target(to))

    @staged(out=False, collective=False)
    def ipull(self, array: np.ndarray, source: int, of: ExposedArray, at: int = 0) -> Request:
        """Fetch elements of the exposed array `of` on rank `source`, from `at` on, into `array`, while it computes."""
        vector = flat(array, written=True)
        self._check(source)
        of.check_transfer(vector, source, at)
        comm = self._counted("pull", self.mpi)
        comm.count(EMPTY, source)  # `source` sends the values; this rank sends only the request
        steps = iter([[of.window.Rget(vector, source, target=at)]])
        return Request(self, "pull", steps, comm.counters, None, self._peer("from", source), source)

    def pull(self, array: np.ndarray, source: int, of: ExposedArray, at: int = 0) -> None:
        """The blocking form of `ipull`."""
        self.ipull(array, source, of, at).wait()

    @staged(collective=False)
    def iwait(self, array: np.ndarray | None = None, source: int = ANY, tag: int = 0) -> Request:
        """Receive a push into `array` or, without an array, a notification; the result is the message's `Arrival`."""
        return self._receive(EMPTY if array is None else flat(array, written=True), source, tag)

    def wait(self, array: np.ndarray | None = None, source: int = ANY, tag: int = 0) -> Arrival:
        """The blocking form of `iwait`."""
        vector = self._fast_vector(EMPTY if array is None else array, written=True)
        if vector is None or not self._known(0 if source == ANY else source, tag):
            return self.iwait(array, source, tag).wait()
        comm, status = self._counted("wait", self.mpi), MPI.Status()
        peer = None if source == ANY else self._peer("from", source)
        awaits = self._wait_target(SOME if source == ANY else source)
        self._fast_path("wait", comm.counters, receive, (comm, vector, source, tag, status), peer=peer, awaits=awaits)
        return arrival(comm, vector, source, status)

    def iwait_labelled(self, array: np.ndarray, kind: str, source: int = ANY, tag: int = 0) -> Request:
        """As `iwait`, for an `ipush_labelled`. UsageError if its length or kind is not that of `array` and `kind`."""
        return self._receive(flat(array, written=True), source, tag, labelled_receive, kind)

    def _receive(self, vector: np.ndarray, source: int, tag: int, steps: Any = plain_receive, *more: Any) -> Request:
        self._check(0 if source == ANY else source, tag)
        comm, found = self._counted("wait", self.mpi), list[Arrival]()
        receiving = steps(comm, vector, source, tag, found.append, *more)
        peer, other = (None, SOME) if source == ANY else (self._peer("from", source), source)
        return Request(self, "wait", receiving, comm.counters, found.pop, peer, other)

    def wait_until(
        self, condition: Callable[[], object], meanwhile: Callable[[], bool] | None = None, patient: bool = False
    ) -> None:
        """Wait until `condition()`, in naps, while operations in flight advance; for the parameters see `nap_until`."""
        waited = nap_until(condition, "wait", meanwhile, patient, self._wait_target(SOME))
        self.traffic["wait"].seconds += waited
        self.traffic["wait"].blocked_seconds += waited
