"""The folder of a run: config.yaml, started.json, metrics.jsonl, checkpoint.h5, trace.json, summary.json, and logs/.

--log adds files (metric_logs.py). A run that goes on or breaks off has flight/ (comm/diagnostics/flight_recorder.py).
Rank 0 writes all but the ranks' logs and recordings. The one job that writes holds a lock on the file .lock."""

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

from hpcdl import drill
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
from hpcdl.comm.progress import record_with
from hpcdl.errors import LoneError, UsageError, blamed_on, printable, reason
from hpcdl.faults.inject import JOURNAL
from hpcdl.files import atomic_write, parse_json, unwritable_parent
from hpcdl.formatting import counted
from hpcdl.machine.versions import versions
from hpcdl.runs.metric_logs import CSV, EVENTS, EVENTS_NAME, Csv, LineLog, forms, write_events
from hpcdl.runs.options import Options
from hpcdl.runs.trackers import TRACKERS

log = logging.getLogger("hpcdl")
GOING = 30.0  # seconds within which the process of a lost rank ends
MODULE = ("hpcdl", "__main__.py")  # of python -m hpcdl
RATE = b'"learning_rate"'  # in lines of steps, not in lines of evaluations
UNWRITTEN = ("out", "resume", "force")  # options of one start, not of the run
WHOLE = r"config\.yaml|metrics\.(jsonl|csv)|(started|summary|trace)\.json|(checkpoint|best|samples)\.h5"
OURS = re.compile(rf"{WHOLE}|{OLDER.pattern}")
LOG_NAME = re.compile(r"rank-[0-9]{4,}\.log")
# Temporary names (hpcdl/files.py) of what a run writes, or a job of several runs.
TEXTS = r"\w+\.(csv|html|json|jsonl|md|npz|yaml)"
STATES = r"(checkpoint(-\d+)?|best|samples|until-[0-9.e+-]+)\.h5"
LEFTOVER = re.compile(rf"\.+({STATES}|{TEXTS}|{EVENTS_NAME.pattern})(\.\d+\.part)+")


def check_run_folder(path: Path, may_hold_run: bool) -> None:
    """Raise UsageError if the folder cannot be made or written, or holds a run, unless `may_hold_run`."""
    if os.path.exists(path) and not os.path.isdir(path):  # os.path: no error where a folder may not be searched
        raise UsageError(f"--out {path} is a file, not a folder; give another name")
    runs = ("config.yaml", "checkpoint.h5", "summary.json")
    if not may_hold_run and any(os.path.exists(path / name) for name in runs):
        on = f", or --resume {path} to go on with it" if os.path.exists(path / "checkpoint.h5") else ""
        raise UsageError(f"--out {path} holds another run; give another folder, or --force to replace it{on}")
    if parent := unwritable_parent(path):
        raise UsageError(f"--out {path} cannot be written: no permission in {parent}")


def write_config(path: Path, values: dict) -> None:
    """Write options as YAML, below comments that say where and how the program was started."""
    header = "".join(f"# {name}: {printable(value, allowed='')}\n" for name, value in environment().items())
    with atomic_write(path) as file:
        file.write((header + yaml.safe_dump(values, sort_keys=False)).encode())


@functools.cache  # asks git, and does not change while a program runs
def environment() -> dict[str, str]:
    """Return what a reader needs to repeat the run: launch line, git commit, versions, machine."""
    found = {"launch": launch_line(), "commit": commit(), "python": platform.python_version(), **versions()}
    found["mpi"] = " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split())
    system, cores = f"{platform.system()} {platform.release()}", counted(os.cpu_count() or 1, "core")
    found["machine"] = f"{platform.machine()}, {cores}, {system}"
    return found


def launch_line() -> str:
    """Return the number of ranks, the program and its arguments."""
    program, *arguments = sys.argv
    ours = Path(program).parts[-2:] == MODULE or Path(program).name == "hpcdl"
    started = ["hpcdl"] if ours else [Path(sys.executable).name, program]
    return f"{counted(MPI.COMM_WORLD.size, 'rank')}: {shlex.join([*started, *arguments])}"


