"""A job that is restarted from its last checkpoint when it has failed: the loop of `hpcdl supervise`.

    job  |----o----o--x          o: a checkpoint, x: it dies (a rank is killed, a host is lost, an exception, ...)
              back-off |..|
    job                   o----o----x
                           back-off |....|        doubled, until a restart has brought the run further
    job                                  o----o----|  status 0: done

    status                             then
    0, and the run has ended           done
    2: bad input, as the job has said  no restart: it would be bad again
    85: stopped by a signal, saved     no restart: someone wanted it to stop
    any other; 0 before the run's end  a restart: --resume of the last whole checkpoint; without one, from the beginning

A signal that ends a job (INT, TERM, HUP) is passed on as USR1, which every launcher hands to all ranks and which leaves
them time to save: Open MPI kills ranks 0.25 s after INT or TERM, and srun takes one INT for a question. The second
signal is passed on as it is. After a signal (USR2 excepted) there is no restart. The supervisor starts no MPI, and runs
on any machine that sees the folder. If it is killed, the launcher gets SIGTERM, and the job saves and ends."""

import contextlib
import fcntl
import itertools
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.checkpoint_file import Checkpoint, older_of
from hpcdl.checkpoint.rollback import LATER
from hpcdl.comm.diagnostics.flight_recorder import FOLDER as FLIGHT
from hpcdl.errors import UsageError, line, reason
from hpcdl.faults.inject import JOURNAL
from hpcdl.files import parse_json
from hpcdl.formatting import counted
from hpcdl.recovery.launch_command import WHOLE, JobLine
from hpcdl.recovery.launch_probe import GivenUp, adopt_orphans, children, end_orphans, follow_us, startable
from hpcdl.runs.signals import STATUS as SAVED

BAD_INPUT = 2
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_PAUSE = 300.0  # seconds
LOOK = 0.2  # seconds between two looks at the job
FREE = 60.0  # seconds in which the ranks of a job that has ended let go of its folder
LEFT = 15.0  # seconds that a launcher may take to end behind its ranks
GRACE = 10.0  # seconds that a job which has stalled has to end


def to_stderr(text: str) -> None:
    """Print a message of the supervisor as one line on stderr."""
    with contextlib.suppress(OSError):
        print(f"supervise: {line(text)}", file=sys.stderr, flush=True)


