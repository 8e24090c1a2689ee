"""Search for good options: many trainings in one job, on groups of its ranks:
mpiexec -n 4 hpcdl search train-allreduce --epochs 9 --space lr=log:0.001..0.5 --method asha --trials 27

The program that trains comes first, then its options and those of the search, in any order; an option that both have,
as train-gossip has --method, stands with the program in quotes: "train-gossip --method adpsgd".

The folder --out gets a folder for each trial with its run, the journal, trials.csv and best.yaml, which --config takes.
A trial that fails is a row with the reason; if all fail, the status is 1. After a stop or a crash, --resume FOLDER
continues."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcdl.errors import AgreedExit, UsageError, blamed_on
from hpcdl.faults.inject import LONGEST
from hpcdl.formatting import dashed
from hpcdl.launch.command_lines import Command
from hpcdl.launch.nested_command_line import divided
from hpcdl.launch.option_parser import LARGEST, CommandLine, parse, parse_command_line
from hpcdl.launch.start import Program
from hpcdl.machine.world import check_world
from hpcdl.metric_lines import larger_is_better
from hpcdl.plugins import names_in, refuse_untrusted
from hpcdl.runs import signals
from hpcdl.runs.options import kinds_of, not_negative, option, positive
from hpcdl.search import journal
from hpcdl.search.controller import Controller
from hpcdl.search.methods import make_method
from hpcdl.search.results import write_tables
from hpcdl.search.search_log_reader import read as read_trials
from hpcdl.search.space import Parameter, Space
from hpcdl.search.view import View

if TYPE_CHECKING:
    from hpcdl.runs.folder import Folder

AGAIN = ("out", "resume", "force", "space_file", "progress", "time_limit", "only")  # options of one start
WRITTEN = ("config.yaml", "trials.csv", "best.yaml")  # beside the journal, and a folder for each trial


@dataclass
class SearchOptions:
    line: list[str] = option(list, "the program that trains, and its options")
    space: str = option(
        "", "NAME=SPEC, again for each option: lr=log:0.001..0.5, batch-size=int:16..512, model=mlp:64|svm"
    )
    space_file: str = option("", "YAML file of the same, NAME: SPEC")
    method: str = option("random", "grid, random, random:sobol, asha, hyperband, pbt, tpe, optuna:SAMPLER")
    trials: int = option(0, "number of points to try; 0: all points of a grid, or one round of hyperband")
    ranks_per_trial: int = option(
        0, "ranks of a group, which trains one trial at a time; 0: as few as the program takes"
    )
    controller: Literal["shared", "own"] = option("shared", "own: rank 0 only hands out trials; shared: it trains, too")
    objective: str = option(
        "",
        "score by which trials are judged, as test_accuracy, validation_loss, validation_f1 or another of --scores; "
        "default: the accuracy or rmse on held-out rows",
    )
    seeds: int = option(1, "train each point with so many seeds, and judge by the mean")
    seed: int = option(0, "seed of the points, and of the first training of each")
    least: float = option(1.0, "asha, hyperband: epochs until trials are first judged; pbt: epochs between judgements")
    most: float = option(0.0, "epochs of a whole trial, instead of the program's --epochs")
    eta: int = option(3, "asha, hyperband: one of so many trials continues")
    points: int = option(5, "grid: number of points of a range")
    only: int = option(
        -1, "grid, random: train this trial alone, as one of many jobs that share --out; -1: all of them"
    )
    trial_limit: float = option(0.0, "seconds after which a trial is given up; 0: none")
    time_limit: float = option(0.0, "seconds after which the search stops in good order, for --resume; 0: none")
    out: str = option("auto", "folder that the search writes; auto: runs/search-TIME")
    force: bool = option(False, "replace what another search has left in --out")
    resume: str = option("", "folder of a search to continue")
    progress: Literal["auto", "bar", "lines", "none"] = option("auto", "how the search shows its progress")

    def __post_init__(self) -> None:
        for name in ("least", "most", "trial_limit", "time_limit"):
            if not 0 <= getattr(self, name) <= LONGEST:
                raise UsageError(f"--{dashed(name)} is 0 or more, at most {LONGEST:,.0f}, not {getattr(self, name)}")
        positive(self, "seeds", "points")
        not_negative(self, "trials", "ranks_per_trial", "seed")
        if self.only < -1:
            raise UsageError(f"--only is the number of a trial, 0 or more, not {self.only}")
        if self.only >= 0 and (self.force or self.resume or self.out in ("", "auto")):
            raise UsageError("--only: the jobs of a search share its folder: give --out, neither --force nor --resume")
        if self.out == "none":
            raise UsageError("--out none: a search reads the files of its trials; name a folder")


def run(world, arguments):
    from hpcdl.comm import refuse_together
    from hpcdl.data import row_cache
    from hpcdl.launch.isolated_run import job_folder
    from hpcdl.launch.launch_consistency import reading, refuse_unlike
    from hpcdl.machine.doctor import warn
    from hpcdl.runs.folder import Folder
    from hpcdl.search import checks, groups

    check_world(world)
    with reading(world, parse_command_line) as read:
        command_line = read(SearchOptions, "search", __doc__, words(arguments))
        options = command_line.options
        if options.only >= 0:  # other ranks would be idle
            options.ranks_per_trial = options.ranks_per_trial or world.size
        space = read_space(command_line)
        command = checks.read_training(" ".join(options.line), options.ranks_per_trial, world.size, command_line.trust)
        division = groups.divide_ranks(world.size, command.ranks, options.controller == "own")
        checks.refuse_names(space, command, options.method)
        command = checks.with_epochs(command, options.most)
        tried = checks.probes(space, command, parse)
        most = checks.epochs_of(command, options.method, tried[0].options)
    refuse_unlike(world, {"the training": command.text})
    data = checks.open_all_data(world, [each.options for each in tried])
    with refuse_together(world):
        objective, command, said = checks.objective_of(options.objective, command, tried, data)

    def begun(lock: Folder) -> Controller:
        checks.refuse_unmakeable(command, tried, data)
        return prepare(lock, trial, options, command, space, objective, most)

    out = Path(options.out) if options.resume else options.out
    with contextlib.closing(Folder(None, world.rank)) as trial, job_folder(world, "search", out, begun) as made:
        for each in data.values():
            each.close()
        warn(world, quiet=options.progress == "none")
        status = search(world, options, division, command, space, objective, *made, said)
        row_cache.clear()
    raise AgreedExit(status)


def words(arguments: list[str]) -> list[str]:
    """Return arguments for the search's parser, in which the training's line is one word, and all --space are one."""
    kinds = {name: kind for name, kind in kinds_of(SearchOptions).items() if name not in ("line", "space")}
    own, line, several = divided(arguments, kinds, ("space",))
    space = "\n".join(several["space"])
    return [*own, *([f"--space={space}"] if space else []), *([line] if line else [])]


def read_space(command_line: CommandLine) -> Space:
    """Return the search space: the parameters of --space-file, then those of --space. Raises UsageError."""
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
    """Return the parameters of a space read from `file`; UsageError if the space names code that is not trusted."""
    texts = [(each.name, text) for each in space.parameters for text in each.choices]
    refuse_untrusted([(option, name) for option, text in texts for name in names_in(option, text)], file, trust)
    return space.parameters


def prepare(
    lock: Folder, trial: Folder, options: SearchOptions, command: Command, space: Space, objective: str, most: float
) -> Controller:
    """Make the search's folder, or continue in it; return the controller (rank 0). Raises UsageError.
    lock: claims the folder. trial: with --only, claims the folder of the trial."""
    from hpcdl.launch.isolated_run import refuse_taken
    from hpcdl.runs.folder import check_run_folder
    from hpcdl.search.training_trial import TrialWork

    settings = settings_of(options, command, space, objective, most)
    how = {name: settings[name] for name in ("least", "most", "eta", "points")}
    method: Any = make_method(options.method, space, options.trials, options.seed, **how)
    if options.only >= 0 and not method.planned:
        raise UsageError(f"--only: trials of --method {options.method} depend on each other; take grid or random")
    if options.only >= 0 and options.only >= method.trials:
        raise UsageError(f"--only {options.only}: the trials of this search are 0 to {method.trials - 1}")
    folder: Any = lock.path
    with blamed_on(f"--out {folder} cannot be written"):
        if options.only < 0:  # the folder is this job's alone, and empty unless --resume
            if (folder / journal.NAME).exists():
                refuse_taken(folder, "search", options)
            else:
                check_run_folder(folder, options.force or bool(options.resume))
            folder.mkdir(parents=True, exist_ok=True)
            lock.claim()
            if not options.resume:
                TrialWork(command, folder, space, objective).remove()
                for name in (journal.NAME, *WRITTEN):
                    (folder / name).unlink(missing_ok=True)
                write_options(folder, options, space)
            opened = journal.Journal.open(folder, settings, bool(options.resume), options.force)
            return Controller(method, options.seeds, settings["maximize"], opened)

        def first() -> None:
            check_run_folder(folder, False)
            write_options(folder, options, space)

        # The folder is shared with jobs that run other trials of the search; the first job begins the search.
        trial.path = folder / "trials" / f"{options.only:04d}"
        for each, together in ((lock, True), (trial, False)):
            each.path.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
            each.claim(together)  # before the journal is read, so that no other job changes the trial
        shared = journal.SharedJournal.join(folder, settings, first)
    return Controller(method, options.seeds, settings["maximize"], shared, options.only)


def settings_of(options: SearchOptions, command: Command, space: Space, objective: str, most: float) -> dict[str, Any]:
    """Return the settings that identify a search, for the first line of the journal."""
    given = {name: getattr(options, name) for name in ("method", "trials", "seeds", "seed", "least", "eta", "points")}
    about = {"program": command.text, "space": space.described(), "ranks_per_trial": command.ranks}
    return about | given | {"most": most, "objective": objective, "maximize": larger_is_better(objective)}


def write_options(folder: Path, options: SearchOptions, space: Space) -> None:
    """Write config.yaml, from which --resume reads the options."""
    from hpcdl.runs.folder import write_config

    chosen = {name: getattr(options, name) for name in kinds_of(SearchOptions) if name not in AGAIN}
    chosen |= {"space": "\n".join(space.described())}
    write_config(folder / "config.yaml", chosen)


def search(world, options, division, command, space, objective, folder, controller, said) -> int:
    """Run all trials, on all ranks; return the exit status."""
    from hpcdl.launch.isolated_run import all_come
    from hpcdl.search import groups
    from hpcdl.search.stop_broadcast import LATE, StopBroadcast
    from hpcdl.search.training_trial import TrialWork

    heirs = options.method.partition(":")[0] == "pbt"
    name = world.bcast(uuid.uuid4().hex)
    work = TrialWork(command, folder, space, objective, options.seed, heirs, options.trial_limit, name)
    view = View(options.progress if controller else "none", folder, controller.journal.events if controller else ())
    if division.left or division.first:
        view.say(str(division))
    view.say(said)
    view.start()
    alarm = StopBroadcast(world, options.time_limit)
    try:
        own = options.controller == "own"
        stopped = groups.run(world, command.ranks, work, controller, own, alarm.poll, view.watch)
    finally:
        view.close()
    alarm.close()
    status = 0
    if controller is not None:
        status = conclude(view, controller, folder, stopped, alarm.reason == LATE)
    all_come(world)
    return world.bcast(status)


def conclude(view: View, controller: Controller, folder: Path, stopped: bool, late: bool) -> int:
    """Write the tables and print the results (rank 0); return the exit status."""
    from hpcdl.launch.isolated_run import say_all_failed

    with controller.journal.locked():
        view.trials = read_trials(folder)  # also trials that other jobs have ended meanwhile
        best = write_tables(folder, view.trials)
    if stopped:
        why = "the time limit is reached" if late else "stopped by a signal"
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