def commit() -> str:
    """Return the git commit of the code, with -dirty for local changes; "unknown" outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


class Folder:
    """A run's folder; without a path, nothing is written."""

    def __init__(self, path: Path | None, rank: int):
        self.path, self.rank = path, rank
        self.left: Path | None = None  # the folder of a finished run, which stays as it is
        self.metrics: io.FileIO | None = None
        self.options: Options | None = None
        self.recorder: FlightRecorder | None = None
        self.logs: list[LineLog] = []
        self.handler: logging.FileHandler | None = None
        self.lock: int | None = None

    def create(self, options: Options, resumed: bool, used: dict | None = None, repeated: bool = False) -> None:
        """Make the folder with its config.yaml, on rank 0. resumed: go on in the folder of the resumed run. used:
        entries that replace options. repeated: as in RunContext. Raises UsageError if another job has the folder, or
        the folder holds another run or cannot be written."""
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
            values = {name: value for name, value in dataclasses.asdict(options).items() if name not in UNWRITTEN}
            write_config(self.path / "config.yaml", values | (used or {}))

    def leave(self) -> None:
        """Write nothing from now on: the run of this folder has ended, and its folder stays as it is."""
        self.path, self.left = None, self.path
        self._release()

    def claim(self, together: bool = False, outlived: bool = False) -> None:
        """Lock the folder (rank 0) until this process closes it or ends. Raises UsageError if another job has it.
        together: jobs that all give `together` share the lock; without it, half-written files of killed processes are
        removed. outlived: wait for the end of a lost rank's process, which may hold the lock. On a file system without
        locks, no job is kept out."""
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

    def open(self, step: int, recent: Iterable[dict] = (), scored: int | None = None) -> None:
        """Open this rank's log and, on rank 0, metrics.jsonl, from which broken lines and lines of steps after `step`
        are removed. recent: lines up to `step` that are added if missing. scored: the step whose evaluation will be
        repeated, so that its old line is removed; None: no step. Raises UsageError if a file cannot be written."""
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
                text = path.read_bytes() if path.exists() else b""
                # The last line may have been cut off.
                whole = [each for each in text.splitlines(keepends=True) if each.endswith(b"\n")]
                found = [(step_of(each), each) for each in whole]
                there = {(of, RATE in each) for of, each in found}
                more = [(each["step"], dumped(each).encode()) for each in recent]
                lines = [*found, *((of, each) for of, each in more if (of, RATE in each) not in there)]
                past = [(of, each) for of, each in lines if of is not None and of <= step]
                kept = [each for of, each in past if (of, RATE in each) != (scored, False)]
                with atomic_write(path) as file:
                    file.write(b"".join(kept))
                self.metrics = open(path, "ab", buffering=0)  # noqa: SIM115 - as long as the run
            if broken := [number for number, (of, _) in enumerate(found, 1) if of is None]:
                log.warning("%s: %d lines are broken, and left out; the first is line %d", path, len(broken), broken[0])
            if self.options is not None:
                self._open_logs(self.path, self.options, kept)

    def _open_logs(self, folder: Path, options: Options, lines: list[bytes]) -> None:
        wanted, last = forms(options.log), parse_json(lines[-1]) if lines else {}
        began, told = time.time() - (last.get("seconds") or 0.0), dataclasses.asdict(options)
        if "csv" in wanted:
            with blamed_on(f"{folder / CSV} cannot be written"):
                self.logs.append(Csv.begin(folder / CSV, map(parse_json, lines)))
        if "tensorboard" in wanted:
            with blamed_on(f"{folder / EVENTS} cannot be written"):
                self.logs.append(write_events(folder / EVENTS, map(parse_json, lines), began, told))
        for name in TRACKERS.keys() & wanted:
            self.logs.append(TRACKERS[name](folder, map(parse_json, lines), began, told))

    def record_flight(self, size: int, capacity: int, groups: Iterable[Communicator]) -> None:
        """Record this rank's last `capacity` operations for `hpcdl postmortem`. size: ranks. groups: existing ones."""
        if self.path is None or not capacity:
            return
        path = self.path / FLIGHT / f"rank-{self.rank:04d}.bin"
        try:
            path.parent.mkdir(exist_ok=True)
            self.recorder = record_with(FlightRecorder(path, self.rank, size, capacity, groups))
        except OSError as error:
            log.warning("%s cannot be written (%s): a postmortem will know nothing of this rank", path, error.strerror)

    def landed(self, ended: bool) -> None:
        """Discard the flight recording of a leg that ended in good order, or of all legs if the run has `ended`."""
        if self.recorder is not None:
            self.recorder.discard()
            self.recorder = record_with(None)
        if ended and self.rank == 0 and self.path is not None:
            with blamed_on(f"{self.path / FLIGHT} cannot be removed"):
                forget(self.path)

    def record(self, lines: list[dict]) -> None:
        """Append lines to metrics.jsonl, and to the files of --log."""
        if self.metrics is not None:
            text = "".join(map(dumped, lines)).encode()
            with blamed_on(f"{self.metrics.name} cannot be written", LoneError):
                drill.current.check_room(self.metrics.name)
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
        """Return a text on the last checkpoint, for the message of a run that cannot go on."""
        last = self.path and self.path / "checkpoint.h5"
        return f"the last good checkpoint is {last}" if last and last.exists() else "there is no checkpoint yet"

    def close(self) -> None:
        """Close all files and release the folder; write errors have been reported before."""
        if self.metrics is not None:
            for close in (self.metrics.close, *(each.close for each in self.logs)):
                with contextlib.suppress(OSError):
                    close()
        if self.handler is not None:
            log.removeHandler(self.handler)
            with contextlib.suppress(OSError):
                self.handler.close()
        self._release()


