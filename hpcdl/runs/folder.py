"""The folder of a run: config.yaml, started.json, metrics.jsonl, checkpoint.h5, trace.json, summary.json, and logs/.

With --log there is more (metric_logs.py); while it goes on, and where it breaks off, flight/
(hpcdl/comm/diagnostics/flight_recorder.py). Rank 0 writes all but the ranks' logs and recordings. What is rewritten as
a whole is written under a temporary name first. One job writes at a time: it holds a lock on the file .lock, which goes
with the process.
"""

import contextlib
import dataclasses
import fcntl
import functools
import io
import itertools
import json
import logging
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import yaml
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import OLDER
from hpcdl.checkpoint.export import write_json
from hpcdl.checkpoint.rollback import LATER
from hpcdl.checkpoint.shards import FOLDER as PIECES
from hpcdl.checkpoint.shards import NAME as PIECE
from hpcdl.checkpoint.shards import sweep
from hpcdl.comm import Communicator
from hpcdl.comm.diagnostics.flight_recorder import FOLDER as FLIGHT
from hpcdl.comm.diagnostics.flight_recorder import RECORDING, FlightRecorder, forget
from hpcdl.comm.diagnostics.flight_recorder import set_aside as set_recordings_aside
from hpcdl.comm.progress import activity
from hpcdl.errors import LoneError, UsageError, blamed_on, printable, reason
from hpcdl.faults.inject import JOURNAL
from hpcdl.files import atomic_write, parse_json, refuse_full
from hpcdl.formatting import counted
from hpcdl.machine.versions import versions
from hpcdl.runs.metric_logs import CSV, EVENTS, EVENTS_NAME, Csv, Events, forms, write_csv, write_events
from hpcdl.runs.options import Options

log = logging.getLogger("hpcdl")
GOING = 30.0  # seconds that the process of a rank that was killed may take to end
MODULE = ("hpcdl", "__main__.py")  # of python -m hpcdl
RATE = b'"learning_rate"'  # in the line of a step, and not in that of an evaluation
UNWRITTEN = ("out", "resume", "force")  # options that are those of one start, not of the run
WHOLE = r"config\.yaml|metrics\.(jsonl|csv)|(started|summary|trace)\.json|(checkpoint|best|samples)\.h5"
OURS = re.compile(rf"{WHOLE}|{OLDER.pattern}")
LOG_NAME = re.compile(r"rank-[0-9]{4,}\.log")
# Temporary names (hpcdl/files.py) of what a run writes, or a job of several runs.
TEXTS = r"\w+\.(csv|html|json|jsonl|md|npz|yaml)"
STATES = r"(checkpoint(-\d+)?|best|samples|until-[0-9.e+-]+)\.h5"
LEFTOVER = re.compile(rf"\.+({STATES}|{TEXTS}|{EVENTS_NAME.pattern})(\.\d+\.part)+")


def check_run_folder(path: Path, may_hold_run: bool) -> None:
    """Refuse a folder that cannot be made or written or, unless it may, holds another run."""
    if os.path.exists(path) and not os.path.isdir(path):  # os.path: no error where a folder may not be searched
        raise UsageError(f"--out {path} is a file, not a folder; give another name")
    if not may_hold_run and any(
        os.path.exists(path / name) for name in ("config.yaml", "checkpoint.h5", "summary.json")
    ):
        on = f", or --resume {path} to go on with it" if os.path.exists(path / "checkpoint.h5") else ""
        raise UsageError(f"--out {path} holds another run; give another folder, or --force to replace it{on}")
    parent = path.absolute()
    while not os.path.exists(parent):
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK) or not os.path.isdir(parent):
        raise UsageError(f"--out {path} cannot be written: no permission in {parent}")


