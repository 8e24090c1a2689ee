"""A flight recorder: the last operations of this rank, in a file that outlives it however it ends.

    flight/rank-0003.bin    | head | names, groups, lines of code | a ring of records, each of 64 bytes |
    flight/try-1/           the recordings of a leg that broke off, and after which the run was gone on with

A record is written when an operation begins and completed when it ends. The file is mapped into memory, so writing is a
store and no call of the system: what has been stored is in the file whether the process exits, crashes or is killed by
SIGKILL (not when its whole machine fails). `hpcdl postmortem` reads the files of all ranks together.

    cost    about 1 us for each operation; 64 bytes for each record, 100 KB for the tables

Times are those of this host's `perf_counter_ns`; the head says which time of day that was. Texts (operations, groups,
lines of code) are written once and numbered.
"""

import contextlib
import mmap
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.comm.diagnostics.call_signature import ALL, TYPES, Call
from hpcdl.comm.diagnostics.call_site import caller, passed, place

FOLDER = "flight"  # within a run's
RECORDING, TRY = re.compile(r"rank-[0-9]{4,}\.bin"), re.compile(r"try-([1-9][0-9]{0,8})")
MAGIC, VERSION = b"hpcdlfly", 1
REMEMBERED = 64  # calls of all ranks that a communicator knows, for those that wait longer for the others
STARTED, WAITING, DONE, FAILED = 1, 2, 3, 4  # of an operation: in flight, waited in, over
RUNS, LEFT, BROKE = 0, 1, 2  # of a rank: it runs, or nobody knows how it ended; left in good order; failed, as it says
TEXTS, WIDTH = 640, 144  # entries of the table of texts, and bytes of each
GROUPS = 128  # entries of the table of communicators
HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("capacity", "<u4"),
        ("rank", "<i4"),
        ("size", "<i4"),
        ("process", "<i8"),
        ("born", "<i8"),  # when the process started, as the kernel counts: tells it from another of the same number
        ("clock", "<i8"),  # perf_counter_ns, and ...
        ("time", "<i8"),  # ... time_ns, when the file was made
        ("seen", "<i8"),  # perf_counter_ns: the rank was there then
        ("state", "<i8"),
        ("ended", "<i8"),  # perf_counter_ns
        ("texts", "<i8"),  # how many there are
        ("groups", "<i8"),
        ("host", "S64"),
        ("why", "S400"),  # how it ended
    ]
)
# last: the number of its last call of all ranks by when the ring was full last; the records tell of later ones.
GROUP = np.dtype([("last", "<i8"), ("size", "<i4"), ("rank", "<i4"), ("key", "S32"), ("name", "S48")])
RECORD = np.dtype(
    [
        ("number", "<i8"),  # of this rank's operations, from 1 on; 0: none yet
        ("start", "<i8"),
        ("call", "<i8"),  # the number of the call among those of all ranks of the group; of two ranks: 0
        ("elements", "<i8"),
        ("other", "<i4"),  # the rank that it is with; ALL, SOME
        ("operation", "<u2"),  # texts by their numbers
        ("group", "<u2"),
        ("line", "<u2"),
        ("reduction", "<u2"),
        ("root", "<u2"),  # its last 16 bits
        ("kind", "u1"),  # of elements: calls.TYPES
        ("state", "u1"),
        ("end", "<i8"),  # 0: not yet
        ("bytes", "<i8"),  # sent; known at its end
    ]
)
BEGIN = struct.Struct("<4qi5H2Bqq").pack_into
END = struct.Struct("<Bqq").pack_into  # from the state on
BYTE = struct.Struct("B").pack_into
LONG = struct.Struct("<q").pack_into
STATE = RECORD.fields["state"][1]  # type: ignore[index]
NO_TYPE = 255
assert struct.calcsize("<4qi5H2Bqq") == RECORD.itemsize == 64


