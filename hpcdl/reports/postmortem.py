"""What the ranks of a run were doing when it broke off, or are doing now, from their flight recordings alone.

    flight_recorder.py writes   flight/rank-0000.bin, rank-0001.bin, ...: the last operations of each rank
    this module reads them      where each rank is, and how it has ended
    deadlock.py concludes       who waits for whom, and which calls do not fit together

The first rank to end is known if a rank gave its reason, or was last seen well before the others. A launcher ends all
ranks within some milliseconds of the first, and then no clock tells which was first."""

import math
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm.diagnostics import flight_recorder
from hpcdl.comm.diagnostics.call_signature import KINDS, describe_call, format_ranks
from hpcdl.comm.diagnostics.deadlock import LONG, RankStatus, status_lines
from hpcdl.comm.diagnostics.flight_recorder import ALL, BROKE, DONE, FAILED, GROUPS, LEFT, RUNS, TEXTS, WAITING, WIDTH
from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.formatting import counted

EARLIER = 1.0  # seconds: a rank last seen so long before the others has ended first
STATES = {flight_recorder.STARTED: "in flight", WAITING: "waited in", DONE: "done", FAILED: "failed"}


class RecordedGroup(NamedTuple):
    """A communicator as one rank has recorded it. key: equal on its ranks. last: number of its last collective call."""

    key: str
    name: str
    rank: int
    last: int


class Recording:
    """The recording of one rank. Raises UsageError for a file that is no recording, damaged, or of another version."""

    def __init__(self, path: Path):
        self.path = path
        with blamed_on(f"{path} cannot be read"):
            data = path.read_bytes()
        if len(data) < flight_recorder.HEAD.itemsize or data[: len(flight_recorder.MAGIC)] != flight_recorder.MAGIC:
            raise UsageError(f"{path} is no flight recording")
        self.head = head = np.frombuffer(data, flight_recorder.HEAD, 1)[0]
        if head["version"] != flight_recorder.VERSION:
            reads = f"this hpcdl reads version {flight_recorder.VERSION}"
            raise UsageError(f"{path} is a recording of version {head['version']}, and {reads}")
        damaged = f"{path} is damaged"
        texts, groups, records, length = flight_recorder.sizes(int(head["capacity"]))
        if len(data) != length or not 0 <= head["texts"] <= TEXTS or not 0 <= head["groups"] <= GROUPS:
            raise UsageError(f"{damaged}: it has {len(data):,} bytes, but its head asks for {length:,}")
        self.texts = [text(data[texts + i * WIDTH :][:WIDTH]) for i in range(head["texts"])]
        found = np.frombuffer(data, flight_recorder.GROUP, int(head["groups"]), groups)
        every = np.frombuffer(data, flight_recorder.RECORD, int(head["capacity"]), records)
        self.records = every = np.sort(every[every["number"] > 0], order="number")
        if (every["group"] >= len(found)).any() or any(
            (every[name] >= len(self.texts)).any() for name in ("operation", "line", "reduction")
        ):
            raise UsageError(f"{damaged}: its records name groups or texts that are missing")
        last = found["last"].copy()
        together = every["other"] == ALL
        np.maximum.at(last, every["group"][together], every["call"][together])
        self.groups = [
            RecordedGroup(text(group["key"]) or text(group["name"]), text(group["name"]), int(group["rank"]), int(call))
            for group, call in zip(found, last, strict=True)
        ]
        self.rank, self.size = int(head["rank"]), int(head["size"])
        if not 0 <= self.rank < self.size:
            raise UsageError(f"{damaged}: it is of rank {self.rank} of {self.size}")

    @property
    def alive(self) -> bool:
        """True if the rank's process lives. A process on another host counts as alive if it was seen just now."""
        if self.head["state"] != RUNS:
            return False
        if text(self.head["host"]) == socket.gethostname()[:63]:
            born = self.head["born"]
            return bool(born) and flight_recorder.process_start(int(self.head["process"])) == born
        return time.time() - self.last_seen < 2 * LONG

    def at(self, clock: int) -> float:
        """Return a time of the recording (clock, in ns) in UNIX seconds."""
        return (int(self.head["time"]) + int(clock) - int(self.head["clock"])) / 1e9

    @property
    def last_seen(self) -> float:
        return self.at(max(self.head["seen"], *self.records["start"][-1:], *self.records["end"][-1:]))

    def describe_call(self, record: Any) -> str:
        name = self.texts[record["operation"]] or "an operation"
        if record["other"] != ALL:
            return name
        kind, elements, root = KINDS.get(int(record["kind"])), int(record["elements"]), int(record["root"])
        return describe_call((name, kind, elements, self.texts[record["reduction"]], root))

    @property
    def waits(self) -> Any:
        """The record of the innermost operation in which the rank waits; None: it does not wait."""
        found = self.records[self.records["state"] == WAITING]
        return found[-1] if len(found) else None

    @property
    def text(self) -> str:
        """A text for a rank that waits in no operation: its last one, and how many are in flight."""
        done = self.records[np.isin(self.records["state"], (DONE, FAILED))]
        open_ones = int((self.records["state"] == flight_recorder.STARTED).sum())
        more = f", {counted(open_ones, 'operation')} in flight" if open_ones else ""
        if not len(done):
            return f"in no communication (none before){more}"
        last = done[np.argmax(done["end"])]
        number = f", call number {last['call']} of {self.groups[last['group']].name!r}" if last["call"] else ""
        call, line = self.describe_call(last), self.texts[last["line"]]
        return f"in no communication (the last was {call}{number}, at {line}){more}"


