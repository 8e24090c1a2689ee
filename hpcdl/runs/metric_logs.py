"""What --log writes beside metrics.jsonl, line by line the same: a table, and events for TensorBoard.

    metrics.jsonl                {"step": 20, "train_loss": 0.7, "seconds": 0.4}
                                 {"step": 20, "train_loss": 0.7, "seconds": 0.4, "test_loss": 0.8}
    metrics.csv                  step,train_loss,seconds,test_loss
                                 20,0.7,0.4,
                                 20,0.7,0.4,0.8
    tensorboard/events.out....   train_loss and test_loss, at step 20 and 0.4 seconds after the run began

A column that only comes later, as scores do at the first evaluation, is added to the lines before it: the table is then
written once more. When a run goes on, both are made again from the lines that metrics.jsonl keeps, so that they hold
these and no others, whatever was written when; a TensorBoard that is open drops what it has read of the run before.

An event's time is that of the run's beginning and the line's `seconds`, so that TensorBoard's relative time is that of
steps, over all legs. Its scalars are numbers of 32 bits.
"""

import csv
import importlib.util
import itertools
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcdl.errors import UsageError, nearest
from hpcdl.files import atomic_path

FORMS = ("csv", "tensorboard")
CSV, EVENTS = "metrics.csv", "tensorboard"  # a run's file, and its folder
EVENTS_NAME = re.compile(r"events\.out\.tfevents\.\d{10,}\..+\.hpcdl")  # of the files in it that are ours
WHERE = ("step", "epoch", "round", "seconds")  # of a line: where it stands, which is no scalar
COMPARED = ("train_loss", "test_loss", "test_accuracy")  # by TensorBoard, in its table of runs and their options
MIB = 1 << 20


def forms(text: str) -> tuple[str, ...]:
    """The forms that --log names. Raises UsageError for another word, and where what a form needs is not installed."""
    words = [word.strip() for word in text.split(",")]
    if words == ["none"]:
        return ()
    for word in words:
        if word not in FORMS:
            near = nearest(word, ["none", *FORMS])
            raise UsageError(f"--log: none, csv, tensorboard, or csv,tensorboard, not {word!r}{near}")
    if "tensorboard" in words:
        need_tensorboard("--log tensorboard")
    return tuple(form for form in FORMS if form in words)


def need_tensorboard(option: str) -> None:
    """Raise UsageError where tensorboardX is not installed; it is not imported yet."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UsageError(f"{option} needs tensorboardX: pip install 'hpcdl[tensorboard]'")


class Csv:
    """A table with a column for each name that a line has had so far; an empty cell is what a line lacks."""

    def __init__(self, path: Path):
        self.path, self.columns = path, {}  # type: Path, dict[str, None]
        self.file = open(path, "w", newline="", encoding="utf-8", buffering=MIB)  # noqa: SIM115 - as long as the run

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines. Raises OSError."""
        lines = list(lines)
        new = dict.fromkeys(name for line in lines for name in line if name not in self.columns)
        if new:
            self._widen(new)
        rows = ([cell(line.get(name)) for name in self.columns] for line in lines)
        csv.writer(self.file, lineterminator="\n").writerows(rows)

    def _widen(self, new: dict[str, None]) -> None:
        """Add columns, which are empty so far; a row is a line, for no cell holds the end of one."""
        self.file.flush()
        self.columns |= new
        how: dict[str, Any] = {"newline": "", "encoding": "utf-8"}
        with atomic_path(self.path) as made, open(self.path, **how) as before, open(made, "w", **how) as after:
            csv.writer(after, lineterminator="\n").writerow([" ".join(name.split()) for name in self.columns])
            for row in itertools.islice(before, 1, None):
                after.write(row.rstrip("\n") + "," * len(new) + "\n")
        self.file.close()
        self.file = open(self.path, "a", newline="", encoding="utf-8", buffering=MIB)  # noqa: SIM115

    def flush(self) -> None:
        """Let others see what was written. Raises OSError."""
        self.file.flush()

    def close(self) -> None:
        """No more lines come."""
        self.file.close()


