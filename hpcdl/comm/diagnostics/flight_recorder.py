"""Flight recorder: the last operations of this rank, in a memory-mapped file that survives its death.

    flight/rank-0003.bin    | head | names, groups, lines of code | a ring of records, each of 64 bytes |
    flight/try-1/           the recordings of an interrupted segment of a run that was resumed

A record is written when an operation begins and completed when it ends, about 1 us in all. A write is a store without a
system call, and survives an exit, a crash or SIGKILL of the process (not a failure of the machine). `hpcdl postmortem`
reads the files of all ranks together. Times are this host's `perf_counter_ns`; the head relates them to the time of
day. Texts (operations, groups, lines of code) are written once, in tables of 100 KB, and numbered."""

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
from hpcdl.comm.diagnostics.call_site import caller, location, skipped

FOLDER = "flight"  # in a run's folder
RECORDING, TRY = re.compile(r"rank-[0-9]{4,}\.bin"), re.compile(r"try-([1-9][0-9]{0,8})")
MAGIC, VERSION = b"hpcdlfly", 1
REMEMBERED = 64  # collective calls that a communicator remembers, for ranks that wait long
STARTED, WAITING, DONE, FAILED = 1, 2, 3, 4  # states of an operation: in flight, waited in, over
RUNS, LEFT, BROKE = 0, 1, 2  # states of a rank: running, or ended without a record; exited in good order; failed
TEXTS, WIDTH = 640, 144  # entries of the table of texts, and bytes of each
GROUPS = 128  # entries of the table of communicators


def fields(text: str) -> np.dtype:
    """Return the dtype of a structure with these fields: names and types, as in fields("rank <i4, host S64")."""
    return np.dtype([(name, kind) for name, kind in map(str.split, text.split(","))])


# born: start time of the process in kernel ticks; with the number it identifies the process. clock, time:
# perf_counter_ns and time_ns when the file was made. seen, ended: perf_counter_ns of the last sign of life, and of the
# end, with its state and reason. texts, groups: how many there are.
HEAD = fields(
    "magic S8, version <u4, capacity <u4, rank <i4, size <i4, process <i8, born <i8, clock <i8, time <i8, seen <i8,"
    "state <i8, ended <i8, texts <i8, groups <i8, host S64, why S400"
)
# last: the number of the last collective call when the ring was last full; records tell of later ones.
GROUP = fields("last <i8, size <i4, rank <i4, key S32, name S48")
# number: of the operation on this rank, from 1 (0: an empty record). call: among the collective calls of the group (0:
# point-to-point). other: a rank, ALL or SOME. operation, line, reduction: numbers of texts. root: its last 16 bits.
# kind: of the elements (call_signature.TYPES). end: 0 means not yet. bytes: sent; set at the end.
RECORD = fields(
    "number <i8, start <i8, call <i8, elements <i8, other <i4, operation <u2, group <u2, line <u2, reduction <u2,"
    "root <u2, kind u1, state u1, end <i8, bytes <i8"
)
BEGIN = struct.Struct("<4qi5H2Bqq").pack_into
END = struct.Struct("<Bqq").pack_into  # from the field `state` on
BYTE = struct.Struct("B").pack_into
LONG = struct.Struct("<q").pack_into
STATE = RECORD.fields["state"][1]  # type: ignore[index]
NO_TYPE = 255
assert struct.calcsize("<4qi5H2Bqq") == RECORD.itemsize == 64