def text(found: bytes) -> str:
    return printable(found.partition(b"\0")[0].decode(errors="replace"), allowed="")


def tries(folder: Path) -> dict[int, Path]:
    """Return the folder of recordings of each try of a run, by number of the try. A resumed run can have several."""
    found, last = flight_recorder.earlier_tries(folder), folder / flight_recorder.FOLDER
    return found | ({1 + max(found, default=0): last} if flight_recorder.recordings_in(last) else {})


def recordings(folder: Path, number: int = 0) -> dict[int, Recording]:
    """Return the recordings of a run's folder by rank, of try `number` (0: the last). Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    known = tries(folder)
    if number and known and number not in known:
        raise UsageError(f"--which {number}: there are recordings of {tries_told(known)}")
    paths = flight_recorder.recordings_in(known[number or max(known)]) if known else []
    if not paths:
        when = "while it is running and if it breaks off, unless it has --flight 0"
        raise UsageError(f"{folder} has no flight recordings: a run has them {when}")
    found = {each.rank: each for each in map(Recording, paths)}
    if len(found) < len(paths) or len({each.size for each in found.values()}) > 1:
        raise UsageError(f"{paths[0].parent}: the recordings belong to several runs; remove them")
    return found


def tries_told(known: Iterable[int]) -> str:
    numbers = [str(each) for each in sorted(known)]
    return f"try {numbers[0]}" if len(numbers) == 1 else f"tries {', '.join(numbers[:-1])} and {numbers[-1]}"


def ended_well(folder: Path) -> bool:
    return (folder / "summary.json").is_file() and not (folder / flight_recorder.FOLDER).is_dir()


def said(found: dict[int, Recording]) -> dict[int, RankStatus]:
    """Return what each rank would answer the watchdog (hpcdl/comm/diagnostics/deadlock.py)."""
    members: dict[str, dict[int, int]] = {}  # by communicator and rank in it, the rank of the run
    for rank, each in found.items():
        for group in each.groups:
            members.setdefault(group.key, {})[group.rank] = rank
    return {rank: status(each, members) for rank, each in found.items()}


def status(each: Recording, members: dict[str, dict[int, int]]) -> RankStatus:
    calls = {group.key: group.last for group in each.groups}
    if each.head["state"] == LEFT:
        return RankStatus("has ended its program", True, calls)
    record = each.waits
    if record is None:
        return RankStatus(each.text, False, calls)
    group, other, start = each.groups[record["group"]], int(record["other"]), int(record["start"])
    ranks = members[group.key]
    return RankStatus(
        each.text,
        False,
        calls,
        waits=(time.time() - each.at(start) if each.alive else math.inf, start),  # a process that is gone waits forever
        key=group.key,
        members=tuple(ranks.values()),
        other=ranks.get(other, other) if other >= 0 else other,
        call=int(record["call"]),
        called=each.describe_call(record),
        name=group.name,
        at=each.texts[record["line"]],
        together=other == ALL,
    )


def story(folder: Path, found: dict[int, Recording]) -> list[str]:
    """Return lines on the state of the job and of all ranks; the first line names the try if there are several."""
    size, known = next(iter(found.values())).size, tries(folder)
    shown = next((number for number, place in known.items() if place == next(iter(found.values())).path.parent), 0)
    alive = sorted(rank for rank, each in found.items() if each.alive)
    gone = sorted(set(found) - set(alive))
    if not gone:
        state = "running" if len(alive) == 1 else "all running"
    else:
        state = f"{format_ranks(alive)} running, {format_ranks(gone)} gone" if alive else "the job has ended"
    lines = [f"{folder}: {counted(size, 'rank')}, {state}"]
    if list(known) != [1] or known[1].parent != folder:
        others = [number for number in known if number != shown]
        lines[0] += f" (try {shown}; --which shows {tries_told(others)})" if others else f" (try {shown})"
    lines += endings(found, gone)
    return lines + status_lines(said(found), size)


def endings(found: dict[int, Recording], gone: list[int]) -> list[str]:
    """Return lines on how and when the ranks `gone` have ended, as far as known, the first to end first."""
    spoken = {rank: found[rank] for rank in gone if found[rank].head["state"] == BROKE}
    ended = sorted((each.at(int(each.head["ended"])), rank) for rank, each in spoken.items())
    lines = [f"rank {rank} {text(found[rank].head['why'])}, at {clock(at)}" for at, rank in ended]
    silent = [rank for rank in gone if found[rank].head["state"] == RUNS]
    if silent and not spoken:
        seen = {rank: found[rank].last_seen for rank in found}
        last = max(seen.values())
        for at, rank in sorted((seen[rank], rank) for rank in silent if last - seen[rank] > EARLIER):
            lines.append(f"rank {rank} was seen last at {clock(at)}, {last - at:.1f} s before the others")
        if not lines:
            lines.append(f"{format_ranks(silent)} ended without a word, at about {clock(last)}: killed, or crashed")
            waiting = [rank for rank in silent if found[rank].waits is not None]
            if waiting and (busy := sorted(set(silent) - set(waiting))):
                unknown = "the first rank to end is not known"
                lines.append(f"{unknown}; {format_ranks(busy)} waited for no other rank: look there first")
    return lines


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f"{seconds % 1:.2f}"[1:]


def table(each: Recording, last: int) -> list[str]:
    """Return lines on a rank's `last` latest operations, oldest first: time, duration, call, partner, code line."""
    lines = [f"rank {each.rank}, the last {counted(min(last, len(each.records)), 'operation')}:"]
    for record in each.records[-last:]:
        start, end = int(record["start"]), int(record["end"])
        took = f"{(end - start) / 1e3:,.0f} us" if end else STATES.get(int(record["state"]), "?")
        number = f" number {record['call']}" if record["call"] else ""
        group = each.groups[record["group"]].name
        other = f", with rank {record['other']}" if record["other"] >= 0 else ""
        sent = f", {record['bytes']:,} bytes sent" if end else ""
        what = f"{each.describe_call(record)},{number} of {group!r}{other}{sent}, at {each.texts[record['line']]}"
        lines.append(f"  {clock(each.at(start))}  {took:>12}  {what}")
    return lines
