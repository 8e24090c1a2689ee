"""Short messages of several ranks to one, such as requests to a server: one receive is posted for each rank.

A receive from any source would be less to write, and is what to avoid: a library has to post it in all its transports
at once, shared memory and network, and take it back from one of them (MPICH 5.0 over UCX lost such messages between
hosts). So a server posts a receive per rank, and posts the next one when it has taken what came.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.requests import Request
from hpcdl.errors import UsageError

watchers: list[Callable[[], object]] = []  # are told of each message that this process takes from any inbox


class Inbox:
    """Messages of `length` elements of `dtype` with this tag, from the ranks `sources` of `comm`, as they come.

    coming: the receives that are posted, by the rank that is expected to send.
    """

    def __init__(self, comm: Communicator, tag: int, sources: Iterable[int], length: int, dtype: DTypeLike):
        self.comm, self.tag = comm, tag
        self.room = {source: np.empty(length, dtype) for source in sources}
        self.coming: dict[int, Request] = {}
        for source in self.room:
            self.listen(source)

    def listen(self, source: int) -> None:
        """One more message of this rank is expected."""
        self.coming[source] = coming(self.comm, self.room[source], source, self.tag)

    def arrived(self) -> list[int]:
        """The ranks whose messages have come."""
        return [source for source, request in self.coming.items() if request.done]

    def look(self) -> None:
        """Take forward what is under way, where nobody waits."""
        all(request.test() for request in self.coming.values())  # a test in vain takes forward all the others, too

    def take(self, source: int) -> np.ndarray:
        """The message of this rank, which has come; no other one is expected until `listen` is called again.

        Raises UsageError where it has another length: a part of it would be of the message before.
        """
        filled(self.coming.pop(source), self.room[source], source)
        for watch in watchers:
            watch()
        return self.room[source].copy()


def fill(comm: Communicator, array: np.ndarray, source: int, tag: int) -> None:
    """Receive a message of this rank that is due, and fills the array. Raises UsageError where it does not."""
    filled(coming(comm, array, source, tag), array, source)


def coming(comm: Communicator, array: np.ndarray, source: int, tag: int) -> Request:
    """Post the receive. As bytes: who sends half a number is told so by `filled`."""
    return comm.iwait(array.view(np.uint8), source, tag)


def filled(request: Request, array: np.ndarray, source: int) -> None:
    """Wait, in naps, for a receive that is to fill `array`; UsageError where the message is a longer or shorter one."""
    told = f"rank {source} has sent another message than the {array.size} numbers of {array.dtype} that are due"
    try:
        found = request.wait(doze=True)
    except UsageError:
        raise UsageError(f"{told}: a longer one") from None
    if found.size != array.nbytes:
        raise UsageError(f"{told}: {found.size} bytes")