@functools.cache  # asks git, and does not change while a program runs
def environment() -> dict[str, str]:
    """What a reader needs to repeat the run: launch line, git commit, versions, machine."""
    found = {"launch": launch_line(), "commit": commit(), "python": platform.python_version(), **versions()}
    found["mpi"] = " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split())
    found["machine"] = (
        f"{platform.machine()}, {counted(os.cpu_count() or 1, 'core')}, {platform.system()} {platform.release()}"
    )
    return found


def launch_line() -> str:
    """The program and its arguments; the launcher's part as far as the world tells it."""
    program, *arguments = sys.argv
    ours = Path(program).parts[-2:] == MODULE or Path(program).name == "hpcdl"
    started = ["hpcdl"] if ours else [Path(sys.executable).name, program]
    return f"{counted(MPI.COMM_WORLD.size, 'rank')}: {shlex.join([*started, *arguments])}"


def commit() -> str:
    """The git commit of the code, with -dirty for local changes; unknown outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


class Folder:
    """A run's folder; without a path, nothing is written."""

    def __init__(self, path: Path | None, rank: int):
        self.path, self.rank = path, rank
        self.left: Path | None = None  # the folder of a run in which there is nothing left to do
        self.metrics: io.FileIO | None = None
        self.options: Options | None = None
        self.recorder: FlightRecorder | None = None
        self.logs: list[Csv | Events] = []
        self.handler: logging.FileHandler | None = None
        self.lock: int | None = None

    def create(self, options: Options, resumed: bool, used: dict | None = None, repeated: bool = False) -> None:
        """Make the folder with its config.yaml (rank 0): a new one, or with `resumed` that of the run that goes on.

        used: what stands there in the place of some options. repeated: as of a RunContext.
        Raises UsageError where it cannot be written, or where another job was first.
        """
        self.options = options
        if self.path is None:
            return
        with blamed_on(f"--out {self.path} cannot be written"):
            if options.out == "auto":
                self.path = new_folder(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self.claim()
            if options.force and not resumed:
                remove_run(self.path, faults=not repeated)
            elif not resumed:
                check_run_folder(self.path, resumed)  # again: nobody else comes after us
            sweep(self.path)
            (self.path / "logs").mkdir(exist_ok=True)
            set_recordings_aside(self.path)
            self._write_config(self.path / "config.yaml", options, used or {})

    def ended(self, step: int) -> bool:
        """Whether it is the folder of a run that has come to its end after this step, and has said so."""
        found = summary_of(self.path)
        return found is not None and found.get("steps") == step

    def leave(self) -> None:
        """Nothing is left to do: let the folder be as it is, and write nothing."""
        self.path, self.left = None, self.path
        self._release()

    def claim(self, together: bool = False, outlived: bool = False) -> None:
        """Let no other job write to this folder until this process closes it, or ends however it may (rank 0).

        together: but those that claim it so, too. Else what killed processes have left half-written is removed.
        outlived: a rank that had it is gone, and its process may not have let go of it yet: it is waited for.
        Raises UsageError where another job has it. Where a file system knows no locks, nobody is kept out.
        """
        if self.path is None or self.lock is not None:
            return
        with blamed_on(f"{self.path} cannot be written"):
            self.lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        end = time.monotonic() + outlived * GOING
        while True:
            try:
                fcntl.flock(self.lock, (fcntl.LOCK_SH if together else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    self._release()
                    what = "wait for its end or give another --out"
                    raise UsageError(f"another job is writing to {self.path}; {what}") from None
                time.sleep(0.01)
                continue
            except OSError as error:
                log.warning("%s cannot be locked (%s): start no other job in it", self.path, error.strerror)
            break
        if not together:
            remove_leftovers(self.path)

    def _release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def _write_config(self, path: Path, options: Options, used: dict) -> None:
        values = {name: value for name, value in dataclasses.asdict(options).items() if name not in UNWRITTEN} | used
        header = [f"# {name}: {printable(value, allowed='')}" for name, value in environment().items()]
        with atomic_write(path) as file:
            file.write(("\n".join(header) + "\n" + yaml.safe_dump(values, sort_keys=False)).encode())

    def open(self, step: int, recent: Iterable[dict] = (), scored: int | None = None) -> None:
        """Start this rank's log and, on rank 0, the metrics; when resuming, later steps' lines are dropped.

        So are lines that are none, which a crash of the machine may have left: the run goes on, and the log says so.
        recent: lines up to `step` that are added where they are missing. scored: the step whose evaluation is done
        again, and whose line is dropped. Raises UsageError where a file cannot be written.
        """
        if self.path is None:
            return
        path = self.path / "logs" / f"rank-{self.rank:04d}.log"
        with blamed_on(f"{path} cannot be written"):
            self.handler = Log(path)
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(self.handler)
        log.setLevel(logging.INFO)
        if self.rank == 0:
            path = self.path / "metrics.jsonl"
            with blamed_on(f"{path} cannot be written"):
                found = [(step_of(each), each) for each in read_lines(path)]
                there = {(of, RATE in each) for of, each in found}
                more = [(each["step"], dumped(each).encode()) for each in recent]
                lines = [*found, *((of, each) for of, each in more if (of, RATE in each) not in there)]
                kept = [
                    each
                    for of, each in lines
                    if of is not None and of <= step and (of, RATE in each) != (scored, False)
                ]
                with atomic_write(path) as file:
                    file.write(b"".join(kept))
                self.metrics = open(path, "ab", buffering=0)  # noqa: SIM115 - as long as the run
            if broken := [number for number, (of, _) in enumerate(found, 1) if of is None]:
                log.warning("%s: %d lines are broken, and left out; the first is line %d", path, len(broken), broken[0])
            self._open_logs(kept)

    def _open_logs(self, lines: list[bytes]) -> None:
        """Begin what --log asks for, with the lines that are there."""
        if self.path is None or self.options is None:
            return
        wanted, last = forms(self.options.log), parse_json(lines[-1]) if lines else {}
        if "csv" in wanted:
            with blamed_on(f"{self.path / CSV} cannot be written"):
                self.logs.append(write_csv(self.path / CSV, map(parse_json, lines)))
        if "tensorboard" in wanted:
            with blamed_on(f"{self.path / EVENTS} cannot be written"):
                began = time.time() - (last.get("seconds") or 0.0)
                options = dataclasses.asdict(self.options)
                self.logs.append(write_events(self.path / EVENTS, map(parse_json, lines), began, options))

    def record_flight(self, size: int, capacity: int, groups: Iterable[Communicator]) -> None:
        """Keep this rank's last operations, so many, where `hpcdl postmortem` finds them.

        size: of all ranks. groups: the communicators that there are.
        """
        if self.path is None or not capacity:
            return
        path = self.path / FLIGHT / f"rank-{self.rank:04d}.bin"
        try:
            path.parent.mkdir(exist_ok=True)
            self.recorder = activity.record_with(FlightRecorder(path, self.rank, size, capacity, groups))
        except OSError as error:
            log.warning("%s cannot be written (%s): a postmortem will know nothing of this rank", path, error.strerror)

    def landed(self, ended: bool) -> None:
        """The leg has ended in good order: its recording says nothing that anybody needs.

        ended: the run has, too, and nobody needs those of earlier tries.
        """
        if self.recorder is not None:
            self.recorder.discard()
            self.recorder = activity.record_with(None)
        if ended and self.rank == 0 and self.path is not None:
            with blamed_on(f"{self.path / FLIGHT} cannot be removed"):
                forget(self.path)

    def record(self, lines: list[dict]) -> None:
        """Append lines to metrics.jsonl, and to what --log has asked for."""
        if self.metrics is not None:
            text = "".join(map(dumped, lines)).encode()
            with blamed_on(f"{self.metrics.name} cannot be written", LoneError):
                refuse_full(self.metrics.name)
                append(self.metrics, text)
            for each in self.logs:
                with blamed_on(f"{each.path} cannot be written", LoneError):
                    each.write(lines)
                    each.flush()

    def write(self, name: str, value: dict) -> None:
        """Write a JSON file (rank 0)."""
        if self.path is not None and self.rank == 0:
            write_json(value, self.path / name)

    def kept(self) -> str:
        """What is there to go on from, for the message of a run that cannot go on."""
        last = self.path and self.path / "checkpoint.h5"
        return f"the last good checkpoint is {last}" if last and last.exists() else "there is no checkpoint yet"

    def close(self) -> None:
        """The run is over. What could not be written has been said before."""
        if self.metrics is not None:
            for each in (self.metrics, *self.logs):
                with contextlib.suppress(OSError):
                    each.close()
        if self.handler is not None:
            log.removeHandler(self.handler)
            with contextlib.suppress(OSError):
                self.handler.close()
        self._release()


class Log(logging.FileHandler):
    """A rank's log, which ends the job in one line where it cannot be written."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            refuse_full(self.baseFilename)
        except OSError:
            self.handleError(record)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise LoneError(f"{self.baseFilename} cannot be written: {reason(error)}") from None
        super().handleError(record)


def append(file: io.FileIO, text: bytes) -> None:
    """Write all of it behind what is there or, where the disk has no room for it, nothing. Raises OSError."""
    end = os.fstat(file.fileno()).st_size
    try:
        while text:
            text = text[file.write(text) :]
    except OSError:
        file.truncate(end)
        raise


def read_lines(path: Path) -> list[bytes]:
    """The whole lines of a file; a last one that was cut off is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def dumped(line: dict) -> str:
    """A line of metrics.jsonl."""
    return json.dumps(line, allow_nan=False) + "\n"


def step_of(line: bytes) -> float | None:
    """The step that a line of metrics.jsonl speaks of; None where the line is none."""
    with contextlib.suppress(ValueError):
        found = parse_json(line)
        step = found.get("step") if isinstance(found, dict) else None
        return step if isinstance(step, int | float) and not math.isnan(step) else None
    return None


def summary_of(path: Path | None) -> dict | None:
    """What a run has written to its folder at its end; None where it has not, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = parse_json((path / "summary.json").read_text()) if path is not None else None
        return found if isinstance(found, dict) else None
    return None


def new_folder(wanted: Path) -> Path:
    """Make a folder of this name, with a number behind it where other jobs have made one in the same second."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed: whoever has the lock writes alone."""
    for part in (folder, folder / EVENTS, folder / LATER):
        if part == folder or (part.is_dir() and not part.is_symlink()):
            for path in part.iterdir():
                if LEFTOVER.fullmatch(path.name):
                    path.unlink()


def remove_run(folder: Path, faults: bool = True) -> None:
    """Remove what a run has written to its folder, and no other file; whoever has the lock writes alone.

    faults: also what tells of faults on purpose, which strike again then.
    """
    if faults:
        (folder / JOURNAL).unlink(missing_ok=True)
    parts = [(folder, OURS), (folder / "logs", LOG_NAME), (folder / LATER, OURS), (folder / EVENTS, EVENTS_NAME)]
    parts += [(folder / PIECES, PIECE), (folder / LATER / PIECES, PIECE), (folder / FLIGHT, RECORDING)]
    for part, ours in parts:
        if part == folder or (part.is_dir() and not part.is_symlink()):
            remove_files(part, ours)
    forget(folder)


def remove_files(folder: Path, ours: re.Pattern[str]) -> None:
    """Remove the files of these names."""
    for path in folder.iterdir():
        if ours.fullmatch(path.name) and (path.is_file() or path.is_symlink()):
            path.unlink()


def automatic(strategy: str) -> Path:
    """A new folder's name, for a run that was given none."""
    return Path("runs", f"{strategy}-{time.strftime('%Y%m%d-%H%M%S')}")
