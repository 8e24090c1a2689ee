"""--log: the lines of metrics.jsonl in further formats, as a CSV table and as events for TensorBoard.

    metrics.jsonl                {"step": 20, "train_loss": 0.7, "seconds": 0.4}
                                 {"step": 20, "train_loss": 0.7, "seconds": 0.4, "test_loss": 0.8}
    metrics.csv                  step,train_loss,seconds,test_loss
                                 20,0.7,0.4,
                                 20,0.7,0.4,0.8
    tensorboard/events.out....   train_loss and test_loss, at step 20 and 0.4 seconds after the run began

A resumed run makes both files anew from the lines that metrics.jsonl keeps; an open TensorBoard drops what it has read.
TensorBoard's relative time is the time of steps, over all legs. Its scalars have 32 bits. See also trackers.py."""

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
from typing import Any, Self

from hpcdl.errors import UsageError, nearest
from hpcdl.files import atomic_path

FORMS = ("csv", "tensorboard", "wandb", "mlflow")
NEEDED = {
    "tensorboard": ("tensorboardX", "'hpcdl[tensorboard]'"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
}
CSV, EVENTS = "metrics.csv", "tensorboard"  # a run's file, and its folder
EVENTS_NAME = re.compile(r"events\.out\.tfevents\.\d{10,}\..+\.hpcdl")  # names of our files in that folder
WHERE = ("step", "epoch", "round", "seconds")  # the position of a line in the run: not written as scalars
COMPARED = ("train_loss", "test_loss", "test_accuracy")  # in TensorBoard's table of runs and their options
MIB = 1 << 20


def forms(text: str) -> tuple[str, ...]:
    """Return the forms that --log names. Raises UsageError for an unknown form, or if its package is not installed."""
    words = [word.strip() for word in text.split(",")]
    if words == ["none"]:
        return ()
    for word in words:
        if word not in FORMS:
            near = nearest(word, ["none", *FORMS])
            raise UsageError(f"--log is none, or some of {','.join(FORMS)} with commas between, not {word!r}{near}")
        need_package(word, f"--log {word}")
    return tuple(form for form in FORMS if form in words)


def need_package(form: str, option: str) -> None:
    """Raise UsageError if the package of a form is not installed, without importing it."""
    package, installed_by = NEEDED.get(form, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise UsageError(f"{option} needs {package}: pip install {installed_by}")


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by name, but those that say where in the run it is."""
    return {name: each for name, each in line.items() if isinstance(each, int | float) and name not in WHERE}


class LineLog:
    """A file of metrics lines, which has the name `path` once it holds the first lines."""

    file: Any

    def __init__(self, path: Path):
        self.path = path

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines. Raises OSError."""

    @classmethod
    def begin(cls, path: Path, lines: Iterable[dict[str, Any]], *how: Any) -> Self:
        """Return a log with these lines; the file gets its name when it holds them. Raises OSError."""
        with atomic_path(path) as made:
            begun = cls(made, *how)
            try:
                for line in lines:
                    begun.write([line])
                begun.flush()
            except BaseException:
                begun.close()
                raise
        begun.path = path
        return begun

    def flush(self) -> None:
        """Flush the file, so that other processes see the lines. Raises OSError."""
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class Csv(LineLog):
    """A table with a column for each name seen so far; a value that a line lacks is an empty cell."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.columns: dict[str, None] = {}
        self.file = open(path, "w", newline="", encoding="utf-8", buffering=MIB)  # noqa: SIM115 - as long as the run

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        lines = list(lines)
        new = dict.fromkeys(name for line in lines for name in line if name not in self.columns)
        if new:  # columns that are empty in earlier rows; a row is one line, as no cell has a newline
            self.file.flush()
            self.columns |= new
            how: dict[str, Any] = {"newline": "", "encoding": "utf-8"}
            with atomic_path(self.path) as made, open(self.path, **how) as before, open(made, "w", **how) as after:
                csv.writer(after, lineterminator="\n").writerow([" ".join(name.split()) for name in self.columns])
                for row in itertools.islice(before, 1, None):
                    after.write(row.rstrip("\n") + "," * len(new) + "\n")
            self.file.close()
            self.file = open(self.path, "a", newline="", encoding="utf-8", buffering=MIB)  # noqa: SIM115
        rows = ([cell(line.get(name)) for name in self.columns] for line in lines)
        csv.writer(self.file, lineterminator="\n").writerows(rows)


def cell(value: Any) -> str:
    """Return a value as a cell: floats with all their digits, other values as in JSON; None: empty."""
    if value is None:
        return ""
    return float.__repr__(value) if isinstance(value, float) else json.dumps(value)  # numpy's are floats, too


class Events(LineLog):
    """TensorBoard's file of events: records (a length, its checksum, an event, its checksum) made by tensorboardX,
    without its thread. began: UNIX seconds of the run's begin. options: of the run, for TensorBoard's tables."""

    def __init__(self, path: Path, began: float = 0.0, options: dict[str, Any] | None = None):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import masked_crc32c

        super().__init__(path)
        self.make: tuple[Any, Any] = Event, Summary
        self.sum, self.began = masked_crc32c, began
        self.last: dict[str, float] = {}  # the last step written of each scalar
        self.file = open(path, "wb", buffering=MIB)  # noqa: SIM115 - as long as the run
        self._add(Event(wall_time=began, file_version="brain.Event:2"))
        self._add(Event(wall_time=began, session_log=SessionLog(status=SessionLog.START)))  # drop what was read before
        if options is not None:
            for summary in described(options):
                self._add(Event(wall_time=began, summary=summary))

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        event, summary = self.make
        for line in lines:
            step, values = line["step"], []
            for name, value in numbers(line).items():
                if self.last.get(name) != step:  # an evaluation repeats its step's loss
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


def described(options: dict[str, Any]) -> list[Any]:
    """Return TensorBoard summaries of options: a text, and an entry for its table of runs."""
    from tensorboardX import summary

    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in options.items()]
    simple = {name: value for name, value in options.items() if isinstance(value, bool | int | float | str)}
    table = "\n".join(["| option | value |", "|---|---|", *rows])
    return [summary.text("options", table), *summary.hparams(simple, dict.fromkeys(COMPARED, 0.0))]


def ours(folder: Path) -> list[Path]:
    """Return hpcdl's event files in this folder; [] if it is a link, behind which files may belong to others."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [path for path in folder.iterdir() if EVENTS_NAME.fullmatch(path.name) and path.is_file()]


def write_events(
    folder: Path, lines: Iterable[dict[str, Any]], began: float, options: dict[str, Any] | None = None
) -> Events:
    """Begin a file of events with these lines, and remove hpcdl's earlier ones in this folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    before = ours(folder)  # TensorBoard reads a folder's files in the order of their names
    path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.hpcdl"
    found = Events.begin(path, lines, began, options)
    for each in before:
        if each != path:
            os.unlink(each)
    return found