def sizes(capacity: int) -> tuple[int, int, int, int]:
    """Return the offsets of texts, groups and records in a file of `capacity` records, and the length of the file."""
    texts = HEAD.itemsize
    groups = texts + TEXTS * WIDTH
    records = -(-(groups + GROUPS * GROUP.itemsize) // 64) * 64
    return texts, groups, records, records + capacity * RECORD.itemsize


def earlier_tries(folder: Path) -> dict[int, Path]:
    """Return, by number, the folders with recordings of a run's earlier, interrupted segments."""
    flight = folder / FOLDER
    try:
        entries = [] if flight.is_symlink() else list(flight.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # a rank that ends removes the folder if it is empty, at any moment
        entries = []
    found = {int(name[1]): each for each in entries if (name := TRY.fullmatch(each.name))}
    return {number: each for number, each in sorted(found.items()) if each.is_dir() and not each.is_symlink()}


def recordings_in(folder: Path) -> list[Path]:
    """Return the recordings in a folder, sorted by rank."""
    return sorted(each for each in folder.glob("rank-*.bin") if RECORDING.fullmatch(each.name))


def set_aside(folder: Path) -> None:
    """Move the recordings of a resumed run's last segment, which was interrupted, to the next try folder."""
    flight = folder / FOLDER
    if not flight.is_symlink() and (recordings := recordings_in(flight)):
        aside = flight / f"try-{1 + max(earlier_tries(folder), default=0)}"
        aside.mkdir()
        for recording in recordings:
            recording.rename(aside / recording.name)


def forget(folder: Path) -> None:
    """Remove the recordings of earlier tries, and the folders if they are then empty."""
    for earlier in earlier_tries(folder).values():
        for recording in recordings_in(earlier):
            recording.unlink()
        with contextlib.suppress(OSError):  # there are other files in it
            earlier.rmdir()
    with contextlib.suppress(OSError):
        (folder / FOLDER).rmdir()


def process_start(process: int | str = "self") -> int:
    """Return the start time of a process in kernel ticks; 0 if it does not exist, is a zombie, or is unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


class FlightRecorder:
    """Records the last `capacity` operations of this rank in the file at `path`. rank, size: this rank, and the number
    of ranks whose files share a folder. groups: existing communicators. OSError if the file cannot be made."""

    def __init__(self, path: Path, rank: int, size: int, capacity: int, groups: Iterable[Any] = ()):
        self.path, self.capacity = path, capacity
        self.first_text, self.first_group, self.first, length = sizes(capacity)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(file, 0, length)  # a store into a page without disk space would kill the process
            self.map = mmap.mmap(file, length)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        self.count = 0
        self.texts: dict[str, int] = {"": 0}
        self.lines: dict[tuple[int, int], int] = {}
        self.code_objects: list[Any] = []  # keeps the code objects in `lines` alive
        self.groups: dict[int, int] = {}  # numbers of communicators, by id
        self.members: dict[int, Any] = {}  # communicators by number
        self.group_count = 0
        self.calls: dict[Call, tuple[int, int, int, int]] = {}
        self.head = np.frombuffer(self.map, HEAD, 1)
        head = self.head[0]
        head["capacity"], head["rank"], head["size"] = capacity, rank, size
        head["process"], head["born"], head["host"] = os.getpid(), process_start(), socket.gethostname().encode()[:63]
        head["clock"], head["time"], head["texts"] = time.perf_counter_ns(), time.time_ns(), 1
        head["seen"], head["version"], head["magic"] = head["clock"], VERSION, MAGIC
        self.heartbeat_offset = HEAD.fields["seen"][1]  # type: ignore[index]
        for group in groups:
            self.register(group)

    def begin(self, group: Any, name: str, start: int, other: int, state: int = WAITING) -> int:
        """Begin the record of an operation; return its offset. start: perf_counter_ns. other: rank, ALL or SOME."""
        self.count = number = self.count + 1
        at = self.first + number % self.capacity * 64
        known = self.groups.get(id(group))
        if known is None:
            known = self.register(group)
        frame: Any = sys._getframe(2)
        try:
            while skipped[frame.f_code.co_filename]:  # `caller`, inlined
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
        if number % self.capacity == 0:  # store the numbers of calls before older records are overwritten
            for entry, each in self.members.items():
                LONG(self.map, self.first_group + entry * GROUP.itemsize, each.sequence)
        return at

    def end(self, at: int, stop: int, sent: int, state: int = DONE) -> None:
        """Complete the record at offset `at`. stop: perf_counter_ns. sent: bytes."""
        END(self.map, at + STATE, state, stop, sent)

    def waits(self, at: int) -> None:
        """Mark the operation of the record at offset `at` as waited in."""
        BYTE(self.map, at + STATE, WAITING)

    def beat(self) -> None:
        """Record a sign of life."""
        LONG(self.map, self.heartbeat_offset, time.perf_counter_ns())

    def _text(self, text: str) -> int:
        """Return the number of a text, adding it if new; 0 if the table is full."""
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
        if len(self.lines) == 4 * TEXTS:  # code that is created again and again
            self.lines.clear()
            self.code_objects.clear()
        self.code_objects.append(frame.f_code)
        number = self.lines[id(frame.f_code), frame.f_lasti] = self._text(location(frame))
        return number

    def _call(self, call: Call) -> tuple[int, int, int, int]:
        name, kind, _, reduction, root = call
        if len(self.calls) == 4 * TEXTS:
            self.calls.clear()
        what = self._text(name), NO_TYPE if kind is None else TYPES[kind], self._text(reduction), root & 0xFFFF
        self.calls[call] = what
        return what

    def register(self, group: Any) -> int:
        """Add a new communicator; return its number. When the table is full, all further ones get the last number."""
        number = min(self.group_count, GROUPS - 1)
        at = self.first_group + number * GROUP.itemsize
        watcher = group._watcher
        key = "" if watcher is None else watcher.keys.get(id(group), "")
        values = group.sequence, group.size, group.rank, key.encode()[:31], group.name.encode()[:47]
        self.map[at : at + GROUP.itemsize] = np.array([values], GROUP).tobytes()
        self.group_count += 1
        self.head["groups"] = number + 1
        self.groups[id(group)], self.members[number] = number, group
        return number

    def forget(self, group: Any) -> None:
        """Remove a freed communicator: its id may be reused."""
        number = self.groups.pop(id(group), None)
        if number is not None and self.members.get(number) is group:
            LONG(self.map, self.first_group + number * GROUP.itemsize, self.members.pop(number).sequence)

    def ended(self, state: int, reason: str) -> None:
        """Record how this rank has ended; only the first call counts."""
        if self.head["state"][0] == RUNS:
            self.head["why"], self.head["ended"] = reason.encode()[:399], time.perf_counter_ns()
            self.head["state"] = state

    def discard(self) -> None:
        """Delete the recording after a run that ended in good order."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # files of other ranks are left
            self.path.parent.rmdir()
