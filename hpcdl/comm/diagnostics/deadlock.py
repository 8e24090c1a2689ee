"""Deadlock detection: which ranks wait for an event that can never happen, from the status of every rank.

A rank that has left its program makes no more calls. A rank that waits for it, or for a stuck rank, is stuck:

    a rank waits for     it is stuck when                           (least fixpoint, from the ranks that have left)
    one rank             that rank has left, or is stuck
    all, in call n       a rank that has not made call n has left, or is stuck
    some rank            all of them have left, or are stuck

A message may arrive after its sender has left: a wait for one rank or some rank counts after SENT seconds. A rank that
computes is never stuck, nor is one in a collective call that all have entered, however long its messages take.

Ranks also deadlock while none has left (`mutual_waits`, the greatest fixpoint): each waits in a call that no rank can
leave before all have entered (`TOGETHER`; every collective call if calls are compared), and another rank waits in a
call of another communicator. Other cycles are not reported, as messages may be on their way: --timeout ends them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hpcdl.comm.diagnostics.call_signature import ALL, SOME, format_ranks, mismatch_message

SENT = 5.0  # seconds after which a message of a rank that has left must have arrived
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
LONG = 1.0  # seconds: shorter waits are not examined


class RankStatus(NamedTuple):
    """The status that a rank reports. Ranks are numbered as in the job's communicator.

    text      what the rank does, and where        left   True if it has left its program
    busy      True inside `activity.exempt()`      made   text of its call that a query names; None: not known
    calls     the number of its last collective call on each communicator, by the communicator's key
    waits     seconds of its wait, and the start of the wait; None if it does not wait
    key, members, other, call     target of the wait: communicator, its ranks, the rank (ALL, SOME), number of the call
    called    text of the call that it waits in; name: of the communicator; at: the line that makes the call
    together  True if no rank can leave that call before all have entered it"""

    text: str
    left: bool
    calls: dict[str, int]
    busy: bool = False
    made: str | None = None
    waits: tuple[float, int] | None = None
    key: str | None = None
    members: tuple[int, ...] = ()
    other: int = SOME
    call: int = 0
    called: str = ""
    name: str = ""
    at: str = ""
    together: bool = False


def stuck(statuses: dict[int, RankStatus], size: int) -> set[int]:
    """Return the ranks, among `size` ranks, that wait for ever. A rank without a status is taken to compute."""
    halted = {rank for rank, status in statuses.items() if status.left}
    left, before = set(halted), set[int]()
    while halted != before:
        before = set(halted)
        halted |= {rank for rank in statuses if rank not in halted and rank_is_stuck(rank, statuses, halted, size)}
    return halted - left


def rank_is_stuck(rank: int, statuses: dict[int, RankStatus], halted: set[int], size: int) -> bool:
    """True if this rank is stuck; halted: the ranks known to have left or to be stuck."""
    status = statuses[rank]
    seconds = status.waits[0] if status.waits else 0.0
    if seconds < LONG:
        return False
    if status.other == ALL:
        missing = (statuses[other].calls.get(str(status.key), status.call) for other in halted & set(status.members))
        return any(last < status.call for last in missing)
    if status.other == SOME:
        others = set(status.members or range(size)) - {rank}
        return seconds >= SENT and bool(others) and others <= halted
    return seconds >= SENT and status.other in halted


def call_mismatch(statuses: dict[int, RankStatus], members: tuple[int, ...]) -> str | None:
    """Return the message for `members` whose calls of the same number differ; None if the known calls are equal."""
    calls = {rank: str(status.made) for rank, status in statuses.items() if status.made and rank in members}
    lines = {rank: statuses[rank].at for rank in calls if statuses[rank].at and statuses[rank].called == calls[rank]}
    return mismatch_message(calls, lines) if len(set(calls.values())) > 1 else None


def stuck_message(statuses: dict[int, RankStatus], halted: set[int]) -> str:
    """Return the message for the stuck ranks `halted`, which also names the ranks that have left."""
    left = sorted(rank for rank, status in statuses.items() if status.left)
    gone = f"{format_ranks(left)} {'has' if len(left) == 1 else 'have'} left the program before its end"
    first = min(halted)
    return f"{gone}; {format_ranks(sorted(halted))} would wait for ever: rank {first} {statuses[first].text}"


def status_from_json(fields: dict[str, Any]) -> RankStatus:
    """Build a RankStatus from its JSON fields."""
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return RankStatus(**fields | lists)


def mutual_waits(statuses: dict[int, RankStatus]) -> set[int]:
    """Return the ranks in collective calls that wait for each other, each for a rank that waits in another call."""
    halted = {rank for rank, status in statuses.items() if status.together and status.waits and status.waits[0] >= LONG}
    before = set[int]()
    while halted != before:
        before = set(halted)
        halted = {rank for rank in halted if not halted.isdisjoint(missing_ranks(statuses[rank], statuses))}
    return halted


def missing_ranks(status: RankStatus, statuses: dict[int, RankStatus]) -> list[int]:
    """Return the ranks that have not entered the collective call in which the rank of `status` waits."""
    members = [rank for rank in status.members if rank in statuses]
    return [rank for rank in members if statuses[rank].calls.get(str(status.key), 0) < status.call]


def mutual_wait_message(statuses: dict[int, RankStatus], halted: set[int]) -> str:
    """Return the message for the ranks of `mutual_waits`."""
    places = "; ".join(f"{format_ranks(ranks)} in {where}" for where, ranks in together(statuses, halted).items())
    advice = "make the same calls in the same order on all ranks"
    return f"{format_ranks(sorted(halted))} wait for each other for ever ({places}); {advice}"


def together(statuses: dict[int, RankStatus], ranks: Iterable[int]) -> dict[str, list[int]]:
    """Return the ranks grouped by the text of their place: the call that they wait in, or else what they do."""
    places: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        status, place = statuses[rank], statuses[rank].text
        if status.waits and status.key:
            whom = "some rank" if status.other == SOME else f"rank {status.other}"
            place = f"{status.called} of {status.name!r}, for {whom}"
            if status.other == ALL:
                place = f"call number {status.call} of {status.name!r}, {status.called}"
            place += f", at {status.at}" if status.at else ""
        places.setdefault(place, []).append(rank)
    return places


def status_lines(statuses: dict[int, RankStatus], size: int) -> list[str]:
    """Return a line for each place with its ranks, then the lines of `conclusions`."""
    silent = [rank for rank in range(size) if rank not in statuses]
    waiting = [rank for rank, status in sorted(statuses.items()) if status.waits and status.key]
    places = together(statuses, waiting).items()
    lines = [f"{format_ranks(ranks)} {wait(ranks)} in {at}" for at, ranks in places]
    lines += [f"{format_ranks(ranks)}: {at}" for at, ranks in together(statuses, set(statuses) - set(waiting)).items()]
    lines += [f"{format_ranks(silent)}: nothing is known"] if silent else []
    return lines + conclusions(statuses)


def conclusions(statuses: dict[int, RankStatus]) -> list[str]:
    """Return lines that say which ranks wait for which, and which calls differ."""
    waiting = [rank for rank, status in sorted(statuses.items()) if status.waits and status.key]
    lines, calls = [], dict[Any, list[int]]()
    for rank in waiting:
        if statuses[rank].other == ALL:
            calls.setdefault((statuses[rank].key, statuses[rank].call), []).append(rank)
    for there in calls.values():
        first, what = statuses[there[0]], {rank: statuses[rank].called for rank in there}
        number = f"call number {first.call} of {first.name!r}"
        if len(set(what.values())) > 1:
            lines.append(f"{number}: {mismatch_message(what)}")
        if late := missing_ranks(first, statuses):
            come = f"which {'has' if len(late) == 1 else 'have'} not come to {number}"
            lines.append(f"{format_ranks(there)} {wait(there)} for {format_ranks(late)}, {come}")
    lines += [f"rank {rank} waits for rank {statuses[rank].other}" for rank in waiting if statuses[rank].other >= 0]
    if halted := mutual_waits(statuses):
        lines.append(mutual_wait_message(statuses, halted))
    return lines


def wait(ranks: Sequence[int]) -> str:
    return "wait" if len(ranks) > 1 else "waits"
