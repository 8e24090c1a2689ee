"""What the ranks of a run were doing when it broke off, or are doing now: from their flight recordings alone.

    flight_recorder.py writes   flight/rank-0000.bin, rank-0001.bin, ...: the last operations of each rank
    this module reads them      who is where, and how each has ended
    deadlock.py concludes       who waits for whom, and which calls do not fit together

Which rank ended first is known where one has said why it ends, and where it was seen for the last time well before the
others were. A launcher ends all ranks within some milliseconds of the first, and then no clock tells.
"""

import math
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.comm.diagnostics import flight_recorder
from hpcdl.comm.diagnostics.call_signature import KINDS, describe_call, format_ranks
from hpcdl.comm.diagnostics.deadlock import LONG, RankStatus, status_lines
from hpcdl.comm.diagnostics.flight_recorder import (
    ALL,
    BROKE,
    DONE,
    FAILED,
    LEFT,
    RUNS,
    WAITING,
    earlier_tries,
    recordings_in,
)
from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.formatting import counted

EARLIER = 1.0  # seconds: who was seen for the last time so long before the others has ended first
STATES = {flight_recorder.STARTED: "in flight", WAITING: "waited in", DONE: "done", FAILED: "failed"}


@dataclass
class RecordedGroup:
    """A communicator, as one rank has recorded it. last: the number of its last call of all ranks."""

    key: str
    name: str
    rank: int
    size: int
    last: int


class Recording:
    """What one rank has recorded. Raises UsageError for a file that is none, is damaged, or of another version."""

    def __init__(self, path: Path):
        self.path = path
        with blamed_on(f"{path} cannot be read"):
            data = path.read_bytes()
        if len(data) < flight_recorder.HEAD.itemsize or data[: len(flight_recorder.MAGIC)] != flight_recorder.MAGIC:
            raise UsageError(f"{path} is no flight recording")
        self.head = head = np.frombuffer(data, flight_recorder.HEAD, 1)[0]
        if head["version"] != flight_recorder.VERSION:
            raise UsageError(
                f"{path} is a recording of version {head['version']}, "
                f"and this hpcdl reads version {flight_recorder.VERSION}"
            )
        damaged = f"{path} is damaged"
        texts, groups, records, length = flight_recorder.sizes(int(head["capacity"]))
        if (
            len(data) != length
            or not 0 <= head["texts"] <= flight_recorder.TEXTS
            or not 0 <= head["groups"] <= flight_recorder.GROUPS
        ):
            raise UsageError(f"{damaged}: {len(data):,} bytes, where {length:,} are told")
        self.texts = [
            text(data[texts + i * flight_recorder.WIDTH :][: flight_recorder.WIDTH]) for i in range(head["texts"])
        ]
        found = np.frombuffer(data, flight_recorder.GROUP, int(head["groups"]), groups)
        self.groups = [
            RecordedGroup(
                text(g["key"]) or text(g["name"]), text(g["name"]), int(g["rank"]), int(g["size"]), int(g["last"])
            )
            for g in found
        ]
        every = np.frombuffer(data, flight_recorder.RECORD, int(head["capacity"]), records)
        self.records = np.sort(every[every["number"] > 0], order="number")
        bad = [name for name in ("operation", "line", "reduction") if (self.records[name] >= len(self.texts)).any()]
        if bad or (len(self.records) and (self.records["group"] >= len(self.groups)).any()):
            raise UsageError(f"{damaged}: its records tell of what is not there")
        for record in self.records[self.records["other"] == ALL]:
            group = self.groups[record["group"]]
            group.last = max(group.last, int(record["call"]))
        self.rank, self.size = int(head["rank"]), int(head["size"])
        if not 0 <= self.rank < self.size:
            raise UsageError(f"{damaged}: it is of rank {self.rank} of {self.size}")

    @property
    def alive(self) -> bool:
        """Whether the process is there, as far as this machine can tell; of another, whether it was just seen."""
        if self.head["state"] != RUNS:
            return False
        if text(self.head["host"]) == socket.gethostname()[:63]:
            return (
                bool(self.head["born"])
                and flight_recorder.process_start(int(self.head["process"])) == self.head["born"]
            )
        return time.time() - self.last_seen < 2 * LONG

    def at(self, clock: int) -> float:
        """A time of the recording as seconds since 1970."""
        return (int(self.head["time"]) + int(clock) - int(self.head["clock"])) / 1e9

    @property
    def last_seen(self) -> float:
        """The last sign of the rank, in seconds since 1970."""
        return self.at(max(self.head["seen"], *self.records["start"][-1:], *self.records["end"][-1:]))

    def describe_call(self, record: Any) -> str:
        """The operation of a record, in words."""
        name = self.texts[record["operation"]] or "an operation"
        if record["other"] != ALL:
            return name
        kind = KINDS.get(int(record["kind"]))
        return describe_call(
            (name, kind, int(record["elements"]), self.texts[record["reduction"]], int(record["root"]))
        )

    @property
    def waits(self) -> Any:
        """The record of the operation that the rank waits in, or None: of several the innermost."""
        found = self.records[self.records["state"] == WAITING]
        return found[-1] if len(found) else None

    @property
    def text(self) -> str:
        """What a rank does that waits in no operation."""
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
    """Where the recordings of each try of a run lie, by its number: a run that is gone on with has several."""
    found, last = earlier_tries(folder), folder / flight_recorder.FOLDER
    return found | ({1 + max(found, default=0): last} if recordings_in(last) else {})


