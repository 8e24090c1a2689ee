"""The journal of a search, a write-ahead log: each job is done exactly once, whenever the process is killed.

    {"event": "search", "version": 1, "settings": {...}}                                 the first line: which search
    {"event": "leg", "ranks", "groups", "time"}                                          a launch of the search begins
    {"event": "leg", "trial", ...}                                                       a launch of this trial alone
    {"event": "begin", "trial", "rung", "seed", "values", "amount", "parent", "group", "time"}
    {"event": "again", "trial", "rung", "seed", "group", "time"}                         an interrupted job resumes
    {"event": "end", "trial", "rung", "seed", "score", "failed", "seconds", "more", "time"}

A line is on the disk before anything relies on it: `begin` before the training starts, `end` before the next job is
chosen. If a process dies within a line, the next to open the file truncates that line. One launch writes at a time and
holds the lock of the search's folder; launches of a single trial each share the folder (`SharedJournal`) and lock the
file for each line. (Gray and Reuter, "Transaction Processing", 1992, chapter 9)"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcdl.errors import TrainingError, UsageError, blamed_on
from hpcdl.files import json_value, parse_json

NAME = "journal.jsonl"
VERSION = 1
EVENTS = ("search", "leg", "begin", "again", "end")


class Journal:
    """Append-only list of events, first line included; without a path it is kept in memory only."""

    def __init__(self, path: Path | None = None):
        self.path, self.events = path, list[dict[str, Any]]()
        self.file: int | None = None

    @classmethod
    def open(
        cls,
        folder: Path | None,
        settings: dict[str, Any],
        resume: bool = False,
        force: bool = False,
        free: tuple[str, ...] = (),
    ) -> "Journal":
        """Open the journal of a search with these settings in an existing folder: a new one, or the old one.
        resume: continue an existing journal. force: replace it, unless `resume`. free: settings that may differ. folder
        None: nothing is written. Raises UsageError if the journal may not be continued, read or written."""
        journal = cls(None if folder is None else folder / NAME)
        if folder is not None:
            with blamed_on(f"{journal.path} cannot be read"):
                events, whole = read(folder / NAME)
            if events and not resume and not force:
                what = "give another folder, resume to go on with it, or force to replace it"
                raise UsageError(f"{folder} holds a search already; {what}")
            if events and resume:
                refuse_other(folder, events[0], settings, free)
                journal.events = events
            with blamed_on(f"{journal.path} cannot be written"), contextlib.ExitStack() as stack:
                journal.file = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.ftruncate(journal.file, whole if resume else 0)
                os.fsync(journal.file)
                directory = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, directory)
                os.fsync(directory)
        if not journal.events:
            try:
                journal.append(event="search", version=VERSION, settings=settings)
            except TrainingError as error:
                raise UsageError(str(error)) from error
        return journal

    def append(self, **event: Any) -> None:
        """Append an event; on return it is on the disk. If writing fails, close the journal and raise TrainingError."""
        text = json.dumps(json_value(event), allow_nan=False)
        if self.path is not None:
            if self.file is None:
                raise TrainingError(f"the journal {self.path} is closed")
            try:
                with blamed_on(f"{self.path} cannot be written", TrainingError):
                    self._write(f"{text}\n".encode())
            except TrainingError:
                self.close()  # the line may be torn; no line may follow it
                raise
        self.events.append(parse_json(text))

    def _write(self, left: bytes) -> None:
        file: Any = self.file
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context without other writers: this process holds the folder's lock already."""
        yield

    def close(self) -> None:
        """Close the file; later events raise TrainingError."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class SharedJournal(Journal):
    """A journal to which several launches append. `events`: events at opening time, and this launch's own."""

    @classmethod
    def join(cls, folder: Path, settings: dict[str, Any], begin: Callable[[], None]) -> "SharedJournal":
        """Open or create the shared journal; the launch that creates it calls begin() before it writes the first line.
        Raises UsageError if the journal belongs to another search, or cannot be read or written."""
        journal = cls(folder / NAME)
        path: Any = journal.path
        with blamed_on(f"{path} cannot be written"):
            journal.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            with journal.locked():
                with blamed_on(f"{path} cannot be read"):
                    journal.events, whole = read(path)
                if journal.events:
                    refuse_other(folder, journal.events[0], settings, ())
                else:
                    begin()
                    with blamed_on(f"{path} cannot be written"):
                        os.ftruncate(journal.file, whole)
                        first = {"event": "search", "version": VERSION, "settings": json_value(settings)}
                        super(SharedJournal, journal)._write(f"{json.dumps(first)}\n".encode())
                    journal.events = [first]
        except BaseException:
            journal.close()
            raise
        return journal

    def _write(self, left: bytes) -> None:
        file: Any = self.file
        with self.locked():
            if os.pread(file, 1, os.fstat(file).st_size - 1) != b"\n":  # a writer died within a line
                os.ftruncate(file, read(self.path)[1])  # type: ignore[arg-type]
            super()._write(left)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context that locks the file: no other launch writes to the file or to files derived from it."""
        file: Any = self.file
        with blamed_on(f"{self.path} cannot be locked"):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the events of a journal file ([]: no such file) and the number of bytes in complete lines.
    Raises UsageError if a valid line follows an invalid line, or for another version; OSError if reading fails."""
    if not path.exists():
        return [], 0
    events: list[dict[str, Any]] = []
    data, at = path.read_bytes(), 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines):
        event = event_of(line)
        if event is None or (event["event"] == "search") != (number == 0):
            if any(map(event_of, lines[number + 1 :])) or (number == 0 and len(lines) > 1):
                raise UsageError(f"{path}: line {number + 1} is broken, and others follow; repair it, or begin anew")
            break
        events.append(event)
        at += len(line)
    if events and events[0].get("version") != VERSION:
        raise UsageError(f"{path} is a journal of version {events[0].get('version')}; this hpcdl reads {VERSION}")
    return events, at


def object_of(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is incomplete or no object."""
    try:
        found = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def event_of(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is incomplete or not an event."""
    found = object_of(line)
    return found if found is not None and found.get("event") in EVENTS else None


def refuse_other(folder: Path, first: dict[str, Any], settings: dict[str, Any], free: tuple[str, ...]) -> None:
    """Raise UsageError if the first line belongs to a search with other settings; names in `free` may differ."""
    recorded, current = first.get("settings", {}), json_value(settings)
    for name in sorted(recorded.keys() | current.keys()):
        if recorded.get(name) != current.get(name) and name not in free:
            raise UsageError(
                f"{folder} holds the journal of another search: its {name.replace('_', ' ')} is "
                f"{recorded.get(name)!r}, not {current.get(name)!r}; give the first value, or another folder"
            )
