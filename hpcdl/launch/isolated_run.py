"""One training among many in a job: if it fails, the job continues where that is possible.

    all ranks know it      bad input, a loss that is not finite, ...    all leave the run
    each finds it itself   a bug in the user's model, no memory         each leaves the run, and meets the others here
    one rank alone fails   the others wait for it inside the run        they cannot be interrupted: the job is ended

A rank with an error that the others may not know waits for them up to PATIENCE seconds. Resources of the run are
released; its pending messages are kept, since a message may still arrive."""

import contextlib
import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from hpcdl.comm import progress, refuse_together
from hpcdl.comm.progress import exempt, nap_until
from hpcdl.errors import AgreedError, LoneError, TrainingError, UsageError, blamed_on, line, printable
from hpcdl.files import atomic_write, parse_json
from hpcdl.formatting import counted
from hpcdl.launch.launch_consistency import reading
from hpcdl.memory import forget_peak
from hpcdl.plugins import located
from hpcdl.runs.context import RunContext
from hpcdl.runs.folder import Folder, automatic
from hpcdl.runs.options import Options
from hpcdl.shared_memory import unlink_mapped

if TYPE_CHECKING:
    from hpcdl.launch.command_lines import Command
    from hpcdl.launch.training import Training

PATIENCE = 5.0  # seconds that a failed rank waits for the others to fail, too
FAILED = "failed.json"  # in the folder of a run: why it failed
BEGUN = "begun"  # in the folder of a run: how often it was begun without an end or an orderly stop
MOST = 3  # largest number of such begins


class Outcome(NamedTuple):
    """How a training ended. stopped: why it stopped early (stopping.py); failed: why it failed, in a line; trace:
    traceback of an error that is not hpcdl's; each else None. speaks: True if this rank knows best why it failed."""

    stopped: str | None = None
    failed: str | None = None
    trace: str | None = None
    speaks: bool = True


@contextlib.contextmanager
def job_folder(
    world: MPI.Intracomm, job: str, out: str, prepare: Callable[[Folder], Any]
) -> Iterator[tuple[Path, Any]]:
    """Yield the folder of a job of many runs, to which no other job writes, and on rank 0 the result of `prepare`;
    collective. out: as --out; auto: runs/JOB-TIME. prepare(folder): makes, claims it, on rank 0. Raises AgreedError."""
    folder, prepared = Folder(None, world.rank), None
    with contextlib.closing(folder):
        with refuse_together(world):
            if world.rank == 0:
                folder.path = automatic(job) if out in ("", "auto") else Path(out)
                prepared = prepare(folder)
        unlink_mapped()  # all ranks have come so far
        yield world.bcast(folder.path), prepared


def refuse_taken(folder: Path, holds: str, options: Any) -> None:
    """Raise UsageError, unless --resume or --force is given: `folder` holds another job, `holds`, such as "search"."""
    if not options.resume and not options.force:
        raise UsageError(
            f"--out {folder} holds another {holds}; give another folder, --force to replace it, or --resume {folder} "
            "to go on with it"
        )


def attempt_in(
    comm: MPI.Intracomm,
    command: "Command",
    folder: Path,
    begin: Callable[[], list[str] | Outcome],
    words: Iterable[str] = (),
    context: RunContext | None = None,
) -> Outcome:
    """Run `attempt` for a command with more `words` of options, in `folder`; collective. begin(): called on rank 0,
    prepares the folder; returns the options of `placed`, or an outcome if the run is not to begin."""
    how: Any = None
    try:
        with refuse_together(comm), blamed_on(f"{folder} cannot be written"):
            if comm.rank == 0:
                how = begin()
        how = comm.bcast(how)
        if isinstance(how, Outcome):
            return how
        with reading(comm) as read:
            options = command.options(read, *words, *how)
    except AgreedError as error:
        refused = Outcome(failed=line(error))
        if comm.rank == 0:
            record(folder, refused)
        return refused
    end = attempt(comm, command.training, options, folder, context)
    if comm.rank == 0:
        with contextlib.suppress(OSError):
            (folder / BEGUN).unlink()
    return end


def placed(folder: Path) -> list[str]:
    """Return options for a run in `folder`: to resume from the checkpoint there or, without a checkpoint, to begin."""
    return [f"--resume={folder}"] if (folder / "checkpoint.h5").exists() else [f"--out={folder}", "--force"]


