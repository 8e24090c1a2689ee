"""Messages between clients and servers of a parameter store: typed buffers, each with a header of numbers.

request         the header, then for PUSH and PUSH_AT the values, for KEYS the keys
  PULL          the elements `start` to `stop` of the slice; the answer waits until the consistency allows it
  PUSH          apply the values that follow to these elements
  DRAW          the next step of the shared counter, without values
  SUBSCRIBE     broadcast the slice from now on
  LAST          this client pushes no more; answered like PULL, when all clients have sent it
  FINISH        as PULL, after delayed updates are applied
  OVER          rank 0 gathers no more
  KEYS          as PULL, for the elements named by keys (sparse_keys.py); under async it gives out no step
  PUSH_AT       as PUSH, for the elements of this client's last keys
  PEEK          as PULL, but it gives out no step and never waits
copy            from a server to the replicas of its slice, if any (replication.py)
  PUSH          a push of `client`, with its values; it is acknowledged
  COMMIT        the last push of `client` is complete: apply it, or add it to its round
  LAST          `client` pushes no more
  NOTE          state for rank 0's successor, `stop` bytes
answer          the header, then, except for DRAW, the values in a second message, whose tag is the header's + 1"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm.framing import Frame


class StoreOperation(IntEnum):
    """Operations of requests and copies."""

    PULL, PUSH, DRAW, SUBSCRIBE, LAST, FINISH, OVER, KEYS, PUSH_AT, PEEK, COMMIT, NOTE = range(12)


class StoreTag(IntEnum):
    """Tags of requests, answers and copies. An answer's values have the tag of its header + 1."""

    REQUEST, VALUES = 1, 2
    ANSWER, GATHERED, UNASKED = 3, 5, 7  # to a client, to rank 0, to a subscriber
    BESIDE = 9  # further numbers of a client's push, for rank 0
    COPY, COPIED, HELD = 10, 11, 12  # to replicas: header, values; their acknowledgement
    RECEIPT = 13  # to a client: all replicas have its push
    RESIDUAL, RESIDUAL_VALUES = 14, 15  # rank 0 asks a client for what its compressed pushes have left out; the answer


ENDED, NO_STEP = -1, -2  # in the place of a step: none is left; none is meant

# reply: the tag of the answer. clock, seen, version, count, total, loss, norm: see `Push`. needs: the store's clock
# that the answer waits for. start, stop: elements of the slice; with keys, 0 and their number. which: vector to read
# (0: the values; 1, 2, ...: the update's state); of a push the step that it was computed for. signal: True if the
# sender knows of a signal. bytes, messages: the sender's total traffic, with this message; messages: NaN if a library
# hides them.
FIELDS = "operation", "reply", "clock", "needs", "start", "stop", "seen", "version"
AMOUNTS = "count", "total", "loss", "norm"
REQUEST = Frame(StoreTag.REQUEST, (*FIELDS, *AMOUNTS, "which", "signal", "bytes", "messages"))

# client: the client whose push it is. The other fields are those of its request.
COPY = Frame(StoreTag.COPY, ("operation", "client", "clock", "start", "stop", "seen", "version", *AMOUNTS, "which"))

# step: the step to compute, ENDED or NO_STEP; for a subscriber, under bsp and ssp, the clock of its first push that the
# values lack, or ENDED. seen, version: the store's clock and version. limit: the first step that has to wait. last:
# True if no other answer follows. apart: rank 0's seconds of scoring and saving. bytes, messages: as above.
STATE = "step", "seen", "version", "limit", "last", "apart", "signal", "bytes", "messages"
ANSWERS: dict[int, Frame] = {tag: Frame(tag, STATE) for tag in (StoreTag.ANSWER, StoreTag.GATHERED, StoreTag.UNASKED)}
ANSWER = ANSWERS[StoreTag.ANSWER]


class Push(NamedTuple):
    """Description of pushed values, for `update`.
    part: elements of the slice; with keys, `Touched` (sparse_keys.py). clock: the client's clock, the number of this
    push. seen, version: the store's clock and version at the pull. count: examples in the sum. loss: their losses' sum.
    total: examples of the step. norm: of the worker's whole vector. step: `clock`; under async the store's version when
    the push is applied. staleness: see consistency.py. drawn: under async, the step of the shared counter."""

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
        clock, seen, version, drawn = (int(request[name]) for name in ("clock", "seen", "version", "which"))
        count, total, loss, norm = (float(request[name]) for name in AMOUNTS)
        part = slice(int(request["start"]), int(request["stop"]))
        return cls(client, part, clock, seen, version, count, total, loss, norm, drawn=drawn)

    @property
    def size(self) -> int:
        """The number of pushed values."""
        return self.part.stop - self.part.start if isinstance(self.part, slice) else len(self.part.elements)