def cell(value: Any) -> str:
    """A value as a table has it: with all its digits; what is no number as in JSON."""
    if value is None:
        return ""
    return float.__repr__(value) if isinstance(value, float) else json.dumps(value)  # numpy's are floats, too


class Events:
    """TensorBoard's file of events: records of tensorboardX, written at once by this process, without its thread.

    A record is its length, a check sum of that, the event, and a check sum of that. began: when the run began, in UNIX
    seconds; options: those of the run, for TensorBoard's tables.
    """

    def __init__(self, path: Path, began: float = 0.0, options: dict[str, Any] | None = None):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import masked_crc32c

        self.make: tuple[Any, Any] = Event, Summary
        self.sum, self.path, self.began = masked_crc32c, path, began
        self.last: dict[str, float] = {}  # step of each scalar
        self.file = open(path, "wb", buffering=MIB)  # noqa: SIM115 - as long as the run
        self._add(Event(wall_time=began, file_version="brain.Event:2"))
        self._add(Event(wall_time=began, session_log=SessionLog(status=SessionLog.START)))  # drop what was read before
        if options is not None:
            for summary in described(options):
                self._add(Event(wall_time=began, summary=summary))

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines: an event for each. Raises OSError."""
        event, summary = self.make
        for line in lines:
            step, values = line["step"], []
            for name, value in line.items():
                number = isinstance(value, int | float) and name not in WHERE
                if number and self.last.get(name) != step:  # an evaluation repeats its step's loss
                    self.last[name] = step
                    values.append(summary.Value(tag=name, simple_value=value))
            if values:
                seconds = line.get("seconds")
                at = self.began + (seconds if isinstance(seconds, int | float) else 0.0)
                self._add(event(wall_time=at, step=int(step), summary=summary(value=values)))

    def _add(self, event: Any) -> None:
        said = event.SerializeToString()
        size = struct.pack("<Q", len(said))
        sums = [struct.pack("<I", self.sum(part)) for part in (size, said)]
        self.file.write(size + sums[0] + said + sums[1])

    def flush(self) -> None:
        """Let others see what was written. Raises OSError."""
        self.file.flush()

    def close(self) -> None:
        """No more lines come."""
        self.file.close()


def described(options: dict[str, Any]) -> list[Any]:
    """Options as TensorBoard shows them: as a text, and in its table of runs."""
    from tensorboardX import summary

    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in options.items()]
    simple = {name: value for name, value in options.items() if isinstance(value, bool | int | float | str)}
    table = "\n".join(["| option | value |", "|---|---|", *rows])
    return [summary.text("options", table), *summary.hparams(simple, dict.fromkeys(COMPARED, 0.0))]


def events_path(folder: Path) -> Path:
    """A name for a file of events in this folder that begins now; TensorBoard reads a folder's files in their order."""
    return folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.hpcdl"


def ours(folder: Path) -> list[Path]:
    """The files of events in this folder that we have written; of a link to a folder none, for it may serve others."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [path for path in folder.iterdir() if EVENTS_NAME.fullmatch(path.name) and path.is_file()]


def written(log: Any, path: Path, lines: Iterable[dict[str, Any]], *how: Any) -> Any:
    """Begin a Csv or Events (`log`) with these lines; the file gets its name when it holds them. Raises OSError."""
    with atomic_path(path) as made:
        begun = log(made, *how)
        try:
            for line in lines:
                begun.write([line])
            begun.flush()
        except BaseException:
            begun.close()
            raise
    begun.path = path
    return begun


def write_csv(path: Path, lines: Iterable[dict[str, Any]]) -> Csv:
    """Begin a table with these lines. Raises OSError."""
    found: Csv = written(Csv, path, lines)
    return found


def write_events(
    folder: Path, lines: Iterable[dict[str, Any]], began: float, options: dict[str, Any] | None = None
) -> Events:
    """Begin a file of events in this folder, in the place of those that we have written there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    before, path = ours(folder), events_path(folder)
    found: Events = written(Events, path, lines, began, options)
    for each in before:
        if each != path:
            os.unlink(each)
    return found
