"""One training among many in a job: where it cannot go on, that is its own affair, and the job goes on.

    all ranks know it      bad input, a loss that is not finite, ...    all come out of the run
    each finds it itself   a mistake in one's own model, no memory      each comes out, and meets the others here
    one rank alone fails   the others wait for it inside the run        nobody can call them out: the job is ended, as
                                                                        in a job of one training

So whoever comes out with an error that the others need not know waits for them, for some seconds. What the run held is
given back; what it had in flight is kept for ever, for a message may still come.
"""

import contextlib
import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from hpcdl.comm.progress import activity, nap_until
from hpcdl.errors import AgreedError, LoneError, TrainingError, UsageError, line, printable, reason
from hpcdl.files import atomic_write, parse_json
from hpcdl.formatting import counted
from hpcdl.memory import forget_peak
from hpcdl.runs.context import RunContext
from hpcdl.runs.options import Options

if TYPE_CHECKING:
    from hpcdl.launch.training import Training

PATIENCE = 5.0  # seconds for which a rank that has failed waits for the others to fail, too
FAILED = "failed.json"  # in the folder of a run: why it could not go on
BEGUN = "begun"  # in the folder of a run: how often it was begun, and neither ended nor was stopped in good order
MOST = 3  # times that it is begun so


class Outcome(NamedTuple):
    """How a training ended: `stopped` as of its run (stopping.py), or why it `failed`, a line, else None.

    trace: of an error that is none of ours. speaks: whether this rank knows best why it failed.
    """

    stopped: str | None = None
    failed: str | None = None
    trace: str | None = None
    speaks: bool = True


def attempt(
    comm: MPI.Intracomm, training: "Training", options: Options, folder: Path, context: RunContext | None = None
) -> Outcome:
    """Train on the ranks of `comm`, of which this one is; collective. Returns the same on all of them.

    A run that could not go on leaves `failed.json` in `folder`: `why`, and the `traceback` of an error that is none
    of ours. Raises what a rank alone has come upon, which ends the job.
    """
    forget_peak()
    opened: list = []
    error: Any = None
    try:
        mine = Outcome(training.run(comm, options, replace(context or RunContext(), repeated=True), opened).stopped)
    except (AgreedError, TrainingError) as known:
        mine = Outcome(failed=line(known), speaks=known.speaker == comm.rank)
    except (Exception, SystemExit) as unknown:  # an exit of one's own model would end all lines with its status, 0 too
        error, mine = unknown, Outcome(failed=line(told(unknown)), trace=traceback.format_exc())
    if not all_come(comm, PATIENCE if error else math.inf):
        record(folder, mine)
        raise alone(error)
    everyone = comm.allgather(mine)
    failed = [rank for rank, each in enumerate(everyone) if each.failed is not None]
    if not failed:
        return mine
    abandon(opened)
    best = next((rank for rank in failed if everyone[rank].speaks), failed[0])
    if comm.rank == best:
        record(folder, mine)
    return everyone[best]


def all_come(comm: MPI.Intracomm, patience: float = math.inf) -> bool:
    """Wait until all ranks have come, in naps, or for so many seconds; whether they have come."""
    come, begun = comm.Ibarrier(), time.monotonic()
    with activity.exempt():
        nap_until(lambda: come.Test() or time.monotonic() - begun > patience, "end of a run", patient=True)
    return bool(come.Test())


def alone(error: BaseException) -> BaseException:
    """The error of a rank alone in a form that ends the job; of an exit, others would learn late, and not by whom."""
    return LoneError(f"a rank that fails alone ends all: {told(error)}") if isinstance(error, SystemExit) else error


def told(error: BaseException) -> str:
    """What went wrong, in a line, and where, unless it says what to do."""
    if isinstance(error, UsageError):
        return str(error)
    frames = [*traceback.extract_tb(error.__traceback__)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SystemExit):
        return f"it leaves the program, with status {error.code}{where}"
    return f"{type(error).__name__}: {reason(error)}{where}"


def record(folder: Path, ended: Outcome) -> None:
    """Leave in a run's folder why it failed; where nothing can be written there, say it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / FAILED) as file:
            file.write(json.dumps({"why": ended.failed, "traceback": ended.trace}, indent=2).encode())
    except OSError:
        sys.stderr.write(f"{printable(f'{folder}: {ended.failed}', allowed='')}\n")


def say_all_failed(whys: Iterable[str | None]) -> None:
    """Say on stderr that no run has come out well, and why; under --progress none nothing else says so."""
    known = Counter(why for why in whys if why is not None)
    most, count = next(iter(known.most_common(1)), ("none has begun", 0))
    failed = f"{counted(count, 'run')} failed: " if count else ""
    sys.stderr.write(f"error: no run has come out well; {failed}{printable(most, allowed='')}\n")


def failure(folder: Path) -> str | None:
    """Why the run of this folder failed; None where it has not, or nobody knows."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json((folder / FAILED).read_text())["why"])
    return None


def begun(folder: Path) -> int:
    """How often the run of this folder was begun, and not brought to an end."""
    try:
        return int((folder / BEGUN).read_text().partition(" ")[0])
    except (OSError, ValueError):
        return 0


def write_begun(folder: Path, times: int, job: str = "") -> None:
    """Note how often the run of this folder was begun, and the name of the job that has done so last, if it has one."""
    (folder / BEGUN).write_text(f"{times} {job}".rstrip() + "\n")


def given_up(folder: Path) -> str | None:
    """Why the run of this folder is not begun again; None where it is."""
    why = failure(folder)
    return f"the job has ended in it {MOST} times" if why is None and begun(folder) >= MOST else why


def forget(folder: Path) -> None:
    """Let a run be as if it had not been tried."""
    for name in (FAILED, BEGUN):
        (folder / name).unlink(missing_ok=True)


def abandon(opened: list) -> None:
    """Give back what a run held that cannot go on; collective. All ranks have come out of it."""
    activity.abandon()
    for give_back in reversed(opened):
        give_back()


def side_by_side(
    world: MPI.Intracomm, ranks: list[int], start: Callable[[int, MPI.Intracomm], Outcome]
) -> list[Outcome]:
    """Trainings on parts of the ranks, one after another of so many ranks each; what is left over naps; collective.

    start(i, comm): is called on the ranks of part i with their communicator. Returns how each ended, on all ranks.
    """
    first = [sum(ranks[:i]) for i in range(len(ranks))]
    part = next((i for i, begin in enumerate(first) if begin <= world.rank < begin + ranks[i]), None)
    comm: Any = world.Split(MPI.UNDEFINED if part is None else part, world.rank)  # MPI.Intracomm
    mine = None
    if part is not None:
        mine = start(part, comm)
        comm.Free()
    all_come(world)
    everyone: list = world.allgather(mine)
    return [everyone[begin] for begin in first]


def packed(ranks: list[int], size: int) -> list[list[int]]:
    """Which trainings, by number, run beside each other on `size` ranks: each in the first group with room for it."""
    groups: list[list[int]] = []
    for i, wanted in enumerate(ranks):
        room = next((group for group in groups if sum(ranks[j] for j in group) + wanted <= size), None)
        if room is None:
            groups.append([i])
        else:
            room.append(i)
    return groups