class Log(logging.FileHandler):
    """A rank's log; ends the job with one line if it cannot be written."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            drill.current.check_room(self.baseFilename)
        except OSError:
            self.handleError(record)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise LoneError(f"{self.baseFilename} cannot be written: {reason(error)}") from None
        super().handleError(record)


def append(file: io.FileIO, text: bytes) -> None:
    """Append all of `text`, or nothing if the disk has no room. Raises OSError."""
    end = os.fstat(file.fileno()).st_size
    try:
        while text:
            text = text[file.write(text) :]
    except OSError:
        file.truncate(end)
        raise


def dumped(line: dict) -> str:
    """Return a line of metrics.jsonl as text."""
    return json.dumps(line, allow_nan=False) + "\n"


def step_of(line: bytes) -> float | None:
    """Return the step of a line of metrics.jsonl; None if the line is broken."""
    with contextlib.suppress(ValueError):
        found = parse_json(line)
        step = found.get("step") if isinstance(found, dict) else None
        return step if isinstance(step, int | float) and not math.isnan(step) else None
    return None


def summary_of(path: Path | None) -> dict | None:
    """Return the summary in a run's folder; None without a summary.json that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found = parse_json((path / "summary.json").read_text()) if path is not None else None
        return found if isinstance(found, dict) else None
    return None


def new_folder(wanted: Path) -> Path:
    """Make a folder of this name; a number is appended if another job has taken the name in the same second."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes. The caller holds the lock."""
    remove_files(folder, LEFTOVER, ".", EVENTS, LATER)


def remove_run(folder: Path, faults: bool = True) -> None:
    """Remove what a run wrote to its folder, and no other file. faults: remove the journal of injected faults, too."""
    if faults:
        (folder / JOURNAL).unlink(missing_ok=True)
    remove_files(folder, OURS, ".", LATER)
    remove_files(folder, PIECE, PIECES, f"{LATER}/{PIECES}")
    for names, part in ((LOG_NAME, "logs"), (EVENTS_NAME, EVENTS), (RECORDING, FLIGHT)):
        remove_files(folder, names, part)
    forget(folder)


def remove_files(folder: Path, names: re.Pattern[str], *parts: str) -> None:
    """Remove the files with these names in the subfolders `parts` (".": the folder itself), but none behind a link."""
    for part in parts:
        if part == "." or ((folder / part).is_dir() and not (folder / part).is_symlink()):
            for path in (folder / part).iterdir():
                if names.fullmatch(path.name) and (path.is_file() or path.is_symlink()):
                    path.unlink()


def automatic(strategy: str) -> Path:
    """Return the name of a new folder for --out auto: runs/STRATEGY-TIME."""
    return Path("runs", f"{strategy}-{time.strftime('%Y%m%d-%H%M%S')}")
