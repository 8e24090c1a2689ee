"""Search for good options: many trainings in one job, on groups of its ranks:
mpiexec -n 4 python scripts/search.py train-allreduce --epochs 9 --space lr=log:0.001..0.5 --method asha --trials 27

The program that trains comes first, then its options and those of the search, in any order; an option that both have,
as train-gossip has --method, stands with the program in quotes: "train-gossip --method adpsgd".

What --out names gets a folder for each trial with its run, the journal, trials.csv and best.yaml, which --config takes.
A trial that fails is a row that says why; where all do, the status is 1. Stopped or killed, --resume FOLDER goes on.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from hpcdl.errors import AgreedExit, UsageError, blamed_on, line
from hpcdl.faults.clock import LONGEST
from hpcdl.files import atomic_write
from hpcdl.formatting import dashed
from hpcdl.launch.command_lines import Command
from hpcdl.launch.nested_command_line import divided
from hpcdl.launch.option_parser import LARGEST, CommandLine, parse, parse_command_line
from hpcdl.launch.start import Program
from hpcdl.machine.world import check_world
from hpcdl.plugins import names_in, refuse_untrusted
from hpcdl.runs import signals
from hpcdl.runs.options import kinds_of, option
from hpcdl.search import journal
from hpcdl.search.controller import Controller
from hpcdl.search.methods import make_method
from hpcdl.search.results import write_tables
from hpcdl.search.search_log_reader import read as read_trials
from hpcdl.search.space import Parameter, Space
from hpcdl.search.view import View
from hpcdl.shared_memory import unlink_mpich_files

if TYPE_CHECKING:
    from hpcdl.runs.folder import Folder

AGAIN = ("out", "resume", "force", "space_file", "progress", "time_limit", "only")  # are those of one start
WRITTEN = ("config.yaml", "trials.csv", "best.yaml")  # beside the journal, and a folder for each trial


@dataclass
class SearchOptions:
    line: list[str] = option(list, "the program that trains, and its options")
    space: str = option(
        "", "NAME=SPEC, again for each option: lr=log:0.001..0.5, batch-size=int:16..512, model=mlp:64|svm"
    )
    space_file: str = option("", "YAML file of the same, NAME: SPEC")
    method: str = option("random", "grid, random, random:sobol, asha, hyperband, pbt, tpe, optuna:SAMPLER")
    trials: int = option(0, "how many points are tried; 0: all of a grid, a round of hyperband's")
    ranks_per_trial: int = option(
        0, "ranks of a group, which trains one trial at a time; 0: as few as the program takes"
    )
    controller: Literal["shared", "own"] = option("shared", "rank 0 hands out and trains, or has that for itself")
    objective: str = option(
        "", "what trials are judged by, as test_accuracy, validation_loss; without, the score on rows that are held out"
    )
    seeds: int = option(1, "train each point with so many seeds, and judge by the mean")
    seed: int = option(0, "of the points, and of the first training of each")
    least: float = option(1.0, "asha, hyperband: epochs after which trials are judged first; pbt: between judgements")
    most: float = option(0.0, "epochs of a whole trial, instead of the program's --epochs")
    eta: int = option(3, "asha, hyperband: one of so many goes on")
    points: int = option(5, "grid: into how many points a range is cut")
    only: int = option(
        -1, "grid, random: train this trial alone, as one of many jobs that share --out; -1: all of them"
    )
    trial_limit: float = option(0.0, "seconds after which a trial is given up; 0: none")
    time_limit: float = option(0.0, "seconds after which the search ends in good order, to be gone on with; 0: none")
    out: str = option("auto", "folder that the search writes; auto: runs/search-TIME")
    force: bool = option(False, "replace what another search has left in --out")
    resume: str = option("", "folder of a search to go on with")
    progress: Literal["auto", "bar", "lines", "none"] = option("auto", "how the search shows how far it is")

    def __post_init__(self) -> None:
        for name in ("least", "most", "trial_limit", "time_limit"):
            if not 0 <= getattr(self, name) <= LONGEST:
                raise UsageError(f"--{dashed(name)} is 0 or more, at most {LONGEST:,.0f}, not {getattr(self, name)}")
        for name, least in (("seeds", 1), ("trials", 0), ("ranks_per_trial", 0), ("points", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{dashed(name)} is {least} or more, not {getattr(self, name)}")
        if self.only < -1:
            raise UsageError(f"--only {self.only}: the number of a trial, from 0 on")
        if self.only >= 0 and (self.force or self.resume or self.out in ("", "auto")):
            raise UsageError("--only: the jobs of a search share its folder: give --out, neither --force nor --resume")
        if self.out == "none":
            raise UsageError("--out none: a search is made of what its trials have written; name a folder")


def run(arguments):
    from mpi4py import MPI

    from hpcdl.comm import refuse_together
    from hpcdl.data import row_cache
    from hpcdl.launch.launch_consistency import reading, refuse_unlike
    from hpcdl.launch.program import ended
    from hpcdl.machine.doctor import warn
    from hpcdl.runs.folder import Folder
    from hpcdl.search import groups
    from hpcdl.search.checks import (
        epochs_of,
        objective_of,
        open_all_data,
        probes,
        read_training,
        refuse_names,
        refuse_unmakeable,
        with_epochs,
    )

    world = MPI.COMM_WORLD
    with ended("search", world.rank):
        check_world(world)
        with reading(world, parse_command_line) as read:
            command_line = read(SearchOptions, "search", __doc__, words(arguments))
            options = command_line.options
            if options.only >= 0:  # nobody else is to have the other ranks
                options.ranks_per_trial = options.ranks_per_trial or world.size
            space = read_space(command_line)
            command = read_training(" ".join(options.line), options.ranks_per_trial, world.size, command_line.trust)
            division = groups.divide_ranks(world.size, command.ranks, options.controller == "own")
            refuse_names(space, command, options.method)
            command = with_epochs(command, options.most)
            tried = probes(space, command, parse)
            most = epochs_of(command, options.method, tried[0].options)
        refuse_unlike(world, {"the training": command.text})
        warn(world)
        data = open_all_data(world, [each.options for each in tried])
        lock, trial, controller = Folder(None, world.rank), Folder(None, world.rank), None
        with contextlib.closing(lock), contextlib.closing(trial):
            with refuse_together(world):
                objective, command, said = objective_of(options.objective, command, tried, data)
                if world.rank == 0:
                    refuse_unmakeable(command, tried, data)
                    controller = prepare(lock, trial, options, command, space, objective, most)
            unlink_mpich_files()  # all ranks have come so far
            for each in data.values():
                each.close()
            folder = world.bcast(lock.path)
            status = search(world, options, division, command, space, objective, folder, controller, said)
            row_cache.clear()
        raise AgreedExit(status)


def words(arguments: list[str]) -> list[str]:
    """One's own words as the parser takes them: the line of the training as one, and all of the space as one."""
    kinds = {name: kind for name, kind in kinds_of(SearchOptions).items() if name not in ("line", "space")}
    found = divided(arguments, kinds, ("space",))
    space = "\n".join(found.several["space"])
    return [*found.own, *([f"--space={space}"] if space else []), *([found.line] if found.line else [])]


