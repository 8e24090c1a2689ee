"""Which ranks wait for what can never come, from what each rank says of itself.

A rank that has left its program calls nothing any more. Who waits for such a rank waits for ever, and so does who waits
for one that does:

    waits for            is stuck when                              (least fixpoint, from the ranks that have left)
    one rank             that rank has left, or is stuck
    all, in call n       a rank that has not made call n has left, or is stuck
    some rank            all of them have left, or are stuck

What was sent before its sender left may still be on its way: a wait for one rank or some counts after SENT seconds.
A rank that computes is never stuck, nor is one that all others have joined, however long its messages take.

Ranks that wait for each other while none has left are, too, where each waits in a call that nobody can leave before all
have come (`TOGETHER`; where calls are compared, any of all ranks), and another of them has not come, for it waits in a
call of another communicator (`crossed`, the greatest fixpoint). Others that wait for each other are not taken to be
stuck, for their messages may be on their way: --timeout ends those, and tells of each where it is (`explained`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hpcdl.comm.diagnostics.call_signature import ALL, SOME, differ, ranks_told

SENT = 5.0  # seconds
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
LONG = 1.0  # seconds of waiting that are looked into


class RankStatus(NamedTuple):
    """What a rank says of itself. Ranks are numbered as all ranks of the job's communicator are.

    text    what it does, and where            busy   with what all know to be going on
    left    whether it has left its program    calls  of each communicator, by its key, the number of its last call
    made    what it has called where another rank waits, in words
    called  what it waits in, in words; name: of its communicator; at: the line that calls; together: as in `crossed`
    waits   for how many seconds, and since when; for whom: key, members, other and call, as progress.Awaits has it
    """

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


def stuck(said: dict[int, RankStatus], size: int) -> set[int]:
    """The ranks, of `size`, that wait and wait for ever; who has not said anything is taken to compute."""
    found = {rank for rank, each in said.items() if each.left}
    left, before = set(found), set[int]()
    while found != before:
        before = set(found)
        found |= {rank for rank, each in said.items() if rank not in found and is_stuck(rank, each, said, found, size)}
    return found - left


def is_stuck(rank: int, each: RankStatus, said: dict[int, RankStatus], found: set[int], size: int) -> bool:
    """Whether this rank is, given some that have left or are stuck."""
    seconds = each.waits[0] if each.waits else 0.0
    if seconds < LONG:
        return False
    if each.other == ALL:
        missing = (said[other].calls.get(str(each.key), each.call) for other in found & set(each.members))
        return any(last < each.call for last in missing)
    if each.other == SOME:
        others = set(each.members or range(size)) - {rank}
        return seconds >= SENT and bool(others) and others <= found
    return seconds >= SENT and each.other in found


def different(said: dict[int, RankStatus], members: tuple[int, ...]) -> str | None:
    """The message for ranks whose calls of the same number are different ones; None where they are not."""
    calls = {rank: str(each.made) for rank, each in said.items() if each.made and rank in members}
    lines = {rank: said[rank].at for rank in calls if said[rank].at and said[rank].called == calls[rank]}
    return differ(calls, lines) if len(set(calls.values())) > 1 else None


def waits_for_ever(said: dict[int, RankStatus], found: set[int]) -> str:
    """The message for ranks that are stuck."""
    left = sorted(rank for rank, each in said.items() if each.left)
    gone = f"{ranks_told(left)} {'has' if len(left) == 1 else 'have'} left before the end"
    first = min(found)
    return f"{gone}, {ranks_told(sorted(found))} would wait for ever: rank {first} {said[first].text}"


def as_said(fields: dict[str, Any]) -> RankStatus:
    """From the fields as JSON brings them."""
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return RankStatus(**fields | lists)


def crossed(said: dict[int, RankStatus]) -> set[int]:
    """The ranks that wait for each other in calls of all, each for one that waits in another call."""
    found = {rank for rank, each in said.items() if each.together and each.waits and each.waits[0] >= LONG}
    before = set[int]()
    while found != before:
        before = set(found)
        found = {rank for rank in found if not found.isdisjoint(absent(said[rank], said))}
    return found


def absent(each: RankStatus, said: dict[int, RankStatus]) -> list[int]:
    """Who has not come to the call of all ranks that this one waits in."""
    members = [rank for rank in each.members if rank in said]
    return [rank for rank in members if said[rank].calls.get(str(each.key), 0) < each.call]


def wait_for_each_other(said: dict[int, RankStatus], found: set[int]) -> str:
    """The message for ranks that are crossed."""
    each = "; ".join(f"{ranks_told(ranks)} in {where}" for where, ranks in together(said, found).items())
    return f"{ranks_told(sorted(found))} wait for each other for ever ({each}); call the same on all, in one order"


def together(said: dict[int, RankStatus], ranks: Iterable[int]) -> dict[str, list[int]]:
    """Ranks by where they are, in words, in their order."""
    places: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        places.setdefault(where(said[rank]), []).append(rank)
    return places


def where(each: RankStatus) -> str:
    """In words where a rank is, so that ranks that are at the same place have the same words."""
    if not each.waits or not each.key:
        return each.text
    at = f", at {each.at}" if each.at else ""
    if each.other == ALL:
        return f"call number {each.call} of {each.name!r}, {each.called}{at}"
    whom = "some rank" if each.other == SOME else f"rank {each.other}"
    return f"{each.called} of {each.name!r}, for {whom}{at}"


def explained(said: dict[int, RankStatus], size: int) -> list[str]:
    """Who is where, and what follows from it: a line each."""
    silent = [rank for rank in range(size) if rank not in said]
    waiting = [rank for rank, each in sorted(said.items()) if each.waits and each.key]
    lines = [f"{ranks_told(ranks)} {verb(ranks, 'wait')} in {at}" for at, ranks in together(said, waiting).items()]
    lines += [f"{ranks_told(ranks)}: {at}" for at, ranks in together(said, set(said) - set(waiting)).items()]
    lines += [f"{ranks_told(silent)}: nothing is known"] if silent else []
    return lines + conclusions(said)


def conclusions(said: dict[int, RankStatus]) -> list[str]:
    """Who waits for whom, and which calls do not fit together."""
    waiting = [rank for rank, each in sorted(said.items()) if each.waits and each.key]
    lines = []
    for key, call in dict.fromkeys((said[rank].key, said[rank].call) for rank in waiting if said[rank].other == ALL):
        there = [rank for rank in waiting if (said[rank].key, said[rank].call, said[rank].other) == (key, call, ALL)]
        first, what = said[there[0]], {rank: said[rank].called for rank in there}
        number = f"call number {call} of {first.name!r}"
        if len(set(what.values())) > 1:
            lines.append(f"{number}: {differ(what)}")
        if late := absent(first, said):
            come = f"which {'has' if len(late) == 1 else 'have'} not come to {number}"
            lines.append(f"{ranks_told(there)} {verb(there, 'wait')} for {ranks_told(late)}, {come}")
    for rank in waiting:
        if said[rank].other >= 0:
            lines.append(f"rank {rank} waits for rank {said[rank].other}")
    if found := crossed(said):
        lines.append(wait_for_each_other(said, found))
    return lines


def verb(ranks: Sequence[int], word: str) -> str:
    return word if len(ranks) > 1 else f"{word}s"
