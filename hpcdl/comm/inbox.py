"""The inbox of a server: one posted receive for each rank that may send it a short message.

A receive from any source would be shorter, but a library must post it in all transports at once, shared memory and
network, and cancel it in one of them (MPICH 5.0 over UCX lost such messages between hosts). So a server posts a receive
per rank, and the next one when it has taken the message.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.requests import Request
from hpcdl.errors import UsageError

watchers: list[Callable[[], object]] = []  # called for each message that this process takes from any inbox


class Inbox:
    """Receives messages of `length` elements of `dtype` with this tag from the ranks `sources` of `comm`.

    coming: the posted receives by source rank.
    """

    def __init__(self, comm: Communicator, tag: int, sources: Iterable[int], length: int, dtype: DTypeLike):
        self.comm, self.tag = comm, tag
        self.room = {source: np.empty(length, dtype) for source in sources}
        self.pending: dict[int, Request] = {}
        for source in self.room:
            self.listen(source)

    def listen(self, source: int) -> None:
        """Post a receive for the next message of this rank."""
        self.pending[source] = post_receive(self.comm, self.room[source], source, self.tag)

    def arrived(self) -> list[int]:
        """Return the ranks whose messages have arrived."""
        return [source for source, request in self.pending.items() if request.done]

    def look(self) -> None:
        """Advance the operations in flight, where no call waits."""
        all(request.test() for request in self.pending.values())  # an unsuccessful test advances all operations

    def take(self, source: int) -> np.ndarray:
        """Return the message of this rank, which has arrived; `listen` posts the next receive.

        Raises UsageError if it has another length: the buffer would hold a part of the message before.
        """
        finish_receive(self.pending.pop(source), self.room[source], source)
        for watch in watchers:
            watch()
        return self.room[source].copy()


def fill(comm: Communicator, array: np.ndarray, source: int, tag: int) -> None:
    """Receive a message of this rank that must fill the array. Raises UsageError if it does not."""
    finish_receive(post_receive(comm, array, source, tag), array, source)


def post_receive(comm: Communicator, array: np.ndarray, source: int, tag: int) -> Request:
    """Post the receive as bytes, so that `finish_receive` can report a message of half a number."""
    return comm.iwait(array.view(np.uint8), source, tag)


def finish_receive(request: Request, array: np.ndarray, source: int) -> None:
    """Wait, in naps, for a receive that must fill `array`; UsageError if the message is longer or shorter."""
    mismatch = f"rank {source} has sent another message than the {array.size} numbers of {array.dtype} that are due"
    try:
        found = request.wait(doze=True)
    except UsageError:
        raise UsageError(f"{mismatch}: a longer one") from None
    if found.size != array.nbytes:
        raise UsageError(f"{mismatch}: {found.size} bytes")
