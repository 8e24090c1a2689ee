"""Messages to and from dedicated ranks: a header of named numbers, and payloads in messages that follow it.

    REQUEST = Frame(1, ("operation", "start", "stop"))           header under tag 1, payloads under 2, 3, ...
    client    REQUEST.send(comm, server, REQUEST.header(operation=PUSH, stop=8), values)
    server    header = inbox.take(client)                          inbox = Inbox(comm, REQUEST, clients)
              REQUEST.fill(comm, client, buffer[: int(header["stop"])])

An inbox has one posted receive for each rank that may send. A receive from any source would be shorter, but the MPI
library must post it for both shared memory and network, and cancel one (so MPICH 5.0 over UCX lost messages)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl import drill
from hpcdl.comm.communicator import Communicator
from hpcdl.comm.requests import Request
from hpcdl.errors import UsageError


class Frame:
    """A kind of message: a header, and payloads. fields: of the header, each a name or (name, count).
    tag: of the header. payload: first payload's tag, by default `tag` + 1. number: type of all numbers; float64 holds
    integers up to 2^53. `send` sets the fields "bytes" and "messages", if any, to the sender's totals; NaN: unknown."""

    def __init__(self, tag: int, fields: Iterable[Any], payload: int | None = None, number: DTypeLike = "f8"):
        self.tag, self.payload, self.number = tag, tag + 1 if payload is None else payload, np.dtype(number)
        pairs = [(field, 1) if isinstance(field, str) else field for field in fields]
        self.dtype = np.dtype([(name, number) if count == 1 else (name, number, count) for name, count in pairs])
        self.bytes, self.tells = self.dtype.itemsize, "messages" in (self.dtype.names or ())

    def header(self, **numbers: Any) -> np.ndarray:
        """Return a header with these numbers as fields; other fields are 0."""
        header = np.zeros((), self.dtype)
        for name, number in numbers.items():
            header[name] = number
        return header

    def vector(self, header: np.ndarray) -> np.ndarray:
        """Return the header as a vector of numbers; a view."""
        return header.reshape(1).view(self.number)

    def read(self, message: np.ndarray) -> np.ndarray:
        """Return the header at the start of a message; a view."""
        return message.view(np.uint8)[: self.bytes].view(self.dtype).reshape(())

    def send(self, comm: Communicator, to: int, header: np.ndarray, *payloads: np.ndarray) -> list[Request]:
        """Start to send a header, and payloads after it; return the requests."""
        if self.tells:
            bytes, messages = comm.traffic.sent_so_far
            header["bytes"] = bytes + header.nbytes + sum(each.nbytes for each in payloads)
            header["messages"] = messages + 1 + len(payloads)
        return [comm.ipush(self.vector(header), to, self.tag), *self.send_payloads(comm, to, *payloads)]

    def send_payloads(self, comm: Communicator, to: int, *payloads: np.ndarray) -> list[Request]:
        """Start to send payloads, after their header; return the requests."""
        return [comm.ipush(each, to, tag) for tag, each in enumerate(payloads, self.payload)]

    def expect(self, comm: Communicator, source: int, header: np.ndarray, *payloads: np.ndarray) -> list[Request]:
        """Post the receives of a header and of payloads whose lengths are known; return the requests."""
        first = comm.iwait(self.vector(header), source, self.tag)
        return [first, *(comm.iwait(each, source, tag) for tag, each in enumerate(payloads, self.payload))]

    def fill(self, comm: Communicator, source: int, *payloads: np.ndarray) -> None:
        """Receive the payloads of a header that has come. Raises UsageError if one does not fill its array."""
        for tag, each in enumerate(payloads, self.payload):
            fill(comm, each, source, tag)


class Inbox:
    """Receives the headers of this frame's messages from the ranks `sources`; pending: posted receives by source."""

    def __init__(self, comm: Communicator, frame: Frame, sources: Iterable[int]):
        self.comm, self.frame = comm, frame
        self.room = {source: frame.vector(frame.header()) for source in sources}
        self.pending: dict[int, Request] = {}
        for source in self.room:
            self.listen(source)

    def listen(self, source: int) -> None:
        """Post a receive for the next message of rank `source`."""
        self.pending[source] = self.comm.iwait(self.room[source].view(np.uint8), source, self.frame.tag)

    def arrived(self) -> list[int]:
        """Return the ranks whose messages have arrived."""
        return [source for source, request in self.pending.items() if request.done]

    def look(self) -> None:
        """Advance the operations in flight, without waiting."""
        all(request.test() for request in self.pending.values())  # an unsuccessful test advances all operations

    def take(self, source: int) -> np.ndarray:
        """Return the header that has come from this rank; UsageError for another length. Then `listen` for the next."""
        finish_receive(self.pending.pop(source), self.room[source], source)
        drill.current.message_taken()
        return self.frame.read(self.room[source].copy())


def fill(comm: Communicator, array: np.ndarray, source: int, tag: int) -> None:
    """Receive a message from rank `source`. Raises UsageError if the message does not fill the array."""
    finish_receive(comm.iwait(array.view(np.uint8), source, tag), array, source)


def finish_receive(request: Request, array: np.ndarray, source: int) -> None:
    """Wait, in naps, for a receive that was posted as bytes; UsageError if the message does not fill `array`."""
    mismatch = f"rank {source} was to send {array.size} numbers of {array.dtype} ({array.nbytes} bytes), and has sent"
    try:
        found = request.wait(doze=True)
    except UsageError:
        raise UsageError(f"{mismatch} more bytes") from None
    if found.size != array.nbytes:
        raise UsageError(f"{mismatch} {found.size} bytes")
