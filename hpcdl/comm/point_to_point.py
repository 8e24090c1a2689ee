"""Point-to-point operations: push, pull, notify and wait."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import from_numpy_dtype

from hpcdl.comm.barrier import EMPTY
from hpcdl.comm.call_path import CallPath, flat
from hpcdl.comm.collective_schedule import Delivery, Step
from hpcdl.comm.diagnostics.call_signature import SOME
from hpcdl.comm.progress import activity, clock, nap_until
from hpcdl.comm.requests import Request
from hpcdl.comm.rma_window import ExposedArray
from hpcdl.comm.staging import staged
from hpcdl.errors import UsageError

ANY = MPI.ANY_SOURCE


class Arrival(NamedTuple):
    """Result of `wait`: the source rank and the number of elements."""

    source: int
    size: int


def in_bytes(vector: np.ndarray) -> np.ndarray:
    """Return the vector as bytes, for a receive: with other types MPICH aborts at a message of half an element."""
    return vector.view(np.uint8)


def arrival(comm: MPI.Intracomm, vector: np.ndarray, source: int, status: MPI.Status | None) -> Arrival:
    """Return the Arrival in `vector`; status: None if the message was longer. Raises UsageError if it does not fit."""
    if status is None:
        raise UsageError(
            f"rank {comm.rank}: a message of {source_text(source)} is longer than the {vector.size} {vector.dtype} of "
            "the array that waits for it; wait with an array as long as what is pushed"
        )
    size, rest = divmod(status.Get_elements(MPI.BYTE), vector.itemsize)
    if rest:
        raise UsageError(
            f"rank {comm.rank}: the message of rank {status.source} is of {size * vector.itemsize + rest} bytes, no "
            f"whole number of {vector.dtype}; wait with an array of the type that is pushed"
        )
    return Arrival(status.source, size)


def source_text(source: int) -> str:
    """Return the text for the source of a message."""
    return "some rank" if source == ANY else f"rank {source}"


def single_message(start: Callable[[], MPI.Request]) -> Iterator[list[MPI.Request]]:
    """Yield the single step of an operation of one message; start() sends it inside, so that its bytes are counted."""
    yield [start()]


def send(message: tuple[MPI.Intracomm, np.ndarray, int, int]) -> tuple[int, int]:
    """Send, and wait until the vector may be changed; return the nanoseconds waited, and 0 bytes without a message."""
    comm, vector, to, tag = message
    request = comm.Isend(vector, to, tag)
    start = clock()
    activity.block(request.Test)
    return clock() - start, 0


def receive(message: tuple[MPI.Intracomm, np.ndarray, int, int, MPI.Status]) -> tuple[int, int]:
    """Wait for a message; return the nanoseconds waited, and 0 bytes without a message."""
    comm, vector, source, tag, status = message
    request = comm.Irecv(in_bytes(vector), source, tag)
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


def labelled_send(comm: MPI.Intracomm, vector: np.ndarray, kind: str, to: int, tag: int) -> Iterator[Step]:
    """Yield the step of a message with a label of its kind and size."""
    label = np.array([(kind.encode(), vector.size)], LABEL)
    message = labelled_datatype(label, vector)
    request = comm.Isend([MPI.BOTTOM, 1, message], to, tag)
    message.Free()
    yield [request]


def labelled_receive(
    comm: MPI.Intracomm,
    vector: np.ndarray,
    kind: str,
    source: int,
    tag: int,
    then: Callable[[Arrival], object],
) -> Iterator[Step]:
    """Yield the step that receives it. Raises UsageError if the message has another length or kind than the vector."""
    label = np.zeros(1, LABEL)

    def arrived(_: int, status: MPI.Status | None) -> None:
        sent, size = label["kind"][0].decode(), int(label["size"][0])
        if status is None or (sent, size) != (kind, vector.size):
            what = f"{size} {sent}" if sent else "more"
            whom = source_text(source if status is None else status.source)
            raise UsageError(
                f"rank {comm.rank}: {vector.size} {kind} are to be received, and {whom} has sent {what}; send and "
                "receive tensors of one length and type"
            )
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
        """Send `array` to rank `to`, which receives it by `wait(array, source)`.

        into: write it directly into the exposed array of `to`, from element `at` on, while that rank computes; op "sum"
        adds it.
        """
        vector = flat(array)
        self._check_rank(to)
        self._check_tag(tag)
        comm, peer = self._counted("push", self.mpi), self._peer("to", to)
        if into is None:
            return self._request("push", single_message(lambda: comm.Isend(vector, to, tag)), comm, peer=peer, other=to)
        into.check_transfer(vector, to, at)
        if op not in ("replace", "sum"):
            raise UsageError(f"push: unknown op {op!r}; known: replace, sum")
        put = into.window.Rput if op == "replace" else into.window.Raccumulate
        options = {} if op == "replace" else {"op": MPI.SUM}

        def write() -> "MPI.Request":
            comm.count(vector, to)
            return put(vector, to, target=at, **options)

        return self._request("push", single_message(write), comm, lambda: into.window.Flush(to), peer=peer, other=to)

    def push(
        self,
        array: np.ndarray,
        to: int,
        tag: int = 0,
        into: ExposedArray | None = None,
        at: int = 0,
        op: str = "replace",
    ) -> None:
        vector = self._fast_vector(array) if into is None else None
        if vector is None or not self._known(to, tag):
            self.ipush(array, to, tag, into, at, op).wait()
            return
        comm = self._counted("push", self.mpi)
        message, peer = (comm, vector, to, tag), self._peer("to", to)
        self._fast_path("push", comm.counters, send, message, peer=peer, awaits=self._wait_target(to))

    @staged(out=False, collective=False)
    def ipull(self, array: np.ndarray, source: int, of: ExposedArray, at: int = 0) -> Request:
        """Fetch into `array` the elements from `at` on of the exposed array of `source`, while that rank computes."""
        vector = flat(array, written=True)
        self._check_rank(source)
        of.check_transfer(vector, source, at)
        comm = self._counted("pull", self.mpi)
        comm.count(EMPTY, source)  # `source` sends the values; this rank sends only the request
        return self._request(
            "pull",
            iter([[of.window.Rget(vector, source, target=at)]]),
            comm,
            peer=self._peer("from", source),
            other=source,
        )

    def pull(self, array: np.ndarray, source: int, of: ExposedArray, at: int = 0) -> None:
        self.ipull(array, source, of, at).wait()

    def inotify(self, to: int, tag: int = 0) -> Request:
        """Send rank `to` a notification, an empty message that it receives by `wait(source=...)`."""
        self._check_rank(to)
        self._check_tag(tag)
        comm = self._counted("notify", self.mpi)
        steps = single_message(lambda: comm.Isend(EMPTY, to, tag))
        return self._request("notify", steps, comm, peer=self._peer("to", to), other=to)

    def notify(self, to: int, tag: int = 0) -> None:
        if activity.in_flight or not self._known(to, tag):
            self.inotify(to, tag).wait()
            return
        comm = self._counted("notify", self.mpi)
        message, peer = (comm, EMPTY, to, tag), self._peer("to", to)
        self._fast_path("notify", comm.counters, send, message, peer=peer, awaits=self._wait_target(to))

    @staged(collective=False)
    def iwait(self, array: np.ndarray | None = None, source: int = ANY, tag: int = 0) -> Request:
        """Wait for a push (into `array`) or, without an array, a notification; the result is its `Arrival`."""
        vector = EMPTY if array is None else flat(array, written=True)
        if source != ANY:
            self._check_rank(source)
        self._check_tag(tag)
        comm, found = self._counted("wait", self.mpi), list[Arrival]()

        def arrived(_: int, status: MPI.Status | None) -> None:
            found.append(arrival(comm, vector, source, status))

        steps = iter([Delivery([comm.Irecv(in_bytes(vector), source, tag)], 1, arrived)])
        peer = None if source == ANY else self._peer("from", source)
        return self._request("wait", steps, comm, found.pop, peer, SOME if source == ANY else source)

    def wait(self, array: np.ndarray | None = None, source: int = ANY, tag: int = 0) -> Arrival:
        vector = self._fast_vector(EMPTY if array is None else array, written=True)
        if vector is None or not self._known(0 if source == ANY else source, tag):
            return self.iwait(array, source, tag).wait()
        comm, status = self._counted("wait", self.mpi), MPI.Status()
        peer = None if source == ANY else self._peer("from", source)
        awaits = self._wait_target(SOME if source == ANY else source)
        self._fast_path("wait", comm.counters, receive, (comm, vector, source, tag, status), peer=peer, awaits=awaits)
        return arrival(comm, vector, source, status)

    # -- labelled messages ---------------------------------------------------------------------------------------------

    def ipush_labelled(self, array: np.ndarray, kind: str, to: int, tag: int = 0) -> Request:
        """As `ipush`, for `iwait_labelled`: the message also carries the array's length and `kind`."""
        vector = flat(array)
        self._check_rank(to)
        self._check_tag(tag)
        comm = self._counted("push", self.mpi)
        steps = labelled_send(comm, vector, kind, to, tag)
        return self._request("push", steps, comm, peer=self._peer("to", to), other=to)

    def iwait_labelled(self, array: np.ndarray, kind: str, source: int = ANY, tag: int = 0) -> Request:
        """As `iwait`, for an `ipush_labelled`. Raises UsageError if its length or kind differs from the array's."""
        vector = flat(array, written=True)
        if source != ANY:
            self._check_rank(source)
        self._check_tag(tag)
        comm, found = self._counted("wait", self.mpi), list[Arrival]()
        steps = labelled_receive(comm, vector, kind, source, tag, found.append)
        peer = None if source == ANY else self._peer("from", source)
        return self._request("wait", steps, comm, found.pop, peer, SOME if source == ANY else source)

    def wait_until(
        self,
        condition: Callable[[], object],
        meanwhile: Callable[[], bool] | None = None,
        patient: bool = False,
    ) -> None:
        """Wait until `condition()`, in naps, while operations in flight advance; for the parameters see `nap_until`."""
        waited = nap_until(condition, "wait", meanwhile, patient, self._wait_target(SOME))
        self.traffic["wait"].seconds += waited
        self.traffic["wait"].blocked_seconds += waited
