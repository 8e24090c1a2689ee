"""A trial that hangs within a step ends the job (search --trial-limit), as runs check their clocks after steps only.

    0                  limit                    limit + grace                       ... + LATE
    the trial begins   the run ends in order    a thread of the group's first rank  faulthandler's thread prints where
                       at its next boundary     names the trial and ends the job    all threads are, ends the process

faulthandler's thread needs no lock of Python's: it ends the job where a C function holds the lock and no Python thread
runs. Trials of other groups end, too, but do not lose an attempt (return_attempts)."""

import contextlib
import faulthandler
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mpi4py import MPI

from hpcdl.comm.diagnostics.call_site import place_in, stack_of
from hpcdl.comm.job_abort import end_job, print_error
from hpcdl.launch.isolated_run import BEGUN, begun, write_begun

GRACE = 30.0  # minimum seconds for a trial to finish its step, be scored and saved
LATE = 5.0  # seconds that the Python thread has to end the job
STDERR = 2  # the file descriptor: a replaced sys.stderr may have none


@contextlib.contextmanager
def time_limited(comm: MPI.Intracomm, limit: float, end: Callable[[float], None]) -> Iterator[None]:
    """Context: a thread of the first rank calls end(grace) if the body takes over limit + grace seconds; 0: never."""
    if not limit or comm.rank > 0:
        yield
        return
    grace = max(GRACE, limit / 2)
    timer = threading.Timer(limit + grace, partial(end, grace))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(limit + grace + LATE, exit=True, file=STDERR)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def end_search(folder: Path, path: Path, trial: int, limit: float, job: str, grace: float) -> None:
    """End the job with an error line, because trial `trial`, whose run is in `path`, hangs; --resume repeats the trial.
    folder: of the search. limit, grace: seconds. job: name under which this launch has begun trials."""
    main = threading.main_thread().ident
    where = place_in(stack_of(main))
    why = (
        f"trial {trial} hangs within a step: it has taken {grace:g} s longer than --trial-limit {limit:g}; rank "
        f"{MPI.COMM_WORLD.rank} is at {where}; the job ends now; go on with --resume {folder}"
    )
    print_error(f"error: {why}\n")
    with contextlib.suppress(OSError):
        return_attempts(folder, path, job)
    end_job(1, why)


def return_attempts(folder: Path, path: Path, job: str) -> None:
    """Subtract one attempt of each run that launch `job` has begun and not ended, except the run in `path`."""
    for marker in folder.glob(f"trials/[0-9]*/seed-[0-9]*/{BEGUN}"):
        if marker.parent != path and job in marker.read_text().split():
            write_begun(marker.parent, begun(marker.parent) - 1)
