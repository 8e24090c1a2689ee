"""A trial that hangs within a step ends the job, for no run looks at its clock there: search --trial-limit.

    0                  limit                    limit + grace                        ... + LATE
    the trial begins   the run ends in order    a thread of the group's first rank   a thread that needs no lock of
                       at its next boundary     names the trial and ends the job     Python's prints where all threads
                                                                                     are, and ends the process

The last one is faulthandler's. It ends the job where a C function holds Python's lock, so that no thread of Python's
runs. The trials of other groups are ended, too: the try that this takes from them is given back.
"""

import contextlib
import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mpi4py import MPI

from hpcdl.comm.diagnostics.call_site import innermost, place
from hpcdl.comm.job_abort import end_job
from hpcdl.launch.isolated_run import BEGUN, begun, write_begun

GRACE = 30.0  # seconds, at least, in which a trial may come to the end of its step, be scored and saved
LATE = 5.0  # seconds that the thread of Python's has to end the job
STDERR = 2  # the file descriptor: what stands for sys.stderr may have none


@contextlib.contextmanager
def guarded(comm: MPI.Intracomm, limit: float, end: Callable[[float], None]) -> Iterator[None]:
    """Call end(grace) in a thread of the first rank if the body takes `limit` seconds and `grace` more; 0: any time."""
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
    """End the job because of a trial whose run is in `path`, with one line; --resume begins the trial once more.

    folder: of the search. job: the name under which this job has begun trials.
    """
    main = threading.main_thread().ident
    where = place(innermost(sys._current_frames()[main]))  # type: ignore[index]
    why = (
        f"trial {trial} hangs within a step: it has taken {grace:g} s longer than --trial-limit {limit:g}; rank "
        f"{MPI.COMM_WORLD.rank} is at {where}; the job is ended, and --resume {folder} goes on"
    )
    sys.stderr.write(f"error: {why}\n")
    with contextlib.suppress(OSError):
        give_back(folder, path, job)
    end_job(1, why)


def give_back(folder: Path, path: Path, job: str) -> None:
    """Take back the try of each trial that this job has begun, and not ended, but that of the run in `path`."""
    for each in folder.glob(f"trials/[0-9]*/seed-[0-9]*/{BEGUN}"):
        if each.parent != path and job in each.read_text().split():
            write_begun(each.parent, begun(each.parent) - 1)