def attempt(
    comm: MPI.Intracomm, training: "Training", options: Options, folder: Path, context: RunContext | None = None
) -> Outcome:
    """Train on the ranks of `comm`; collective. Returns the same outcome on all ranks; a failure leaves the file FAILED
    in `folder`. If other ranks still wait inside the run, raises this rank's error, which ends the job."""
    forget_peak()
    opened: list = []
    error: Any = None
    try:
        mine = Outcome(training.run(comm, options, replace(context or RunContext(), repeated=True), opened).stopped)
    except (AgreedError, TrainingError) as known:
        mine = Outcome(failed=line(known), speaks=known.speaker == comm.rank)
    except (Exception, SystemExit) as unknown:  # an exit in the user's model would end all runs with its status, 0 too
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
    """Wait in naps until all ranks have called this, at most `patience` seconds; True if all have. Collective."""
    come, begun = comm.Ibarrier(), time.monotonic()
    with exempt():
        nap_until(lambda: come.Test() or time.monotonic() - begun > patience, "end of a run", patient=True)
    return bool(come.Test())


def alone(error: BaseException) -> BaseException:
    """Return the error of one rank in a form that ends the job: SystemExit becomes a LoneError, which says why."""
    return LoneError(f"a failure of one rank ends the job: {told(error)}") if isinstance(error, SystemExit) else error


def told(error: BaseException) -> str:
    """Return an error as text in one line, with its type and its place in the code unless it is a UsageError."""
    return str(error) if isinstance(error, UsageError) else located(error)


def record(folder: Path, ended: Outcome) -> None:
    """Write why a run failed into the file FAILED in its folder or, if that file cannot be written, to stderr."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / FAILED) as file:
            file.write(json.dumps({"why": ended.failed, "traceback": ended.trace}, indent=2).encode())
    except OSError:
        sys.stderr.write(f"{printable(f'{folder}: {ended.failed}', allowed='')}\n")


def say_all_failed(whys: Iterable[str | None]) -> None:
    """Print on stderr, also under --progress none, that all runs failed, and the most frequent reason of `whys`."""
    known = Counter(why for why in whys if why is not None)
    most, count = next(iter(known.most_common(1)), ("none has begun", 0))
    failed = f"{counted(count, 'run')} failed: " if count else ""
    sys.stderr.write(f"error: no run has succeeded; {failed}{printable(most, allowed='')}\n")


def failure(folder: Path) -> str | None:
    """Return why the run of this folder failed; None if it has not failed, or the reason is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json((folder / FAILED).read_text())["why"])
    return None


def begun(folder: Path) -> int:
    """Return how often the run of this folder was begun and not ended."""
    try:
        return int((folder / BEGUN).read_text().partition(" ")[0])
    except (OSError, ValueError):
        return 0


def write_begun(folder: Path, times: int, job: str = "") -> None:
    """Write how often the run of this folder was begun, and the name of the job, if any, that began it last."""
    (folder / BEGUN).write_text(f"{times} {job}".rstrip() + "\n")


def given_up(folder: Path) -> str | None:
    """Return why the run of this folder is not to be begun again; None if it may be begun."""
    why = failure(folder)
    return f"the job has died {MOST} times during this run" if why is None and begun(folder) >= MOST else why


def forget(folder: Path) -> None:
    """Remove the records of earlier attempts of a run."""
    for name in (FAILED, BEGUN):
        (folder / name).unlink(missing_ok=True)


def abandon(opened: list) -> None:
    """Release what a failed run held, after all ranks have left it; collective. opened: the functions that release."""
    progress.abandon()
    for give_back in reversed(opened):
        give_back()


def side_by_side(world: MPI.Intracomm, ranks: list[int], start: Callable[[int, MPI.Intracomm], Any]) -> list:
    """Return start(i, comm) for all i, run at once on groups of ranks[i] consecutive ranks; others nap. Collective."""
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
    """Return groups of numbers of trainings to run together on `size` ranks; each is in the first group with room."""
    groups: list[list[int]] = []
    for i, wanted in enumerate(ranks):
        room = next((group for group in groups if sum(ranks[j] for j in group) + wanted <= size), None)
        if room is None:
            groups.append([i])
        else:
            room.append(i)
    return groups
