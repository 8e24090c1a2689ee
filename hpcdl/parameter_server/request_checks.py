"""What a server asks of a request before it does anything by it: whatever comes, it writes to nothing but its slice.

A client that is not of this program, or that is wrong, is told in a line, which ends the job. The checks are of numbers
that have come already, and cost a microsecond or two a request.

    every request      whole numbers where such are meant; an operation and a tag of answers that there are
    of a client        one that may still ask, at its own clock, and with few requests that wait for their answers
    elements           within the slice; with keys, as many as the slice has rows, and in their order
    a push             computed from a clock and a version that there were; examples are no fewer than none
    gathering          of rank 0 alone, which leads
"""

import math
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.store_messages import StoreOperation, StoreTag

WHOLE = "operation", "reply", "clock", "start", "stop", "seen", "version", "which"
AMOUNTS = "count", "total", "bytes"  # finite, and no less than 0
PUSHES = StoreOperation.PUSH, StoreOperation.PUSH_AT
KEYED = StoreOperation.KEYS, StoreOperation.PUSH_AT
REQUESTS = tuple(
    each for each in StoreOperation if each <= StoreOperation.PEEK
)  # the others are of servers among themselves
FOR_LEAD = StoreOperation.FINISH, StoreOperation.OVER
REPLIES = {
    StoreOperation.OVER: (0,),  # there is no answer
    StoreOperation.LAST: (StoreTag.ANSWER, StoreTag.UNASKED),
    StoreOperation.PULL: (StoreTag.ANSWER, StoreTag.GATHERED),
    StoreOperation.FINISH: (StoreTag.GATHERED,),
}
LARGEST = 2.0**53  # up to which float64 holds each whole number
WAITING = 4  # requests of a client that wait for their answers; it has two at most


class ServedSlice(NamedTuple):
    """What a server holds: elements of its slice, vectors of the update's state, rows that keys may name (None: none
    may), elements of a client's last keys (likewise), whether the client leads, and whether a push of it is kept, which
    its next request applies (replication.py)."""

    elements: int
    vectors: int
    rows: int | None
    touched: int | None
    leads: bool
    kept: bool = False


def check_request(request: np.ndarray, client: int, held: ServedSlice, clocks: Clocks, waiting: int) -> None:
    """Raise UsageError where a request of this rank is not one that a client makes; waiting: for its answers so far."""
    names = request.dtype.names or ()
    said: dict[str, Any] = dict(zip(names, request.item(), strict=True))
    if problem := _numbers(said) or _who(said, client, held, clocks, waiting) or _elements(said, held):
        raise wrong(client, problem)
    if said["operation"] in PUSHES and (problem := _push(said, clocks)):
        raise wrong(client, problem)


def wrong(client: int, problem: str) -> UsageError:
    """The error for what a rank has sent to a server."""
    return UsageError(f"rank {client} has sent a server what no client of it sends: {problem}")


def _numbers(said: dict[str, Any]) -> str:
    for name in WHOLE:
        if not (abs(said[name]) < LARGEST and said[name].is_integer()):
            return f"{name} {said[name]:g} is no whole number"
    for name in AMOUNTS:
        if not 0 <= said[name] < math.inf:
            return f"{name} {said[name]:g} is no amount"
    if math.isnan(said["needs"]) or said["messages"] < 0:
        return f"needs {said['needs']:g}, messages {said['messages']:g}"
    if said["operation"] not in REQUESTS:
        return f"operation {said['operation']:g}, and there are {len(REQUESTS)}"
    if said["reply"] not in REPLIES.get(StoreOperation(int(said["operation"])), (StoreTag.ANSWER,)):
        return f"an answer with tag {said['reply']:g} to operation {said['operation']:g}"
    return ""


def _who(said: dict[str, Any], client: int, held: ServedSlice, clocks: Clocks, waiting: int) -> str:
    if waiting >= WAITING:
        return f"a request more, while {waiting} wait for their answers"
    if said["operation"] in FOR_LEAD or said["reply"] == StoreTag.GATHERED:
        return "" if held.leads else f"operation {said['operation']:g}, which is for rank 0 alone"
    if client not in clocks.open:
        return f"operation {said['operation']:g}, after its last one"
    if held.kept and said["operation"] in PUSHES:
        return "a push, before it has asked for anything after its last one"
    if said["clock"] != clocks.of_client[client] + held.kept:
        return f"clock {said['clock']:g}, and it is at {clocks.of_client[client] + held.kept}"
    return ""


def _elements(said: dict[str, Any], held: ServedSlice) -> str:
    start, stop, operation = said["start"], said["stop"], said["operation"]
    most = held.elements
    if operation in KEYED:
        rows = held.rows if operation == StoreOperation.KEYS else held.touched
        if rows is None or start:
            return "keys, and nobody has agreed on any" if rows is None else f"keys from number {start:g} on"
        if operation == StoreOperation.PUSH_AT and stop != rows:
            return f"{stop:g} values for the {rows} of its last keys"
        most = rows
    if not 0 <= start <= stop <= most:
        return f"elements {start:g} to {stop:g} of {most}"
    if operation not in PUSHES and not 0 <= said["which"] <= (held.vectors if held.leads else 0):
        return f"vector {said['which']:g}"
    return ""


def _push(said: dict[str, Any], clocks: Clocks) -> str:
    if not 0 <= said["seen"] <= clocks.of_store:
        return f"a push from clock {said['seen']:g}, and the server is at {clocks.of_store}"
    if not 0 <= said["version"] <= clocks.version:
        return f"a push from version {said['version']:g}, and the server is at {clocks.version}"
    return ""


def check_keys(keys: np.ndarray, rows: int, client: int) -> None:
    """Raise UsageError where keys of this rank are not those of rows of the slice, sorted, each once."""
    if len(keys) and not (keys[0] >= 0 and keys[-1] < rows and (np.diff(keys) > 0).all()):
        raise wrong(client, f"keys that are not sorted numbers of {rows} rows, each once")