@dataclass
class Supervisor:
    """Starts a job, and restarts it; `run` returns the exit status of the last start. restarts: the most restarts.
    backoff: seconds before the first restart, doubled with each restart without progress. no_progress: give up after so
    many failures in a row without another step saved. min_ranks: if not all ranks can be started, start fewer, but at
    least so many; 0: never fewer. stalled: end the job as failed after so many seconds without news in its files; 0:
    never. say: prints a text."""

    job: JobLine
    restarts: int = 3
    backoff: float = 1.0
    min_ranks: int = 0
    no_progress: int = 3
    stalled: float = 0.0
    say: Callable[[str], object] = to_stderr

    def __post_init__(self) -> None:
        job, ranks = self.job, self.job.ranks
        assert job.folder is not None
        if self.min_ranks and (ranks is None or self.min_ranks > ranks):
            what = "which is not given" if ranks is None else f"which is {ranks}"
            raise UsageError(f"--min-ranks {self.min_ranks} lowers the launcher's number of ranks (-n), {what}")
        self.told, self.folder = job, job.folder
        self.process: Any = None  # subprocess.Popen
        self.signals: list[int] = []
        self.others: set[int] = set()  # children of this process that are not the job's
        self.found = {} if job.goes_on else self._stamps()  # files of earlier jobs in the folder

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the job, and restart it while it fails and the limits allow; return the exit status of the last start."""
        pause, failures, best = self.backoff, 0, self._progress()
        adopt_orphans()
        with self._passing_on():
            for done in range(self.restarts + 1):
                status = self._once()
                if self.signals or status in (BAD_INPUT, SAVED) or (status == 0 and self._has_ended()):
                    return status
                why = f"the job ended with {said(status)}{self._whence()}"
                try:
                    now = self._progress()
                    failures, pause = (failures + 1, pause) if now <= best else (1, self.backoff)
                    best = max(best, now)
                    left = self.restarts - done
                    if not left:
                        raise GivenUp(f"all --restarts {self.restarts} are used")
                    if failures >= self.no_progress:
                        failed = counted(failures, "failure")
                        raise GivenUp(f"{failed} in a row without another step saved (--no-progress)")
                    if nobody_reads(sys.stdout):
                        raise GivenUp("nobody reads the job's output any more")
                    self._wait_until_free()
                    self.job, where = self._next()
                except GivenUp as found:
                    self.say(f"{why}; given up: {found}")
                    return status or 1
                of = f"restart {done + 1} of {self.restarts} in {pause:g} s, {left - 1} left"
                self.say(f"{why}; {of}, {where}")
                self._sleep(pause)
                if self.signals:
                    return SAVED
                pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("the last failure gives up")

    def _once(self) -> int:
        """Start the job, wait for its end, and return its status, 128 + n if signal n has ended it."""
        self.others = children()
        try:
            # In a session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on.
            how: Any = {"start_new_session": True, "stdin": subprocess.DEVNULL if terminal(sys.stdin) else None}
            self.process = subprocess.Popen(self.job.words, preexec_fn=follow_us, **how)
        except OSError as error:
            raise UsageError(f"{self.job.words[0]} cannot be started: {reason(error)}") from None
        begun = looked = left = time.time()
        watched = self.stalled or self.told.program not in WHOLE  # the folders of many runs are read only if needed
        while (status := self._ended_within(LOOK)) is None:
            if not watched or time.time() - looked < min(1.0, self.stalled or 1.0):
                continue
            looked, news = time.time(), self._last_news()
            if self.stalled and looked - max(begun, news) >= self.stalled:
                self.say(f"no news in {self.folder} for {self.stalled:g} s: the job is ended (--stalled)")
                status = self._end()
                break
            # A run that has news holds the lock of its folder until it ends.
            if news <= begun or self.told.program in WHOLE or locked(self.folder / ".lock"):
                left = looked
            elif looked - left >= LEFT:  # Open MPI's launcher stays after the loss of a host
                self.say(f"its ranks released {self.folder} {LEFT:g} s ago: the launcher, which still runs, is ended")
                summary = self.folder / "summary.json"
                status = self._end()
                status = 0 if self._ours(summary) and summary.stat().st_mtime > begun and self._has_ended() else status
                break
        with contextlib.suppress(OSError):  # processes that the launcher has left on this host
            os.killpg(self.process.pid, signal.SIGKILL)
        return status if status >= 0 else 128 - status

    def _ended_within(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def _end(self) -> int:
        """End a job that does nothing any more; return its status, never 0."""
        self.process.terminate()
        status = self._ended_within(GRACE)
        if status is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            status = self.process.wait()
        end_orphans(self.others)
        return 1 if status in (0, BAD_INPUT, SAVED) else status

    # -- signals -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _passing_on(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: Any) -> None:
        if number in ENDING or number == signal.SIGUSR1:
            first, self.signals = not self.signals, [*self.signals, number]
            number = signal.SIGUSR1 if first else number
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.signals and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK))

    # -- what the job has left ---------------------------------------------------------------------------------------

    def _stamps(self) -> dict[Path, tuple[int, int]]:
        """Return (inode, time of change) of the files in the folder that tell of a run."""
        found = {}
        for path in (self.told.asked, self.folder / "checkpoint.h5", self.folder / "summary.json"):
            with contextlib.suppress(OSError):
                about = path.stat()
                found[path] = about.st_ino, about.st_mtime_ns
        return found

    def _ours(self, path: Path) -> bool:
        """True if the job has written this file, and not an earlier job."""
        stamps = self._stamps()
        return path in stamps and stamps[path] != self.found.get(path)

    def _progress(self) -> tuple[int, int]:
        """Return how far the job can be resumed: (number of runs that have ended, number of steps saved)."""
        ended = steps = 0
        if self._ours(self.told.asked):
            for path in self._files("summary.json", "checkpoint.h5"):
                if path.parent.name != LATER:
                    ended += path.name == "summary.json"
                    steps += step_of(path) if path.name == "checkpoint.h5" else 0
        return ended, steps

    def _has_ended(self) -> bool:
        """True if the run has ended, as status 0 says. A launcher returns 0 even if it started no rank, or lost one."""
        if self.told.program in WHOLE:
            return self.told.asked.exists()
        try:
            steps = parse_json((self.folder / "summary.json").read_bytes())["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        last = self.folder / "checkpoint.h5"
        return not last.exists() or step_of(last) <= steps

    def _whence(self) -> str:
        """Return a text on the step after which a run has ended, from its last line of metrics; "" if unknown."""
        if self.told.program in WHOLE or not self._ours(self.told.asked):
            return ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(self.folder / "metrics.jsonl", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
                lines = [each for each in file.read().splitlines(keepends=True) if each.endswith(b"\n")]
            return f" after step {int(parse_json(lines[-1])['step'])} or later" if lines else ""
        return ""

    def _last_news(self) -> float:
        times = [0.0]
        for path in self._files("metrics.jsonl", "checkpoint.h5", "started.json", "journal.jsonl"):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def _files(self, *names: str) -> Iterator[Path]:
        """Yield the files of these names in and below the folder; the job may remove some meanwhile."""
        for place, _, files in os.walk(self.folder):  # unlike Path.rglob, continues if a folder vanishes
            yield from (Path(place, name) for name in names if name in files)

    def _wait_until_free(self) -> None:
        """Wait until all ranks have released the folder: a launcher may end before its ranks. Raises GivenUp."""
        end = time.monotonic() + FREE
        while locked(self.folder / ".lock") and not self.signals:
            if time.monotonic() > end:
                raise GivenUp(f"a process still holds {self.folder}, {FREE:g} s after the job's end")
            time.sleep(LOOK)

    # -- the next job ------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[JobLine, str]:
        """Return the line to start next, and in words what the job starts from. Raises GivenUp."""
        job, ranks = startable(self.told, self.min_ranks, self.say), ""  # as told: a host may be there again
        if job.ranks is not None and job.ranks != self.job.ranks:
            ranks = f", on {counted(job.ranks, 'rank')} instead of {self.job.ranks}"
        if self.told.program in WHOLE:
            if self._ours(self.told.asked):
                return job.from_checkpoint(self.folder), f"with the runs missing in {self.folder}{ranks}"
            return job, f"from the beginning{ranks}"
        last = self._last_whole()
        if last is not None:
            where = f"from step {step_of(last)} ({last}){ranks}"
            return job.from_checkpoint(self.folder if last.name == "checkpoint.h5" else last), where
        aside = self._set_aside()
        return job.anew() if aside else job, f"from the beginning, as nothing was saved{aside}{ranks}"

    def _last_whole(self) -> Path | None:
        """Return the job's last undamaged checkpoint; None before the first one. Raises GivenUp."""
        newest = self.folder / "checkpoint.h5"
        if not self._ours(newest):
            return None
        for path in [newest, *older_of(self.folder), self.folder / "best.h5"]:
            if path.exists():
                try:
                    Checkpoint.read(path)
                    return path
                except UsageError as error:
                    found = str(error)
                    self.say(found.partition(";")[0])
        raise GivenUp(f"all checkpoints in {self.folder} are damaged (--keep 2 or more keeps older ones)")

    def _set_aside(self) -> str:
        """Rename a folder without a checkpoint, which would stop the next job; return a text on its new name, or ""."""
        if not self._ours(self.told.asked):
            return ""
        tries = (self.folder.with_name(f"{self.folder.name}-try-{number}") for number in itertools.count(1))
        aside = next(each for each in tries if not each.exists())
        try:
            self.folder.rename(aside)
            self.folder.mkdir()
            if (aside / JOURNAL).exists():  # injected faults strike once
                shutil.copy(aside / JOURNAL, self.folder / JOURNAL)
            if (aside / FLIGHT).is_dir():  # for `hpcdl postmortem`
                (aside / FLIGHT).rename(self.folder / FLIGHT)
        except OSError as error:
            raise GivenUp(f"{self.folder} cannot be renamed to set it aside: {reason(error)}") from None
        self.found = {}
        return f" (its files are now in {aside})"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint file, 0 if it is unknown."""
    import h5py

    with contextlib.suppress(Exception), h5py.File(path, "r", locking=False) as file:
        step = parse_json(file.attrs["attributes"])["step"]
        return int(step) if math.isfinite(step) else 0
    return 0


def locked(path: Path) -> bool:
    """True if a process holds the lock of a run's folder; False if that cannot be known."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def said(status: int) -> str:
    """Return an exit status in words."""
    with contextlib.suppress(ValueError):
        if status > 128:
            return f"status {status} ({signal.Signals(status - 128).name})"
    return f"status {status}" + (" before the run's end" if status == 0 else "")


def terminal(stream: Any) -> bool:
    """True for a terminal, which a job in a session of its own cannot read."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return bool(os.isatty(stream.fileno()))
    return False


def nobody_reads(stream: Any) -> bool:
    """True for a pipe that nobody reads any more."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    return False
