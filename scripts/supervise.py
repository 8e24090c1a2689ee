"""Start a job, and start it again when it has failed, from what it has saved:
python scripts/supervise.py --restarts 3 -- mpiexec -n 4 hpcdl train-allreduce --checkpoint-every 100 --out runs/a

What stands behind -- is a launcher with a program that trains, search or compare, and its --out. A job that fails (a
rank is killed, a host is lost, an exception) goes on from the last whole checkpoint of its folder; without one it
begins anew, and what there was is set aside as FOLDER-try-1. A line on stderr tells each restart. Bad input (status 2),
and a job that a signal has stopped after it has saved (status 85), are not started again. Ctrl-C and SIGTERM are passed
on, and end it. The exit status is that of the last job.

One process is enough, where the launcher is called; MPI is not started in it.
"""

import os
import sys
from dataclasses import dataclass

from hpcdl.errors import UsageError, line
from hpcdl.faults.clock import LONGEST
from hpcdl.launch.option_parser import parse
from hpcdl.machine.world import launch
from hpcdl.recovery.launch_command import JobLine
from hpcdl.recovery.supervisor import Supervisor
from hpcdl.runs.options import option


@dataclass
class SuperviseOptions:
    """How often, how fast and on how few ranks a job is started again."""

    restarts: int = option(3, "how often it is started again, at most")
    backoff: float = option(1.0, "seconds before a restart; doubled with each one that brings the run no further")
    no_progress: int = option(3, "give up after so many failures in a row between which no step more was saved")
    min_ranks: int = option(0, "go on with fewer ranks where hosts are gone, but not with fewer than these; 0: never")
    stalled: float = option(0.0, "seconds without news in its folder after which a job is ended, as failed; 0: any")

    def __post_init__(self):
        for name, least in (("restarts", 0), ("no_progress", 1), ("min_ranks", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} is {least} or more, not {getattr(self, name)}")
        for name in ("backoff", "stalled"):
            if not 0 <= getattr(self, name) <= LONGEST:
                raise UsageError(f"--{name} is 0 to {LONGEST:,.0f} seconds, not {getattr(self, name)}")


def main(arguments=None):
    words = sys.argv[1:] if arguments is None else list(arguments)
    at = words.index("--") if "--" in words else len(words)
    started = launch(os.environ, library="")
    try:
        options = parse(SuperviseOptions, "supervise", __doc__, words[:at])
        if started is not None and started.ranks > 1:
            raise UsageError("it starts the ranks itself: hpcdl supervise -- mpiexec -n 4 hpcdl ...")
        if not words[at + 1 :]:
            raise UsageError("there is no job: hpcdl supervise --restarts 3 -- mpiexec -n 4 hpcdl train-allreduce ...")
        job = JobLine.read(words[at + 1 :])
        how = options.restarts, options.backoff, options.min_ranks, options.no_progress, options.stalled
        status = Supervisor(job, *how).run()
    except UsageError as error:
        if started is None or started.number == 0:
            print(f"supervise: error: {line(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(status)


if __name__ == "__main__":
    main()
