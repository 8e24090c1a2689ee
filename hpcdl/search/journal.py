"""What a search has begun and ended, line by line in a file: so that it is done exactly once, whoever is killed when.

    {"event": "search", "version": 1, "settings": {...}}                                 the first line: which search
    {"event": "leg", "ranks", "groups", "time"}                                          a job has gone on with it
    {"event": "leg", "trial", ...}                                                       one that does this trial alone
    {"event": "begin", "trial", "rung", "seed", "values", "amount", "parent", "group", "time"}
    {"event": "again", "trial", "rung", "seed", "group", "time"}                         one that was interrupted
    {"event": "end", "trial", "rung", "seed", "score", "failed", "seconds", "more", "time"}

A line is on the disk before what it tells of is relied upon: `begin` before the training starts, `end` before another
one is chosen. A process may die within a line; the next one that opens the file cuts off what is no whole line, and
what that told of had not been relied upon. One job writes at a time: who opens a journal has the lock of its folder.
Jobs that do a single trial each have it together (`SharedJournal`), and a lock on the file for each line.
Source: the write-ahead log of Gray and Reuter, "Transaction Processing", 1992, chapter 9.
"""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcdl.errors import TrainingError, UsageError, blamed_on
from hpcdl.files import from_json

NAME = "journal.jsonl"
VERSION = 1
EVENTS = ("search", "leg", "begin", "again", "end")


class Journal:
    """`events`: all that it has told so far, the first line included. Without a path it lasts as its process does."""

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
        """The journal of a search with these settings in a folder that is there: a new one or, to `resume`, the old.

        resume: go on with the one that is there, if there is one. force: without resume, begin anew where there is one.
        free: the settings that may have changed. folder None: nothing is written.
        Raises UsageError where there is one and it may not be gone on with, or where it cannot be read or written.
        """
        if folder is None:
            journal = cls()
        else:
            journal = cls(folder / NAME)
            with blamed_on(f"{journal.path} cannot be read"):
                events, whole = read(folder / NAME)
            if events and not resume and not force:
                raise UsageError(
                    f"{folder} holds a search already; give another folder, resume to go on with it, or force to "
                    "replace it"
                )
            if events and resume:
                refuse_other(folder, events[0], settings, free)
                journal.events = events
            journal.start(whole if resume else 0)
        if not journal.events:
            try:
                journal.append(event="search", version=VERSION, settings=settings)
            except TrainingError as error:
                raise UsageError(str(error)) from error
        return journal

    def start(self, whole: int) -> None:
        """Open the file for writing, cut off behind so many bytes; it is on the disk, and so is its name."""
        path: Any = self.path
        with blamed_on(f"{path} cannot be written"):
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.ftruncate(self.file, whole)
            os.fsync(self.file)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def append(self, **event: Any) -> dict[str, Any]:
        """Add an event; it is on the disk when this returns. Returns it as it stands there.

        Raises TrainingError where it cannot be written; then nothing more can.
        """
        text = json.dumps(plain(event), allow_nan=False)
        if self.path is not None:
            if self.file is None:
                raise TrainingError(f"{self.path} is closed")
            try:
                with blamed_on(f"{self.path} cannot be written", TrainingError):
                    self._write(f"{text}\n".encode())
            except TrainingError:
                self.close()  # the line may be torn, and another one must not follow it
                raise
        self.events.append(from_json(text))
        return self.events[-1]

    def _write(self, left: bytes) -> None:
        file: Any = self.file
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes meanwhile: whoever has opened it has it alone."""
        yield

    def close(self) -> None:
        """Nothing more is written."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class SharedJournal(Journal):
    """One to which other jobs write, too. `events` are those that were there when it was opened, and its own."""

    @classmethod
    def join(cls, folder: Path, settings: dict[str, Any], begin: Callable[[], None]) -> "SharedJournal":
        """The journal of a search with these settings; begin() is called by the first one, before there is any line.

        Raises UsageError where another search's is there, or where it cannot be read or written.
        """
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
                        first = {"event": "search", "version": VERSION, "settings": plain(settings)}
                        super(SharedJournal, journal)._write(f"{json.dumps(first)}\n".encode())
                    journal.events = [first]
        except BaseException:
            journal.close()
            raise
        return journal

    def _write(self, left: bytes) -> None:
        file: Any = self.file
        with self.locked():
            if os.pread(file, 1, os.fstat(file).st_size - 1) != b"\n":  # somebody died within a line
                os.ftruncate(file, read(self.path)[1])  # type: ignore[arg-type]
            super()._write(left)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes meanwhile, or writes what is made of it."""
        file: Any = self.file
        with blamed_on(f"{self.path} cannot be locked"):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of a file, [] where there is none, and how many bytes of it are whole lines.

    Raises UsageError where a line is none of ours and others follow it, and OSError.
    """
    if not path.exists():
        return [], 0
    events: list[dict[str, Any]] = []
    data, at = path.read_bytes(), 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines):
        event = event_of(line)
        if event is None or (event["event"] == "search") != (number == 0):
            if any(map(event_of, lines[number + 1 :])) or (number == 0 and len(lines) > 1):
                raise UsageError(f"{path}: line {number + 1} is broken, and more follows; repair it, or begin anew")
            break
        events.append(event)
        at += len(line)
    if events and events[0].get("version") != VERSION:
        raise UsageError(f"{path} is of version {events[0].get('version')} of a journal; this is hpcdl's {VERSION}")
    return events, at


def event_of(line: bytes) -> dict[str, Any] | None:
    """The event that a line tells of; None where it is not whole, or none of ours."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = from_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("event") in EVENTS else None


def refuse_other(folder: Path, first: dict[str, Any], settings: dict[str, Any], free: tuple[str, ...]) -> None:
    """Raise UsageError where the first line is of a search with other settings."""
    had, now = first.get("settings", {}), plain(settings)
    for name in sorted(had.keys() | now.keys()):
        if had.get(name) != now.get(name) and name not in free:
            raise UsageError(
                f"{folder} holds the journal of another search: its {name.replace('_', ' ')} is {had.get(name)!r}, not "
                f"{now.get(name)!r}; give what it was begun with, or another folder"
            )


def plain(value: Any) -> Any:
    """The value as JSON has it: numpy's numbers are numbers, what is no finite number is null, of others their text."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