def sizes(capacity: int) -> tuple[int, int, int, int]:
    """Where the table of texts, that of groups and the records begin, and where the file ends."""
    texts = HEAD.itemsize
    groups = texts + TEXTS * WIDTH
    records = -(-(groups + GROUPS * GROUP.itemsize) // 64) * 64
    return texts, groups, records, records + capacity * RECORD.itemsize


def earlier_tries(folder: Path) -> dict[int, Path]:
    """Of a run's folder, where the recordings of legs lie that broke off before the last one, by their number."""
    where = folder / FOLDER
    if where.is_symlink() or not where.is_dir():
        return {}
    found = {int(name[1]): each for each in where.iterdir() if (name := TRY.fullmatch(each.name))}
    return {
        number: found[number] for number in sorted(found) if found[number].is_dir() and not found[number].is_symlink()
    }


def recorded_in(where: Path) -> list[Path]:
    """The recordings in a folder, by rank."""
    return sorted(each for each in where.glob("rank-*.bin") if RECORDING.fullmatch(each.name))


def set_aside(folder: Path) -> None:
    """A run is gone on with: the recordings of its last leg, which broke off, become those of one more try."""
    where = folder / FOLDER
    if not where.is_symlink() and (found := recorded_in(where)):
        aside = where / f"try-{1 + max(earlier_tries(folder), default=0)}"
        aside.mkdir()
        for each in found:
            each.rename(aside / each.name)


def forget(folder: Path) -> None:
    """Remove the recordings of earlier tries."""
    for where in earlier_tries(folder).values():
        for each in recorded_in(where):
            each.unlink()
        with contextlib.suppress(OSError):  # somebody has put other files there
            where.rmdir()
    with contextlib.suppress(OSError):
        (folder / FOLDER).rmdir()


def born(process: int | str = "self") -> int:
    """When a process started, in the kernel's ticks; 0: there is none, or none any more (a zombie), or nobody knows."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


class FlightRecorder:
    """Records what this rank does in the file at `path`, the last `capacity` operations of it.

    rank, size: of the ranks whose files lie together. groups: the communicators that there are. Raises OSError where
    the file cannot be made.
    """

    def __init__(self, path: Path, rank: int, size: int, capacity: int, groups: Iterable[Any] = ()):
        self.path, self.capacity = path, capacity
        self.first_text, self.first_group, self.first, length = sizes(capacity)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(
                file, 0, length
            )  # a store into a page that the disk has no room for would end the process
            self.map = mmap.mmap(file, length)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        self.count = 0
        self.texts: dict[str, int] = {"": 0}
        self.lines: dict[tuple[int, int], int] = {}
        self.kept: list[Any] = []  # code whose id is in `lines`
        self.groups: dict[int, int] = {}  # their numbers, by id
        self.members: dict[int, Any] = {}  # the communicators by these numbers
        self.made = 0
        self.calls: dict[Call, tuple[int, int, int, int]] = {}
        self.head = np.frombuffer(self.map, HEAD, 1)
        head = self.head[0]
        head["capacity"], head["rank"], head["size"] = capacity, rank, size
        head["process"], head["born"], head["host"] = os.getpid(), born(), socket.gethostname().encode()[:63]
        head["clock"], head["time"], head["texts"] = time.perf_counter_ns(), time.time_ns(), 1
        head["seen"], head["version"], head["magic"] = head["clock"], VERSION, MAGIC
        self.seen = HEAD.fields["seen"][1]  # type: ignore[index]
        for group in groups:
            self.know(group)

    # -- as fast as can be -------------------------------------------------------------------------------------------

    def begin(self, group: Any, name: str, start: int, other: int, state: int = WAITING) -> int:
        """An operation begins on the communicator `group`; returns where its record lies. start: by perf_counter_ns."""
        self.count = number = self.count + 1
        at = self.first + number % self.capacity * 64
        known = self.groups.get(id(group))
        if known is None:
            known = self.know(group)
        frame: Any = sys._getframe(2)
        try:
            while passed[frame.f_code.co_filename]:  # as `caller`, which is not called
                frame = frame.f_back
        except (KeyError, AttributeError):
            frame = caller(2)
        line = self.lines.get((id(frame.f_code), frame.f_lasti))
        if line is None:
            line = self._line(frame)
        if other == ALL:
            sequence = group.sequence
            call = group._calls[sequence % REMEMBERED]
            what = self.calls.get(call)
            if what is None:
                what = self._call(call)
            operation, kind, reduction, root = what
            BEGIN(self.map, at, number, start, sequence, call[2], ALL, operation, known, line, reduction, root, kind,
                  state, 0, 0)  # fmt: skip
        else:
            operation = self.texts.get(name) or self._text(name)
            BEGIN(self.map, at, number, start, 0, 0, other, operation, known, line, 0, 0, NO_TYPE, state, 0, 0)
        if number % self.capacity == 0:
            self._note_calls()
        return at

    def end(self, at: int, stop: int, sent: int, state: int = DONE) -> None:
        """The operation whose record lies there is over."""
        END(self.map, at + STATE, state, stop, sent)

    def waits(self, at: int) -> None:
        """This rank waits in that operation."""
        BYTE(self.map, at + STATE, WAITING)

    def beat(self) -> None:
        """The rank is there."""
        LONG(self.map, self.seen, time.perf_counter_ns())

    # -- what is new -------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> int:
        """The number of a text; 0 where there is no room for more."""
        known = self.texts.get(text)
        if known is None:
            known = len(self.texts)
            if known == TEXTS:
                return 0
            self.texts[text] = known
            at = self.first_text + known * WIDTH
            self.map[at : at + WIDTH] = text.encode()[: WIDTH - 1].ljust(WIDTH, b"\0")
            self.head["texts"] = known + 1
        return known

    def _line(self, frame: Any) -> int:
        if len(self.lines) == 4 * TEXTS:  # code that is made anew again and again
            self.lines.clear()
            self.kept.clear()
        self.kept.append(frame.f_code)
        found = self.lines[id(frame.f_code), frame.f_lasti] = self._text(place(frame))
        return found

    def _call(self, call: Call) -> tuple[int, int, int, int]:
        name, kind, _, reduction, root = call
        if len(self.calls) == 4 * TEXTS:
            self.calls.clear()
        what = self._text(name), NO_TYPE if kind is None else TYPES[kind], self._text(reduction), root & 0xFFFF
        self.calls[call] = what
        return what

    def know(self, group: Any) -> int:
        """The number of a communicator, from when it is made on; the last one stands for all that find no room."""
        number = min(self.made, GROUPS - 1)
        at = self.first_group + number * GROUP.itemsize
        watcher = group._watcher
        key = "" if watcher is None else watcher.keys.get(id(group), "")
        values = group.sequence, group.size, group.rank, key.encode()[:31], group.name.encode()[:47]
        self.map[at : at + GROUP.itemsize] = np.array([values], GROUP).tobytes()
        self.made += 1
        self.head["groups"] = number + 1
        self.groups[id(group)], self.members[number] = number, group
        return number

    def _note_calls(self) -> None:
        """How many calls of all ranks there were on each communicator: the records of older ones are overwritten."""
        for number, group in self.members.items():
            LONG(self.map, self.first_group + number * GROUP.itemsize, group.sequence)

    def forget(self, group: Any) -> None:
        """That communicator is freed: another one may come to lie where it lay."""
        number = self.groups.pop(id(group), None)
        if number is not None and self.members.get(number) is group:
            LONG(self.map, self.first_group + number * GROUP.itemsize, self.members.pop(number).sequence)

    # -- the end -----------------------------------------------------------------------------------------------------

    def ended(self, state: int, why: str) -> None:
        """How this rank has ended; the first word counts."""
        if self.head["state"][0] == RUNS:
            self.head["why"], self.head["ended"] = why.encode()[:399], time.perf_counter_ns()
            self.head["state"] = state

    def discard(self) -> None:
        """The run has ended in good order: nobody needs to look back."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are there still
            self.path.parent.rmdir()