def read_space(command_line: CommandLine) -> Space:
    """The space of the command line, and of a file before it. Raises UsageError."""
    options, parameters = command_line.options, list[Parameter]()
    if options.space_file:
        told = f"--space-file {options.space_file}"
        with blamed_on(f"{told} cannot be read"), open(options.space_file, encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise UsageError(f"{told} has more than {LARGEST:,} bytes, and should be a few lines")
        parameters += trusted(Space.from_yaml(text), options.space_file, command_line.trust)
    if options.space:
        space = Space.read(options.space.splitlines())
        file = command_line.origin.get("space")
        parameters += trusted(space, file, command_line.trust) if file else space.parameters
    if not parameters:
        raise UsageError("there is nothing to search: give --space lr=log:0.001..0.5, once for each option")
    return Space(tuple(parameters))


def trusted(space: Space, file: str, trust: Iterable[str]) -> tuple[Parameter, ...]:
    """The parameters of a space that stands in a file; UsageError where it names code that may not be called."""
    texts = [(each.name, text) for each in space.parameters for text in each.choices]
    refuse_untrusted([(option, name) for option, text in texts for name in names_in(option, text)], file, trust)
    return space.parameters


# -- its folder ------------------------------------------------------------------------------------------------------


def prepare(
    lock: Folder,
    trial: Folder,
    options: SearchOptions,
    command: Command,
    space: Space,
    objective: str,
    most: float,
) -> Controller:
    """Make the folder of the search, or go on with it (rank 0). Raises UsageError where it cannot be.

    lock, trial: claim the folder, and with --only that of the trial.
    """
    from hpcdl.runs.folder import automatic

    lock.path = automatic("search") if options.out in ("", "auto") and not options.resume else Path(options.out)
    settings = settings_of(options, command, space, objective, most)
    how = {name: settings[name] for name in ("least", "most", "eta", "points")}
    method: Any = make_method(options.method, space, options.trials, options.seed, **how)
    if options.only >= 0 and not method.planned:
        raise UsageError(f"--only: of --method {options.method} a trial follows from others; take grid or random")
    if options.only >= 0 and options.only >= method.trials:
        raise UsageError(f"--only {options.only}: the trials of this search are 0 to {method.trials - 1}")
    with blamed_on(f"--out {lock.path} cannot be written"):
        if options.only >= 0:
            opened: journal.Journal = join(lock, trial, options, space, settings)
        else:
            begin(lock, options, command, space, objective)
            opened = journal.Journal.open(lock.path, settings, bool(options.resume), options.force)
    return Controller(method, options.seeds, settings["maximize"], opened, options.only if options.only >= 0 else None)


def begin(lock: Folder, options: SearchOptions, command: Command, space: Space, objective: str) -> None:
    """The folder of a search is this job's alone, and empty but where it goes on."""
    from hpcdl.runs.folder import check_run_folder
    from hpcdl.search.training_trial import TrialWork

    folder: Any = lock.path
    there = (folder / journal.NAME).exists()
    if there and not options.resume and not options.force:
        raise UsageError(
            f"--out {folder} holds another search; give another folder, --force to replace it, or --resume "
            f"{folder} to go on with it"
        )
    if not there:
        check_run_folder(folder, options.force or bool(options.resume))
    folder.mkdir(parents=True, exist_ok=True)
    lock.claim()
    if not options.resume:
        TrialWork(command, folder, space, objective).remove()
        for name in (journal.NAME, *WRITTEN):
            (folder / name).unlink(missing_ok=True)
        write_options(folder, options, space)


def join(
    lock: Folder, trial: Folder, options: SearchOptions, space: Space, settings: dict[str, Any]
) -> journal.SharedJournal:
    """The folder is shared with jobs that do other trials of the search; whoever comes first begins it."""
    from hpcdl.runs.folder import check_run_folder

    folder: Any = lock.path
    folder.mkdir(parents=True, exist_ok=True)
    lock.claim(together=True)
    trial.path = folder / "trials" / f"{options.only:04d}"
    trial.path.mkdir(parents=True, exist_ok=True)
    trial.claim()  # before the journal is read: what that says of the trial stays so

    def first() -> None:
        check_run_folder(folder, False)
        write_options(folder, options, space)

    return journal.SharedJournal.join(folder, settings, first)


def settings_of(options: SearchOptions, command: Command, space: Space, objective: str, most: float) -> dict[str, Any]:
    """What makes a search another one, as the journal's first line has it."""
    from hpcdl.search.checks import larger_is_better

    given = {name: getattr(options, name) for name in ("method", "trials", "seeds", "seed", "least", "eta", "points")}
    about = {"program": command.text, "space": space.described(), "ranks_per_trial": command.ranks}
    return about | given | {"most": most, "objective": objective, "maximize": larger_is_better(objective)}


def write_options(folder: Path, options: SearchOptions, space: Space) -> None:
    """config.yaml, from which --resume knows what was asked for."""
    from hpcdl.runs.folder import environment

    chosen = {name: getattr(options, name) for name in kinds_of(SearchOptions) if name not in AGAIN}
    chosen |= {"space": "\n".join(space.described())}
    header = "".join(f"# {name}: {line(value)}\n" for name, value in environment().items())
    with atomic_write(folder / "config.yaml") as file:
        file.write((header + yaml.safe_dump(chosen, sort_keys=False)).encode())


# -- the trials ------------------------------------------------------------------------------------------------------


def search(world, options, division, command, space, objective, folder, controller, said) -> int:
    """All that is to be done, on all ranks; returns the exit status."""
    from hpcdl.launch.isolated_run import all_come
    from hpcdl.search import groups
    from hpcdl.search.stop_broadcast import LATE, StopBroadcast
    from hpcdl.search.training_trial import TrialWork

    heirs = options.method.partition(":")[0] == "pbt"
    name = world.bcast(uuid.uuid4().hex)
    work = TrialWork(command, folder, space, objective, options.seed, heirs, options.trial_limit, name)
    view = View(options.progress, folder, controller.journal.events) if controller is not None else None
    if view is not None:
        if division.left or division.first:
            view.say(str(division))
        view.say(said)
        view.start()
    alarm = StopBroadcast(world, options.time_limit)
    try:
        watch = view.watch if view is not None else lambda event: None
        own = options.controller == "own"
        stopped = groups.run(world, command.ranks, work, controller, own, alarm.poll, watch)
    finally:
        if view is not None:
            view.close()
    alarm.close()
    status = 0
    if controller is not None:
        status = conclude(view, controller, folder, stopped, alarm.reason == LATE)
    all_come(world)
    return world.bcast(status)


def conclude(view: View, controller: Controller, folder: Path, stopped: bool, late: bool) -> int:
    """Write the tables and say what came out (rank 0); returns the exit status."""
    from hpcdl.launch.isolated_run import say_all_failed

    with controller.journal.locked():
        view.trials = read_trials(folder)  # also what other jobs have ended meanwhile
        best = write_tables(folder, view.trials)
    if stopped:
        why = "its time is over" if late else "stopped by a signal"
        how = f"--resume {folder}" if controller.only is None else f"the same --only {controller.only}"
        view.say(f"{why}; go on with {how}")
        return signals.STATUS
    view.end()
    rows, failed = view.trials.rows(), best is None
    if controller.only is not None:
        own = controller.outcomes.get((controller.only, 0))
        rows, failed = [row for row in rows if row.trial == controller.only], own is None or own.score is None
    if failed:
        say_all_failed(row.failed for row in rows)
    return int(failed)


main = Program("search", SearchOptions, __doc__, run)


if __name__ == "__main__":
    main()
