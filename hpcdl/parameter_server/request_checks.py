"""Checks of requests at a server, before it acts on them: no message can make it write outside its slice.

    every request      integers where integers are needed; a known operation and reply tag
    of a client        the client is open, states its clock, and has few requests that wait for answers
    elements           within the slice; with keys, as many as the slice has rows, and sorted
    a push             computed from a clock and a version that existed; example counts are not negative
    gathering          by rank 0 alone

An invalid request, of a foreign or faulty client, ends the job with one line. A check takes a microsecond or two."""

import math
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.parameter_server.store_messages import StoreOperation, StoreTag

INTEGERS = "operation", "reply", "clock", "start", "stop", "seen", "version", "which"
AMOUNTS = "count", "total", "bytes"  # finite, and no less than 0
PUSHES = StoreOperation.PUSH, StoreOperation.PUSH_AT
KEYED = StoreOperation.KEYS, StoreOperation.PUSH_AT
REQUESTS = tuple(StoreOperation)[: StoreOperation.PEEK + 1]  # the others are of servers among themselves
FOR_LEAD = StoreOperation.FINISH, StoreOperation.OVER
REPLIES = {
    StoreOperation.OVER: (0,),  # there is no answer
    StoreOperation.LAST: (StoreTag.ANSWER, StoreTag.UNASKED),
    StoreOperation.PULL: (StoreTag.ANSWER, StoreTag.GATHERED),
    StoreOperation.FINISH: (StoreTag.GATHERED,),
}
LARGEST = 2.0**53  # float64 holds all integers up to here
WAITING = 4  # limit on unanswered requests of a client, which makes two at most


def check_request(request: np.ndarray, client: int, server: Any) -> None:
    """Raise UsageError for a request that a correct client never sends to this `SliceServer`."""
    fields: dict[str, Any] = dict(zip(request.dtype.names or (), request.item(), strict=True))
    problem = _numbers(fields) or _sender(fields, client, server) or _elements(fields, client, server)
    if problem:
        raise wrong(client, problem)


def wrong(client: int, problem: str) -> UsageError:
    """Return the error for an invalid message to a server."""
    return UsageError(f"rank {client} has sent a server an invalid request: {problem}")


def _numbers(fields: dict[str, Any]) -> str:
    for name in INTEGERS:
        if not (abs(fields[name]) < LARGEST and fields[name].is_integer()):
            return f"{name} {fields[name]:g} is no whole number"
    for name in AMOUNTS:
        if not 0 <= fields[name] < math.inf:
            return f"{name} {fields[name]:g} is not a finite number of 0 or more"
    if math.isnan(fields["needs"]) or fields["messages"] < 0:
        return f"invalid numbers: needs {fields['needs']:g}, messages {fields['messages']:g}"
    if fields["operation"] not in REQUESTS:
        return f"operation {fields['operation']:g} of {len(REQUESTS)}"
    if fields["reply"] not in REPLIES.get(StoreOperation(int(fields["operation"])), (StoreTag.ANSWER,)):
        return f"reply tag {fields['reply']:g} for operation {fields['operation']:g}"
    return ""


def _sender(fields: dict[str, Any], client: int, server: Any) -> str:
    waiting = sum(received.client == client for received in server.waiting)
    if waiting >= WAITING:
        return f"another request, while {waiting} wait for answers"
    if fields["operation"] in FOR_LEAD or fields["reply"] == StoreTag.GATHERED:
        leads = client == 0 and server.gathered
        return "" if leads else f"operation {fields['operation']:g}, which is for rank 0 alone"
    if client not in server.clocks.open:
        return f"operation {fields['operation']:g}, after it has closed"
    pending = client in server.copies.pending  # a push that its next request applies (replication.py)
    if pending and fields["operation"] in PUSHES:
        return "a push right after another, without a request in between"
    if fields["clock"] != (clock := server.clocks.of_client[client] + pending):
        return f"clock {fields['clock']:g}, and its clock is {clock}"
    return ""


def _elements(fields: dict[str, Any], client: int, server: Any) -> str:
    start, stop, operation, most = fields["start"], fields["stop"], fields["operation"], server.values.size
    if operation in KEYED:
        rows = None if server.rows is None else server.rows.count(server.held)
        if operation == StoreOperation.PUSH_AT:
            rows = len(server.touched[client].elements) if client in server.touched else None
        if rows is None or start:
            return "keys, of which this server has none" if rows is None else f"keys from number {start:g} on, not 0"
        if operation == StoreOperation.PUSH_AT and stop != rows:
            return f"{stop:g} values for the {rows} elements of its last keys"
        most = rows
    if not 0 <= start <= stop <= most:
        return f"elements {start:g} to {stop:g} of {most}"
    clocks, vectors = server.clocks, len(server.vectors) if client == 0 and server.gathered else 1
    if operation not in PUSHES:
        return "" if 0 <= fields["which"] < vectors else f"vector {fields['which']:g} of {vectors}"
    for field, name, now in (("seen", "clock", clocks.of_store), ("version", "version", clocks.version)):
        if not 0 <= fields[field] <= now:
            return f"a push from {name} {fields[field]:g}, and the server is at {now}"
    return ""


def check_keys(keys: np.ndarray, rows: int, client: int) -> None:
    """Raise UsageError unless the keys are sorted, unique row numbers of the slice."""
    if len(keys) and not (keys[0] >= 0 and keys[-1] < rows and (np.diff(keys) > 0).all()):
        raise wrong(client, f"keys that are not sorted, unique numbers of its {rows} rows")
