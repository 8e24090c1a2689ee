"""Messages between clients and servers of a parameter store: typed buffers, each with a header of numbers.

request   the header, and for PUSH the values, for KEYS the keys

    PULL        the elements `start` to `stop` of the slice; the answer waits until the consistency allows it
    PUSH        apply the values that follow to these elements
    DRAW        the next step of the shared counter, without values
    SUBSCRIBE   broadcast the slice from now on
    LAST        this client pushes no more; answered like PULL, when all clients have sent it
    FINISH      as PULL, after delayed updates are applied
    OVER        rank 0 gathers no more
    KEYS        as PULL, for the elements named by keys (sparse_keys.py); under async it gives out no step
    PUSH_AT     as PUSH, for the elements of this client's last keys
    PEEK        as PULL, but it gives out no step and never waits

copy      from a server to the replicas of its slice, if any (replication.py)

    PUSH        a push of `client`, with its values; it is acknowledged
    COMMIT      the last push of `client` is complete: apply it, or add it to its round
    LAST        `client` pushes no more
    NOTE        state for rank 0's successor, `stop` bytes

answer    the header, and, but for DRAW, the values in a second message, whose tag is the header's + 1
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm.trace import Traffic


class StoreOperation(IntEnum):
    """Operations of requests."""

    PULL, PUSH, DRAW, SUBSCRIBE, LAST, FINISH, OVER, KEYS, PUSH_AT, PEEK, COMMIT, NOTE = range(12)


class StoreTag(IntEnum):
    """Tags: of a request, of its values, of the header of an answer."""

    REQUEST, VALUES = 1, 2
    ANSWER, GATHERED, UNASKED = 3, 5, 7  # to a client, to rank 0, to a subscriber
    BESIDE = 9  # further numbers of a client's push, for rank 0
    COPY, COPIED, HELD = 10, 11, 12  # to replicas: header, values; their acknowledgement
    RECEIPT = 13  # to a client: all replicas have its push


def numbers(*names: str) -> np.dtype:
    """Return the type of a header: named float64 numbers, which hold integers up to 2^53."""
    return np.dtype([(name, "f8") for name in names])


ENDED, NO_STEP = -1, -2  # in the place of a step: none is left; none is meant

# reply: the tag of the answer. clock, seen, version, count, total, loss, norm: see `Push`. needs: the store's clock
# that the answer waits for. start, stop: which elements of the slice; with keys, 0 and how many. which: 0 for the
# values, 1, 2, ... for a vector of the update's state; of a push the step that it was computed for. signal: whether the
# sender knows of one. bytes, messages: all that the sender has sent, with this; messages are NaN where a library hides
# them.
REQUEST_HEADER = numbers(
    *("operation", "reply", "clock", "needs", "start", "stop", "seen", "version"),
    *("count", "total", "loss", "norm", "which", "signal", "bytes", "messages"),
)

# client: whose push it is; the others as in its request.
COPY_HEADER = numbers(
    *("operation", "client", "clock", "start", "stop", "seen", "version", "count", "total", "loss", "norm", "which")
)

# step: the step to compute, ENDED or NO_STEP; to a subscriber, where pushes have clocks, its first push that the values
# lack, or ENDED. seen, version: the store's clock and version. limit: steps from here on
# have to wait. last: no other answer follows. apart: rank 0's seconds of scoring and saving.
# bytes, messages: as above.
ANSWER_HEADER = numbers("step", "seen", "version", "limit", "last", "apart", "signal", "bytes", "messages")


def new_header(kind: np.dtype, **numbers: float) -> np.ndarray:
    """Return a header of this kind with these numbers; the others are 0."""
    header = np.zeros((), kind)
    for name, number in numbers.items():
        header[name] = number
    return header


def tell_sent(header: np.ndarray, traffic: Traffic, values: np.ndarray | None = None) -> np.ndarray:
    """Write the sender's total traffic, including this header and values, into a header to be sent."""
    bytes, messages = traffic.sent_so_far
    header["bytes"] = bytes + header.nbytes + (0 if values is None else values.nbytes)
    header["messages"] = messages + (1 if values is None else 2)
    return header


def as_message(header: np.ndarray) -> np.ndarray:
    """Return the header as a vector to send; a view."""
    return header.reshape(1).view("f8")


def as_request(message: np.ndarray) -> np.ndarray:
    """Return the header of a received request; a view."""
    return message.view(REQUEST_HEADER).reshape(())


class Push(NamedTuple):
    """Description of pushed values, for `update`.

    step: the step they belong to: the clock, under async the version. part: elements of the slice; with keys, `Touched`
    (sparse_keys.py). count: examples summed over. total: examples of the whole step. norm: of the worker's whole
    vector. staleness: see consistency.py. clock, seen, version: the client's clock, which is the number of this push,
    and the store's clock and version at the pull. drawn: under async, the step of the shared counter.
    """

    client: int
    part: Any  # slice | Touched
    clock: int
    seen: int
    version: int
    count: float  # type: ignore[assignment]  # tuple.count is of no use here
    total: float
    loss: float
    norm: float
    step: int = 0
    staleness: int = 0
    drawn: int = 0

    @classmethod
    def read(cls, request: np.ndarray, client: int) -> "Push":
        """Return the push of a client's request, or of a copy of it."""
        start, stop, clock, seen, version = (
            int(request[name]) for name in ("start", "stop", "clock", "seen", "version")
        )
        count, total, loss, norm = (float(request[name]) for name in ("count", "total", "loss", "norm"))
        push = cls(client, slice(start, stop), clock, seen, version, count, total, loss, norm)
        return push._replace(drawn=int(request["which"]))

    @property
    def size(self) -> int:
        """The number of its values."""
        return self.part.stop - self.part.start if isinstance(self.part, slice) else len(self.part.elements)
