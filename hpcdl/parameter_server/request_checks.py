"""Checks of requests at a server, before it acts on them: no message can make it write outside its slice.

An invalid request, of a foreign or faulty client, ends the job with one line. The checks use only received numbers, and
cost a microsecond or two per request.

    every request      integers where integers are needed; a known operation and reply tag
    of a client        it is open, at its own clock, and has few requests that wait for answers
    elements           within the slice; with keys, as many as the slice has rows, and sorted
    a push             computed from a clock and a version that existed; example counts are not negative
    gathering          by rank 0 alone
"""

import math
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.store_messages import StoreOperation, StoreTag

INTEGERS = "operation", "reply", "clock", "start", "stop", "seen", "version", "which"
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
LARGEST = 2.0**53  # float64 holds all integers up to here
WAITING = 4  # limit on unanswered requests of a client, which makes two at most


class ServedSlice(NamedTuple):
    """State of a server that requests are checked against: elements of its slice; vectors of the update's state; rows
    that keys may name (None: no keys); touched: elements of the client's last keys (likewise); leads: True if the
    client is rank 0, which gathers; kept: True if a push of it is pending, which its next request applies
    (replication.py).
    """

    elements: int
    vectors: int
    rows: int | None
    touched: int | None
    leads: bool
    kept: bool = False


def check_request(request: np.ndarray, client: int, server: ServedSlice, clocks: Clocks, waiting: int) -> None:
    """Raise UsageError for a request that no client makes; waiting: number of its unanswered requests."""
    names = request.dtype.names or ()
    fields: dict[str, Any] = dict(zip(names, request.item(), strict=True))
    if problem := _numbers(fields) or _who(fields, client, server, clocks, waiting) or _elements(fields, server):
        raise wrong(client, problem)
    if fields["operation"] in PUSHES and (problem := _push(fields, clocks)):
        raise wrong(client, problem)


def wrong(client: int, problem: str) -> UsageError:
    """Return the error for an invalid message to a server."""
    return UsageError(f"rank {client} has sent a server what no client of it sends: {problem}")


def _numbers(fields: dict[str, Any]) -> str:
    for name in INTEGERS:
        if not (abs(fields[name]) < LARGEST and fields[name].is_integer()):
            return f"{name} {fields[name]:g} is no whole number"
    for name in AMOUNTS:
        if not 0 <= fields[name] < math.inf:
            return f"{name} {fields[name]:g} is no amount"
    if math.isnan(fields["needs"]) or fields["messages"] < 0:
        return f"needs {fields['needs']:g}, messages {fields['messages']:g}"
    if fields["operation"] not in REQUESTS:
        return f"operation {fields['operation']:g}, and there are {len(REQUESTS)}"
    if fields["reply"] not in REPLIES.get(StoreOperation(int(fields["operation"])), (StoreTag.ANSWER,)):
        return f"an answer with tag {fields['reply']:g} to operation {fields['operation']:g}"
    return ""


def _who(fields: dict[str, Any], client: int, server: ServedSlice, clocks: Clocks, waiting: int) -> str:
    if waiting >= WAITING:
        return f"a request more, while {waiting} wait for their answers"
    if fields["operation"] in FOR_LEAD or fields["reply"] == StoreTag.GATHERED:
        return "" if server.leads else f"operation {fields['operation']:g}, which is for rank 0 alone"
    if client not in clocks.open:
        return f"operation {fields['operation']:g}, after its last one"
    if server.kept and fields["operation"] in PUSHES:
        return "a push, before it has asked for anything after its last one"
    if fields["clock"] != clocks.of_client[client] + server.kept:
        return f"clock {fields['clock']:g}, and it is at {clocks.of_client[client] + server.kept}"
    return ""


def _elements(fields: dict[str, Any], server: ServedSlice) -> str:
    start, stop, operation = fields["start"], fields["stop"], fields["operation"]
    most = server.elements
    if operation in KEYED:
        rows = server.rows if operation == StoreOperation.KEYS else server.touched
        if rows is None or start:
            return "keys, and nobody has agreed on any" if rows is None else f"keys from number {start:g} on"
        if operation == StoreOperation.PUSH_AT and stop != rows:
            return f"{stop:g} values for the {rows} of its last keys"
        most = rows
    if not 0 <= start <= stop <= most:
        return f"elements {start:g} to {stop:g} of {most}"
    if operation not in PUSHES and not 0 <= fields["which"] <= (server.vectors if server.leads else 0):
        return f"vector {fields['which']:g}"
    return ""


def _push(fields: dict[str, Any], clocks: Clocks) -> str:
    if not 0 <= fields["seen"] <= clocks.of_store:
        return f"a push from clock {fields['seen']:g}, and the server is at {clocks.of_store}"
    if not 0 <= fields["version"] <= clocks.version:
        return f"a push from version {fields['version']:g}, and the server is at {clocks.version}"
    return ""


def check_keys(keys: np.ndarray, rows: int, client: int) -> None:
    """Raise UsageError unless the keys are sorted, unique row numbers of the slice."""
    if len(keys) and not (keys[0] >= 0 and keys[-1] < rows and (np.diff(keys) > 0).all()):
        raise wrong(client, f"keys that are not sorted numbers of {rows} rows, each once")
