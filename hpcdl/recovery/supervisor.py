"""A job that is started again when it has failed, from what it has saved: the loop of `hpcdl supervise`.

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

A signal that ends a job (INT, TERM, HUP) is passed on as USR1, which every launcher hands to all ranks and leaves them
the time to save: Open MPI's would kill them a quarter of a second after INT or TERM, and srun takes one INT for a
question. The second one is passed on as it is. After it there is no restart. USR1 and USR2 are passed on as they are.

It looks at files and processes only, starts no MPI, and so runs where the launcher does, on a machine that sees the
folder. If it is killed itself, the kernel sends the launcher SIGTERM (PR_SET_PDEATHSIG), and the job saves and ends.
"""

import contextlib
import fcntl
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.checkpoint_file import OLDER, Checkpoint
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


class Supervisor:
    """Starts a job, and starts it again; `run` returns the exit status of the last one.

    restarts: at most so many. backoff: seconds before the first; doubled with each one that has brought nothing.
    no_progress: give up after so many failures in a row between which no step more was saved. min_ranks: where so many
    ranks as before cannot be started any more, go on with fewer, but not fewer than these; 0: never. stalled: seconds
    without any news in the job's files after which it is ended, and has failed; 0: any. say: takes a line.
    """

    def __init__(
        self,
        job: JobLine,
        restarts: int = 3,
        backoff: float = 1.0,
        min_ranks: int = 0,
        no_progress: int = 3,
        stalled: float = 0.0,
        say: Callable[[str], object] | None = None,
    ):
        assert job.folder is not None
        if min_ranks and (job.ranks is None or min_ranks > job.ranks):
            what = "it does not say how many" if job.ranks is None else f"the job has {job.ranks}"
            raise UsageError(f"--min-ranks {min_ranks} lowers the -n of the launcher: {what}")
        self.told, self.job, self.folder = job, job, job.folder
        self.restarts, self.backoff, self.min_ranks = restarts, backoff, min_ranks
        self.no_progress, self.stalled, self.say = no_progress, stalled, say or to_stderr
        self.process: subprocess.Popen[bytes] | None = None
        self.signals: list[int] = []
        self.others: set[int] = set()  # processes that belong to whoever has made this
        self.found = {} if job.goes_on else self._stamps()  # what others have left in the folder

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Start the job until it has ended, or nothing more is to be done."""
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
                    self._refuse_in_vain(left, failures)
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

    def _refuse_in_vain(self, left: int, failures: int) -> None:
        """Raise GivenUp where another start is not allowed, or for nobody."""
        if not left:
            raise GivenUp(f"--restarts {self.restarts} are used up")
        if failures >= self.no_progress:
            raise GivenUp(f"{counted(failures, 'failure')} in a row, and no step more was saved (--no-progress)")
        if nobody_reads(sys.stdout):
            raise GivenUp("who has read its output is gone")

    def _once(self) -> int:
        """Start the job, wait for its end, and return its status, 128 + n where signal n has ended it."""
        self.others = children()
        try:
            self.process = subprocess.Popen(
                self.job.words,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on
                stdin=subprocess.DEVNULL if terminal(sys.stdin) else None,
                preexec_fn=follow_us,
            )
        except OSError as error:
            raise UsageError(f"{self.job.words[0]} cannot be started: {reason(error)}") from None
        begun = looked = left = time.time()
        watched = self.stalled or self.told.program not in WHOLE  # of many runs nobody reads all folders for nothing
        while (status := self._ended_within(LOOK)) is None:
            if not watched or time.time() - looked < min(1.0, self.stalled or 1.0):
                continue
            looked, news = time.time(), self._last_news()
            if self.stalled and looked - max(begun, news) >= self.stalled:
                self.say(f"no news in {self.folder} for {self.stalled:g} s: the job is ended (--stalled)")
                status = self._end()
                break
            # Once a run has news it holds its folder, and nobody else is to take it between.
            if news <= begun or self.told.program in WHOLE or locked(self.folder / ".lock"):
                left = looked
            elif looked - left >= LEFT:  # as Open MPI's does where a host is lost
                self.say(f"its ranks have let go of {self.folder} for {LEFT:g} s: the launcher, still there, is ended")
                summary = self.folder / "summary.json"
                status = self._end()
                status = 0 if self._ours(summary) and summary.stat().st_mtime > begun and self._has_ended() else status
                break
        with contextlib.suppress(OSError):  # what the launcher has left behind here
            os.killpg(self.process.pid, signal.SIGKILL)
        return status if status >= 0 else 128 - status

    def _ended_within(self, seconds: float) -> int | None:
        """The job's status where it ends within so many seconds."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def _end(self) -> int:
        """End a job that does nothing any more; returns its status, never 0."""
        assert self.process is not None
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
        """Signals to this process are for the job."""
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
        """Wait, until a signal comes."""
        end = time.monotonic() + seconds
        while not self.signals and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK))

    # -- what the job has left ---------------------------------------------------------------------------------------

    def _stamps(self) -> dict[Path, tuple[int, int]]:
        """By which the files of the folder that tell of a run are known again."""
        found = {}
        for path in (self.told.asked, self.folder / "checkpoint.h5", self.folder / "summary.json"):
            with contextlib.suppress(OSError):
                about = path.stat()
                found[path] = about.st_ino, about.st_mtime_ns
        return found

    def _ours(self, path: Path) -> bool:
        """Whether the job has written this file, not someone before."""
        stamps = self._stamps()
        return path in stamps and stamps[path] != self.found.get(path)

    def _progress(self) -> tuple[int, int]:
        """How far the job is that can be gone on with: runs that have ended, steps saved; more is better."""
        ended = steps = 0
        if self._ours(self.told.asked):
            for path in self._files("summary.json", "checkpoint.h5"):
                if path.parent.name != LATER:
                    ended += path.name == "summary.json"
                    steps += step_of(path) if path.name == "checkpoint.h5" else 0
        return ended, steps

    def _has_ended(self) -> bool:
        """Whether a status of 0 is the run's: a launcher has it, too, where it has started no rank, or lost one."""
        if self.told.program in WHOLE:
            return self.told.asked.exists()
        try:
            steps = parse_json((self.folder / "summary.json").read_bytes())["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        last = self.folder / "checkpoint.h5"
        return not last.exists() or step_of(last) <= steps

    def _whence(self) -> str:
        """After which step a run has ended, as its last line of metrics has it."""
        if self.told.program in WHOLE or not self._ours(self.told.asked):
            return ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(self.folder / "metrics.jsonl", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
                lines = [each for each in file.read().splitlines(keepends=True) if each.endswith(b"\n")]
            return f" after step {int(parse_json(lines[-1])['step'])} or later" if lines else ""
        return ""

    def _last_news(self) -> float:
        """When a file of the job was last written, in seconds since 1970."""
        times = [0.0]
        for path in self._files("metrics.jsonl", "checkpoint.h5", "started.json", "journal.jsonl"):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def _files(self, *names: str) -> Iterator[Path]:
        """The files of these names in and below the folder, of which the job removes some while they are looked for."""
        for place, _, files in os.walk(self.folder):  # goes on where a folder is gone, as Path.rglob does not
            yield from (Path(place, name) for name in names if name in files)

    def _wait_until_free(self) -> None:
        """Wait until the last rank has let go of the folder: a launcher may end before its ranks. Raises GivenUp."""
        end = time.monotonic() + FREE
        while locked(self.folder / ".lock") and not self.signals:
            if time.monotonic() > end:
                raise GivenUp(f"a process still holds {self.folder}, {FREE:g} s after the job's end")
            time.sleep(LOOK)

    # -- the next job ------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[JobLine, str]:
        """The line to start, and from where it goes on, in words. Raises GivenUp."""
        job, ranks = startable(self.told, self.min_ranks, self.say), ""  # as told: a host may be there again
        if job.ranks is not None and job.ranks != self.job.ranks:
            ranks = f", on {counted(job.ranks, 'rank')} instead of {self.job.ranks}"
        if self.told.program in WHOLE:
            if self._ours(self.told.asked):
                return job.from_checkpoint(self.folder), f"with what is missing in {self.folder}{ranks}"
            return job, f"from the beginning{ranks}"
        last = self._last_whole()
        if last is not None:
            where = f"from step {step_of(last)} ({last}){ranks}"
            return job.from_checkpoint(self.folder if last.name == "checkpoint.h5" else last), where
        aside = self._set_aside()
        return job.anew() if aside else job, f"from the beginning, as nothing was saved{aside}{ranks}"

    def _last_whole(self) -> Path | None:
        """The last checkpoint of the job that can be read whole; None: it has none yet. Raises GivenUp."""
        newest = self.folder / "checkpoint.h5"
        if not self._ours(newest):
            return None
        names = sorted((each.name for each in self.folder.iterdir() if OLDER.fullmatch(each.name)), reverse=True)
        for path in [newest, *map(self.folder.joinpath, names), self.folder / "best.h5"]:
            if path.exists():
                try:
                    Checkpoint.read(path)
                    return path
                except UsageError as error:
                    found = str(error)
                    self.say(found.partition(";")[0])
        raise GivenUp(f"no checkpoint in {self.folder} is whole (--keep 2 keeps the one before)")

    def _set_aside(self) -> str:
        """Take away what a job without a checkpoint has written, or the next one would be refused; returns words."""
        if not self._ours(self.told.asked):
            return ""
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}-try-{number}")).exists():
            number += 1
        try:
            self.folder.rename(aside)
            self.folder.mkdir()
            if (aside / JOURNAL).exists():  # faults on purpose strike once
                shutil.copy(aside / JOURNAL, self.folder / JOURNAL)
            if (aside / FLIGHT).is_dir():  # for `hpcdl postmortem`
                (aside / FLIGHT).rename(self.folder / FLIGHT)
        except OSError as error:
            raise GivenUp(f"{self.folder} cannot be set aside: {reason(error)}") from None
        self.found = {}
        return f" (what there was is in {aside})"


def step_of(path: Path) -> int:
    """The step of a checkpoint file, 0 where it cannot be told."""
    import h5py

    with contextlib.suppress(Exception), h5py.File(path, "r", locking=False) as file:
        step = parse_json(file.attrs["attributes"])["step"]
        return int(step) if math.isfinite(step) else 0
    return 0


def locked(path: Path) -> bool:
    """Whether a process holds the lock of a run's folder; where that cannot be known, none does."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def said(status: int) -> str:
    """An exit status in words."""
    with contextlib.suppress(ValueError):
        if status > 128:
            return f"status {status} ({signal.Signals(status - 128).name})"
    return f"status {status}" + (" before the run's end" if status == 0 else "")


def terminal(stream: Any) -> bool:
    """Whether it is one, which a job in a session of its own cannot read."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return bool(os.isatty(stream.fileno()))
    return False


def nobody_reads(stream: Any) -> bool:
    """Whether it is a pipe whose reader is gone."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    return False


def to_stderr(text: str) -> None:
    """A line of the supervisor's own."""
    with contextlib.suppress(OSError):
        print(f"supervise: {line(text)}", file=sys.stderr, flush=True)
