"""Which ranks wait for what can never come, from what each rank says of itself.

A rank that has left its program calls nothing any more. Who waits for such a rank waits for ever, and so does who waits
for one that does:

    waits for            is stuck when                              (least fixpoint, from the ranks that have left)
    one rank             that rank has left, or is stuck
    all, in call n       a rank that has not made call n has left, or is stuck
    some rank            all of them have left, or are stuck

What was sent before its sender left may still be on its way: a wait for one rank or some counts after SENT seconds.
A rank that computes is never stuck, nor is one that all others have joined, however long its messages take; and ranks
that wait for each other while none has left are not, for their messages may be on their way: --timeout ends those.
"""

from typing import Any, NamedTuple

from hpcdl.comm.calls import differ, ranks_told
from hpcdl.comm.progress import ALL, SOME

SENT = 5.0  # seconds
LONG = 1.0  # seconds of waiting that are looked into


class Said(NamedTuple):
    """What a rank says of itself. Ranks are numbered as all ranks of the job's communicator are.

    text    what it does, and where            busy   with what all know to be going on
    left    whether it has left its program    calls  of each communicator, by its key, the number of its last call
    made    what it has called where another rank waits, in words
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


def stuck(said: dict[int, Said], size: int) -> set[int]:
    """The ranks, of `size`, that wait and wait for ever; who has not said anything is taken to compute."""
    found = {rank for rank, each in said.items() if each.left}
    left, before = set(found), set[int]()
    while found != before:
        before = set(found)
        found |= {rank for rank, each in said.items() if rank not in found and is_stuck(rank, each, said, found, size)}
    return found - left


def is_stuck(rank: int, each: Said, said: dict[int, Said], found: set[int], size: int) -> bool:
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


def different(said: dict[int, Said], members: tuple[int, ...]) -> str | None:
    """The message for ranks whose calls of the same number are different ones; None where they are not."""
    calls = {rank: str(each.made) for rank, each in said.items() if each.made and rank in members}
    return differ(calls) if len(set(calls.values())) > 1 else None


def waits_for_ever(said: dict[int, Said], found: set[int]) -> str:
    """The message for ranks that are stuck."""
    left = sorted(rank for rank, each in said.items() if each.left)
    gone = f"{ranks_told(left)} {'has' if len(left) == 1 else 'have'} left before the end"
    first = min(found)
    return f"{gone}, {ranks_told(sorted(found))} would wait for ever: rank {first} {said[first].text}"


def as_said(fields: dict[str, Any]) -> Said:
    """From the fields as JSON brings them."""
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Said(**fields | lists)
