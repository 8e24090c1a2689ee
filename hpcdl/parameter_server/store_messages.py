"""What clients and servers of a parameter store say to each other: typed buffers, each begun by a header of numbers.

request   the header, and for PUSH the values, for KEYS the keys

    PULL        the elements `start` to `stop` of the slice; the answer waits until the consistency allows it
    PUSH        apply the values that follow to these elements
    DRAW        the next step that nobody has, without values
    SUBSCRIBE   from now on send the slice unasked
    LAST        this client pushes no more; as PULL, when all clients have said so
    FINISH      as PULL, but what is delayed is applied before
    OVER        the lead gathers no more
    KEYS        as PULL, but of the elements that these keys name (sparse_keys.py); under async it gives out no step
    PUSH_AT     as PUSH, to the elements of this client's last keys
    PEEK        as PULL, but it gives out no step and waits for nothing

copy      from a server to those that hold replicas of its slice, where there are any (replication.py)

    PUSH        a push of `client`, with its values; it is acknowledged
    COMMIT      the last push of `client` is whole: apply it, or take it into its round
    LAST        `client` pushes no more
    NOTE        what who takes the lead's place has to know, `stop` bytes

answer    the header, and, but for DRAW, the values in a second message, whose tag is the header's + 1
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm.trace import Traffic


class StoreOperation(IntEnum):
    """What a request is for."""

    PULL, PUSH, DRAW, SUBSCRIBE, LAST, FINISH, OVER, KEYS, PUSH_AT, PEEK, COMMIT, NOTE = range(12)


class StoreTag(IntEnum):
    """Whose message it is: of a request, of what comes with it, or the header of an answer."""

    REQUEST, VALUES = 1, 2
    ANSWER, GATHERED, UNASKED = 3, 5, 7  # to a client, to the lead, to a subscriber
    BESIDE = 9  # what a client's pushes carry to the lead beside their values
    COPY, COPIED, HELD = 10, 11, 12  # to replicas: a header, what comes with it; and their acknowledgement
    RECEIPT = 13  # to a client: all replicas have its push


def numbers(*names: str) -> np.dtype:
    """A kind of header: named numbers that travel as so many float64, which hold whole numbers up to 2^53."""
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
# have to wait. last: no other answer follows. apart: the lead's seconds of scoring and saving.
# bytes, messages: as above.
ANSWER_HEADER = numbers("step", "seen", "version", "limit", "last", "apart", "signal", "bytes", "messages")


def new_header(kind: np.dtype, **numbers: float) -> np.ndarray:
    """A header of this kind with these numbers; the others are 0."""
    made = np.zeros((), kind)
    for name, number in numbers.items():
        made[name] = number
    return made


def tell_sent(header: np.ndarray, traffic: Traffic, values: np.ndarray | None = None) -> np.ndarray:
    """Let a header that is about to leave, and values with it, tell what its sender will have sent then."""
    bytes, messages = traffic.sent_so_far
    header["bytes"] = bytes + header.nbytes + (0 if values is None else values.nbytes)
    header["messages"] = messages + (1 if values is None else 2)
    return header


def as_message(header: np.ndarray) -> np.ndarray:
    """The header as the vector that travels; a view."""
    return header.reshape(1).view("f8")


def as_request(message: np.ndarray) -> np.ndarray:
    """The header of a request that has come; a view."""
    return message.view(REQUEST_HEADER).reshape(())


class Push(NamedTuple):
    """What `update` is told of the values that it applies.

    step: which step they are for: the clock, under async the version. part: the elements of the slice; with keys,
    `Touched` (sparse_keys.py). count: examples that the values are the sum over. total: examples of the whole step.
    norm: of the worker's whole vector. staleness: see consistency.py. clock, seen, version: the client's clock, which
    is the number of this push of its, and the store's clock and version when it had pulled. drawn: under async, which
    of the steps that all share it was computed for.
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
        """What a request of this client, or a copy of it, says."""
        start, stop, clock, seen, version = (
            int(request[name]) for name in ("start", "stop", "clock", "seen", "version")
        )
        count, total, loss, norm = (float(request[name]) for name in ("count", "total", "loss", "norm"))
        push = cls(client, slice(start, stop), clock, seen, version, count, total, loss, norm)
        return push._replace(drawn=int(request["which"]))

    @property
    def size(self) -> int:
        """How many elements it has values for."""
        return self.part.stop - self.part.start if isinstance(self.part, slice) else len(self.part.elements)