def recordings(folder: Path, number: int = 0) -> dict[int, Recording]:
    """The recordings of a run's folder by rank: of the try of this number, 0: of the last one.

    Raises UsageError where there are none, or they do not fit together.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    known = tries(folder)
    if number and known and number not in known:
        raise UsageError(f"--which {number}: there are recordings of {tries_told(known)}")
    paths = recordings_in(known[number or max(known)]) if known else []
    if not paths:
        raise UsageError(
            f"{folder} has no flight recordings: they are there while a run goes on and where it breaks off, "
            "unless it has --flight 0"
        )
    found = {each.rank: each for each in map(Recording, paths)}
    if len(found) < len(paths) or len({each.size for each in found.values()}) > 1:
        raise UsageError(f"{paths[0].parent}: the files are of several runs; remove them")
    return found


def tries_told(known: Iterable[int]) -> str:
    """Tries, in words."""
    numbers = [str(each) for each in sorted(known)]
    return f"try {numbers[0]}" if len(numbers) == 1 else f"tries {', '.join(numbers[:-1])} and {numbers[-1]}"


def ended_well(folder: Path) -> bool:
    """Whether the run has come to its end, and has said so."""
    return (folder / "summary.json").is_file() and not (folder / flight_recorder.FOLDER).is_dir()


def members(found: dict[int, Recording]) -> dict[str, dict[int, int]]:
    """Of each communicator, by its key, which rank of the run is which of its own."""
    ranks: dict[str, dict[int, int]] = {}
    for rank, each in found.items():
        for group in each.groups:
            ranks.setdefault(group.key, {})[group.rank] = rank
    return ranks


def said(found: dict[int, Recording]) -> dict[int, RankStatus]:
    """What each rank would answer the watchdog (hpcdl/comm/diagnostics/deadlock.py)."""
    ranks = members(found)
    return {rank: says(each, ranks) for rank, each in found.items()}


def says(each: Recording, ranks: dict[str, dict[int, int]]) -> RankStatus:
    calls = {group.key: group.last for group in each.groups}
    if each.head["state"] == LEFT:
        return RankStatus("has ended its program", True, calls)
    record = each.waits
    if record is None:
        return RankStatus(each.text, False, calls)
    group, other = each.groups[record["group"]], int(record["other"])
    alive, start = each.alive, int(record["start"])
    return RankStatus(
        each.text,
        False,
        calls,
        waits=(time.time() - each.at(start) if alive else math.inf, start),  # who has gone comes no further
        key=group.key,
        members=tuple(ranks[group.key].values()),
        other=ranks[group.key].get(other, other) if other >= 0 else other,
        call=int(record["call"]),
        called=each.describe_call(record),
        name=group.name,
        at=each.texts[record["line"]],
        together=other == ALL,
    )


def story(folder: Path, found: dict[int, Recording]) -> list[str]:
    """The whole in words, a line for each thing; of which try it is, where there are several."""
    size, known = next(iter(found.values())).size, tries(folder)
    shown = next((number for number, place in known.items() if place == next(iter(found.values())).path.parent), 0)
    alive = sorted(rank for rank, each in found.items() if each.alive)
    gone = sorted(set(found) - set(alive))
    lines = [f"{folder}: {counted(size, 'rank')}, {state(alive, gone)}"]
    if list(known) != [1] or known[1].parent != folder:
        others = [number for number in known if number != shown]
        lines[0] += f" (try {shown}; --which shows {tries_told(others)})" if others else f" (try {shown})"
    lines += endings(found, gone)
    return lines + status_lines(said(found), size)


def state(alive: list[int], gone: list[int]) -> str:
    if not gone:
        return "running" if len(alive) == 1 else "all running"
    return f"{format_ranks(alive)} running, {format_ranks(gone)} gone" if alive else "the job has ended"


def endings(found: dict[int, Recording], gone: list[int]) -> list[str]:
    """Which ranks have ended how and when, the first one first, as far as it is known."""
    spoken = {rank: found[rank] for rank in gone if found[rank].head["state"] == BROKE}
    first = sorted(spoken, key=lambda rank: spoken[rank].at(int(spoken[rank].head["ended"])))
    lines = [
        f"rank {rank} {text(spoken[rank].head['why'])}, at {clock(spoken[rank].at(int(spoken[rank].head['ended'])))}"
        for rank in first
    ]
    silent = [rank for rank in gone if found[rank].head["state"] == RUNS]
    if silent and not spoken:
        seen = {rank: found[rank].last_seen for rank in found}
        last = max(seen.values())
        early = sorted((rank for rank in silent if last - seen[rank] > EARLIER), key=lambda rank: seen[rank])
        lines += [f"rank {rank} was seen last at {clock(seen[rank])}, {last - seen[rank]:.1f} s before the others"
                  for rank in early]  # fmt: skip
        if not early:
            lines.append(f"{format_ranks(silent)} ended without a word, at about {clock(last)}: killed, or crashed")
            waiting = [rank for rank in silent if found[rank].waits is not None]
            if waiting and (busy := sorted(set(silent) - set(waiting))):
                lines.append(f"which was first is not known; {format_ranks(busy)} waited for nobody: look there first")
    return lines


def clock(seconds: float) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f"{seconds % 1:.2f}"[1:]


def table(each: Recording, last: int) -> list[str]:
    """The last operations of a rank, the latest last: when, how long, what, with whom, from where."""
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
