"""Start a job, and start it again when it has failed, from what it has saved:
hpcdl supervise --restarts 3 -- mpiexec -n 4 hpcdl train-allreduce --checkpoint-every 100 --out runs/a

Behind the options comes the job, with or without --: a launcher with a program that trains, search or compare, and its
--out. A job that fails (a rank is killed, a host is lost, an exception) goes on from the last whole checkpoint of its
folder; without one it begins anew, and the old folder is renamed to FOLDER-try-1. A line on stderr tells each restart.
Bad input (status 2), and a job that a signal has stopped after it has saved (status 85), are not started again. Ctrl-C
and SIGTERM are passed on to the job, and end it. The exit status is that of the last job.

supervise is one process, started where the launcher would be; it does not start MPI."""

import os
import sys
from dataclasses import dataclass

from hpcdl.errors import UsageError, line
from hpcdl.faults.inject import LONGEST
from hpcdl.launch.option_parser import parse
from hpcdl.machine.world import launch
from hpcdl.recovery.launch_command import JobLine
from hpcdl.recovery.supervisor import Supervisor
from hpcdl.runs.options import not_negative, option, positive


@dataclass
class SuperviseOptions:
    """Options of supervise: how often, how fast and on how few ranks a job is restarted."""

    restarts: int = option(3, "how often the job is started again, at most")
    backoff: float = option(1.0, "seconds before a restart; doubled after each restart without progress of the run")
    no_progress: int = option(3, "give up after so many failures in a row without a new saved step")
    min_ranks: int = option(0, "fewest ranks to go on with if hosts are lost; 0: always all ranks")
    stalled: float = option(0.0, "seconds without news in its folder after which a job counts as failed; 0: no limit")

    def __post_init__(self):
        not_negative(self, "restarts", "min_ranks")
        positive(self, "no_progress")
        for name in ("backoff", "stalled"):
            if not 0 <= getattr(self, name) <= LONGEST:
                raise UsageError(f"--{name} is 0 to {LONGEST:,.0f} seconds, not {getattr(self, name)}")


def own_words(words):
    """Return how many words are supervise's own: the first ones that are options with their values."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 1 if "=" in words[at] or words[at] in ("-h", "--help") else 2
    return min(at, len(words))


def main(arguments=None):
    words = sys.argv[1:] if arguments is None else list(arguments)
    at = own_words(words)
    started = launch(os.environ, library="")
    try:
        options = parse(SuperviseOptions, "supervise", __doc__, words[:at])
        if started is not None and started.ranks > 1:
            raise UsageError("supervise runs the launcher, not under it: hpcdl supervise -- mpiexec -n 4 hpcdl ...")
        job_words = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
        if not job_words:
            raise UsageError("no job is given: hpcdl supervise --restarts 3 -- mpiexec -n 4 hpcdl train-allreduce ...")
        job = JobLine.read(job_words)
        how = options.restarts, options.backoff, options.min_ranks, options.no_progress, options.stalled
        status = Supervisor(job, *how).run()
    except UsageError as error:
        if started is None or started.number == 0:
            print(f"supervise: error: {line(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(status)


if __name__ == "__main__":
    main()
