"""Train several models side by side, which predict together:
mpiexec -n 4 hpcdl train-ensemble --members 8 --bagging --data digits --out ensemble

    hpcdl train-ensemble train-gossip --topology ring --members 4 --ranks-per-member 2 --lr 0.1 --out ensemble
                         ----------------------------                                  --------
                         the training of each member: a program (default: train-allreduce) and its options

Each member is a run in a folder of its own, ensemble/members/0000/, on a group of ranks: member m on group m mod G.
Members differ by their seed and, on request, by rows drawn with replacement (--bagging), by the part of the rows that
they leave out (--folds 5, cross-validation), a fraction of the features
(--subspace 0.5), options that take turns (--vary "model=mlp:64|mlp:256", which may be given several times), or the
options of the best trials of a search (--from search/ --best 8). --snapshots 5 takes members from one run, at the end
of each of 5 cycles of its rate. --boost samme trains one member after another, on all ranks, each mostly on rows that
the members before predict wrongly.

`hpcdl evaluate ensemble/` scores members and ensemble; `hpcdl predict ensemble/ rows.csv --out p.csv` predicts. After a
stop or a crash, --resume FOLDER trains the missing members. A member that fails is left out."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from hpcdl.checkpoint.export import write_json
from hpcdl.errors import AgreedExit, UsageError, blamed_on, printable
from hpcdl.formatting import counted, dashed
from hpcdl.launch.command_lines import read_commands
from hpcdl.launch.nested_command_line import divided
from hpcdl.launch.option_parser import parse, parse_command_line, read_file
from hpcdl.launch.start import Program
from hpcdl.machine.world import check_world
from hpcdl.plugins import is_plugin, names_in, refuse_untrusted
from hpcdl.runs import signals
from hpcdl.runs.options import Options, kinds_of, not_negative, option, positive

if TYPE_CHECKING:
    from hpcdl.runs.folder import Folder
    from hpcdl.search.ensemble import EnsembleMember
    from hpcdl.search.ensemble_members import MemberSpec

PROGRAM = "train-allreduce"
SEVERAL = ("vary", "from", "resume")  # options read by `divided`, not by the parser
AGAIN = {"progress", "retry", "time_limit"}  # options that --resume allows
OUT_OF_FOLD = "out_of_fold.csv"  # with --folds: a prediction of each training row
ALIKE = {"data", "validation", "seed", "out", "resume", "force", "dtype", "config"}  # options equal for all members


@dataclass
class EnsembleOptions:
    """Options of train-ensemble: how members differ, and how they are combined. Raises UsageError."""

    members: int = option(0, "number of members; default: 8, or the number of --best or --snapshots")
    ranks_per_member: int = option(1, "ranks that train a member together; ranks left over are idle")
    bagging: bool = option(False, "train each on n of n rows, drawn with replacement, and score it on rows not drawn")
    folds: int = option(
        0, "cross-validation: members leave out one each of so many parts of the rows, and are scored on it"
    )
    subspace: float = option(1.0, "fraction of the features that a member sees; other features are 0")
    best: int = option(0, "with --from SEARCH: members have the options of so many of its best trials")
    vary: str = option("", "options that members take in turns, as 'model=mlp:64|mlp:256'; may be given several times")
    snapshots: int = option(0, "members are the ends of so many cycles of the learning rate of one run, on all ranks")
    boost: Literal["none", "samme"] = option("none", "samme: members one after another, on all ranks, on weighted rows")
    combine: Literal["mean", "vote", "stacking"] = option(
        "mean", "mean of the probabilities, votes, or stacking: weights fitted on the rows of --validation"
    )
    seed: int = option(0, "seed of the draws; member m trains with this seed plus m")
    out: str = option("auto", "folder of the ensemble; auto: runs/ensemble-TIME")
    resume: str = option("", "folder of an ensemble to continue")
    retry: bool = option(False, "with --resume: train members again that failed")
    force: bool = option(False, "replace what another ensemble has left in --out; other files there stay")
    time_limit: float = option(0.0, "seconds after which all stop in good order, for --resume; 0: none")
    progress: Literal["auto", "lines", "none"] = option("auto", "none: print nothing but errors")

    def __post_init__(self):
        not_negative(self, "members", "best", "snapshots", "seed", "time_limit")
        positive(self, "ranks_per_member")
        if self.folds and (self.folds < 2 or self.members not in (0, self.folds)):
            raise UsageError(
                f"--folds {self.folds}: give 2 folds or more, and no --members: there is one for each fold"
            )
        if not 0 < self.subspace <= 1:
            raise UsageError(f"--subspace is a fraction, more than 0 and at most 1, not {self.subspace}")
        ways = [f"--{name}" for name in ("snapshots", "best") if getattr(self, name)]
        ways += ["--boost"] * (self.boost != "none") + ["--folds"] * (self.folds > 0)
        if len(ways) > 1:
            raise UsageError(f"{' and '.join(ways)} cannot be combined: give one of them")
        if ways in (["--snapshots"], ["--boost"]) and (self.ranks_per_member > 1 or self.bagging):
            other = "--bagging" if self.bagging else "--ranks-per-member"
            raise UsageError(f"{ways[0]} decides about rows and ranks itself: leave out {other}")
        if self.folds and (self.bagging or self.vary):
            raise UsageError(
                f"--folds says which rows a member has: leave out --{'bagging' if self.bagging else 'vary'}"
            )
        if self.boost != "none" and self.combine != "mean":
            raise UsageError("--boost samme combines its members by weighted votes: leave out --combine")
        if self.boost != "none":
            self.combine = "vote"


class EnsemblePlan(NamedTuple):
    """What to train. asked: content of ensemble.yaml. validation: part of rows held out. told: options of each line."""

    options: EnsembleOptions
    asked: dict[str, Any]
    specs: list[MemberSpec]
    validation: float
    told: list[Options]


def run(world, arguments):
    from hpcdl.data import row_cache
    from hpcdl.launch.isolated_run import all_come, job_folder
    from hpcdl.launch.launch_consistency import reading, refuse_unlike
    from hpcdl.machine.doctor import warn
    from hpcdl.search.checks import open_all_data

    check_world(world)
    with reading(world, parse_command_line) as read:
        plan = planned(read, [*arguments], world.size)
    refuse_unlike(world, {name: repr(value) for name, value in plan.asked.items()})
    out = plan.options.resume or plan.options.out
    with job_folder(world, "ensemble", out, lambda lock: prepare(lock, plan)) as (folder, _):
        data = open_all_data(world, [each for each in plan.told if not is_plugin(each.data)])  # once for all members
        for each in data.values():
            each.close()
        warn(world, quiet=plan.options.progress == "none")
        status = trained(world, plan, folder)
        row_cache.clear()
        all_come(world)
    raise AgreedExit(world.bcast(status))


def planned(read, words: list[str], size: int) -> EnsemblePlan:
    """Return the plan of the command line or, with --resume, of the folder. Raises UsageError."""
    from hpcdl.search.ensemble import CONFIG_FILE
    from hpcdl.search.ensemble_members import plugin_names

    kinds = kinds_of(EnsembleOptions)
    told, text, several = divided(words, kinds, SEVERAL)
    command_line = read(EnsembleOptions, "train-ensemble", __doc__, told)
    resume = several.pop("resume")[-1:]
    given = {word[2:].partition("=")[0].replace("-", "_") for word in told if word.startswith("--")} - {"trust"}
    if resume:
        folder = f"--resume {resume[0]}"
        where = Path(resume[0]) / CONFIG_FILE
        if other := [*sorted(given - AGAIN), *(name for name in several if several[name]), *([text] if text else [])]:
            raise UsageError(f"{folder}: an ensemble keeps its members and options; leave out {other[0]!r}")
        if not where.is_file():
            raise UsageError(f"{folder}: there is no ensemble in that folder ({CONFIG_FILE} is missing)")
        kept: Any = read_file(where, f"{folder}: {CONFIG_FILE}")
        named = plugin_names([str(kept.get("training", ""))], kept.get("vary", []))
        refuse_untrusted(named, str(where), command_line.trust)
        text, several = str(kept.pop("training", "")), {name: [*kept.pop(name, [])] for name in several}
        own = [f"--{dashed(name)}={value}" for name, value in kept.items() if name in kinds and value != "false"]
        own = [each.removesuffix("=true") for each in own]
        command_line = read(EnsembleOptions, "train-ensemble", __doc__, [*own, *told])
        command_line.options.resume = resume[0]
    return plan_of(command_line.options, text, several, size, command_line.trust)


def plan_of(
    options: EnsembleOptions, text: str, several: dict[str, list[str]], size: int, trust: tuple[str, ...] = ()
) -> EnsemblePlan:
    """Return the plan of an ensemble. text: the training's line. several: repeatable options. Raises UsageError."""
    from hpcdl.data.resampling import Draw
    from hpcdl.search import ensemble_members as training

    if len(several["from"]) > 1 or bool(several["from"]) != bool(options.best):
        raise UsageError("--from SEARCH and --best N belong together: they take the options of its N best trials")
    if several["from"] and (options.snapshots or options.boost != "none" or several["vary"]):
        raise UsageError("--from SEARCH says how members differ: leave out --vary, --snapshots and --boost")
    turns: list[dict[str, str]] = training.variations(several["vary"])
    program = PROGRAM
    if several["from"]:
        program, turns = training.best_of_search(several["from"][0], options.best, trust)
    if fixed := sorted(ALIKE & {name.replace("-", "_") for each in turns for name in each}):
        raise UsageError(f"--vary {fixed[0]}: this option is the same for all members")
    if options.snapshots and (several["vary"] or "--schedule" in text or options.members):
        raise UsageError("--snapshots N is one run with its own schedule: leave out --vary, --schedule and --members")
    together = options.snapshots or options.boost != "none"
    ranks = size if together else options.ranks_per_member
    if ranks > size:
        raise UsageError(f"--ranks-per-member {ranks}: there are {counted(size, 'rank')}")
    text = text if text and not text.startswith("-") else f"{program} {text}".strip()
    schedule = f" --schedule=cosine:cycles={options.snapshots}" if options.snapshots else ""
    lines = [training.with_options(text + schedule, turn) for turn in turns]
    distinct = [*dict.fromkeys(lines)]
    commands = dict(zip(distinct, read_commands(distinct, {}, ranks, trust), strict=True))
    for each in commands.values():
        if each.ranks != ranks:
            works = f"{each.text} runs on {counted(each.ranks, 'rank')}"
            raise UsageError(f"{works}: give --ranks-per-member {each.ranks}")
    about = [each.options(parse, "--seed=0", "--out=auto") for each in commands.values()]
    validation = about[0].validation
    if options.combine == "stacking" and not validation:
        raise UsageError("--combine stacking is fitted on rows held out of training: add --validation FRACTION")
    if options.combine != "mean" and training.has_values(about[0].data):
        told = "--boost samme" if options.boost != "none" else f"--combine {options.combine}"
        raise UsageError(f"{told} is for classes, and {about[0].data} has values to predict: leave the option out")
    if any(each.data_servers for each in about):
        raise UsageError("--data-servers: an ensemble draws rows and features on the ranks that train; leave it out")
    draws = options.bagging or options.folds or options.boost != "none"
    if draws and any(each.placement != "shared" for each in about):
        raise UsageError("--bagging, --folds and --boost choose rows, which needs --placement shared")
    count = 1 if options.snapshots else options.folds or options.members or options.best or 8
    asked = dataclasses.asdict(options) | {"training": text} | several
    for name in ("out", "resume", "force", *AGAIN):
        asked.pop(name)
    if options.boost != "none":
        asked["combine"] = "mean"
    for key in ("data", "model"):  # names of code that the checkpoints hold, too
        trust = (*trust, *(name for each in about for name in names_in(key, getattr(each, key))))
    specs = []
    for number in range(count):
        draw = Draw(options.seed, number, options.bagging, None, options.subspace, options.folds)
        way, fold = number % len(lines), {"fold": number} if options.folds else {}
        differs = {"seed": options.seed + number} | fold | turns[way]
        said = " ".join(f"{name}={value}" for name, value in differs.items())
        specs.append(training.MemberSpec(number, commands[lines[way]], said, draw, trust))
    return EnsemblePlan(options, asked, specs, validation, about)


def prepare(lock: Folder, plan: EnsemblePlan) -> None:
    """Make the ensemble's folder, or continue in it (rank 0). Raises UsageError."""
    from hpcdl.launch.isolated_run import FAILED, refuse_taken
    from hpcdl.runs.folder import remove_leftovers, remove_run, write_config
    from hpcdl.search.ensemble import CONFIG_FILE, MEMBER, MEMBERS, SUMMARY_FILE
    from hpcdl.search.ensemble_members import WEIGHTS

    folder: Any = lock.path
    options = plan.options
    with blamed_on(f"--out {folder} cannot be written"):
        if any((folder / name).exists() for name in (CONFIG_FILE, SUMMARY_FILE, "config.yaml", MEMBERS)):
            refuse_taken(folder, "ensemble, or a run", options)
        folder.mkdir(parents=True, exist_ok=True)
        lock.claim()
        for path in folder.glob(f"{MEMBERS}/[0-9]*"):
            remove_leftovers(path)  # also of a member that is not trained again
            if options.force and not options.resume:
                remove_run(path)
                for name in (FAILED, MEMBER, WEIGHTS, "started.json"):
                    (path / name).unlink(missing_ok=True)
        if options.force and not options.resume:
            for name in (SUMMARY_FILE, OUT_OF_FOLD):
                (folder / name).unlink(missing_ok=True)
        if options.retry:
            for path in folder.glob(f"{MEMBERS}/[0-9]*/{FAILED}"):
                path.unlink()
        write_config(folder / CONFIG_FILE, plan.asked)


def trained(world, plan: EnsemblePlan, folder: Path) -> int:
    """Train, combine and score the members; return the exit status. Collective."""
    from hpcdl.search import ensemble_members as training
    from hpcdl.search.stop_broadcast import LATE, StopBroadcast

    options, begun = plan.options, time.perf_counter()
    alarm, silent = StopBroadcast(world, options.time_limit), options.progress == "none"
    alphas: dict[int, float] = {}

    def told(spec: MemberSpec, end: Any) -> None:
        if not silent:
            said = f"member {spec.number}  {spec.differs}: {training.outcome_text(folder, spec, end)}"
            said = printable(said, allowed="")
            sys.stdout.write(f"{said}\n")  # in one call, as other groups print, too
            sys.stdout.flush()

    if options.snapshots:
        stopped = False
        done = world.rank == 0 and training.has_ended(training.member_folder(folder, 0))
        if not world.bcast(done):
            end = training.train_one(world, plan.specs[0], folder, options.snapshots)
            stopped = end.stopped in training.UNFINISHED
    elif options.boost != "none":
        stopped, alphas = training.train_boosted(world, plan.specs, folder, plan.validation, alarm.poll, told)
    else:
        ranks = options.ranks_per_member
        groups, left = divmod(world.size, ranks)
        idle = left + max(0, groups - len(plan.specs)) * ranks
        if idle and world.rank == 0 and not silent:
            working = f"{counted(len(plan.specs), 'member')} of {counted(ranks, 'rank')}"
            print(f"{counted(idle, 'rank')} of {world.size} idle: {working}", flush=True)
        stopped = training.train_in_groups(world, plan.specs, ranks, folder, alarm.poll, told)
    alarm.close()
    if stopped:
        if world.rank == 0:
            why = "the time limit is reached" if alarm.reason == LATE else "stopped by a signal"
            print(f"{why}; go on with --resume {folder}", flush=True)
        return signals.STATUS
    return conclude(world, plan, folder, alphas, time.perf_counter() - begun)


def conclude(world, plan: EnsemblePlan, folder: Path, alphas: dict[int, float], seconds: float) -> int:
    """Combine and score members, write the summary; return the exit status. alphas: members' weights. Collective."""
    from hpcdl.launch.isolated_run import say_all_failed
    from hpcdl.runs.folder import launch_line
    from hpcdl.search.ensemble import SUMMARY_FILE

    options = plan.options
    members, failed = world.bcast(there(plan, folder, alphas) if world.rank == 0 else None)
    rows = [each._asdict() | {"failed": None} for each in members] + failed
    found: dict[str, Any] = {"schema_version": 1, "command": launch_line(), "ranks": world.size, "seconds": seconds}
    found |= {"seed": options.seed, "combine": options.combine, "asked": plan.asked, "stacking": None}
    table = None
    if members:
        scores, of_members, stacking, table = scored(world, plan, folder, members)
        if stacking is not None:
            found["stacking"] = {"weights": stacking.weights.tolist(), "bias": stacking.bias.tolist()}
        found |= scores
        for row, one in zip(rows, of_members, strict=False):
            row["scores"] = one
    found["members"] = sorted(rows, key=lambda row: row["number"])
    if world.rank == 0:
        write_json(found, folder / SUMMARY_FILE)
        say(options, folder, found, table)
        if not members:
            say_all_failed(row["failed"] for row in failed)
    return int(not members)


def there(plan: EnsemblePlan, folder: Path, alphas: dict[int, float]) -> tuple[list[EnsembleMember], list[dict]]:
    """Return the members that can predict, and for each other member a row with the reason why it cannot."""
    from hpcdl.launch.isolated_run import failure
    from hpcdl.search.ensemble import MEMBERS, EnsembleMember
    from hpcdl.search.ensemble_members import has_ended, member_folder, snapshot_members

    found, failed = [], []
    for spec in plan.specs:
        path = member_folder(folder, spec.number)
        why = failure(path) or (None if has_ended(path) else "its folder has no summary, and no reason why")
        if why is None and plan.options.boost != "none" and spec.number not in alphas:
            why = "it is no better than chance, or comes after such a member"
        member = EnsembleMember(spec.number, f"{MEMBERS}/{path.name}", spec.differs)
        if why is not None:
            failed.append(member._asdict() | {"failed": why})
        elif plan.options.snapshots:
            found += snapshot_members(folder, spec, plan.options.snapshots)
        else:
            found.append(member._replace(weight=alphas.get(spec.number, 1.0)))
    return found, failed


def scored(world, plan: EnsemblePlan, folder: Path, members: list[EnsembleMember]) -> tuple[dict, list, Any, Any]:
    """Return the scores of the ensemble and of each member, the fit of stacking, and a table (rank 0). Collective."""
    from hpcdl.comm import Communicator, refuse_together
    from hpcdl.machine.threads import Threads
    from hpcdl.search import ensemble_scores
    from hpcdl.search.ensemble import Ensemble
    from hpcdl.search.ensemble_members import held_out_of, out_of_bag_masks

    options = plan.options
    whole = Ensemble(folder, members, options.combine, options.seed, trust=plan.specs[0].trust)
    comm, found, of_members = Communicator(world, "tree"), {}, []
    with refuse_together(world):
        whole.open(world.rank, world.size)
        if options.combine != "mean" and not whole.reference.classes:
            raise UsageError(f"--combine {options.combine} is for classes, and the data has values: leave it out")
    source, classes = whole.reference.source, whole.reference.classes
    with Threads(world):
        named = "out_of_fold" if options.folds else "out_of_bag" if options.bagging else ""
        y = whole.labels(world, source) if named or options.combine == "stacking" else np.zeros(0)
        apart = len(y) and plan.validation
        held_out = held_out_of(y, classes, options.seed, plan.validation) if apart else y[:0].astype(int)
        if options.combine == "stacking":
            whole.stack(comm, source, held_out)
        if named:
            masks = out_of_bag_masks(whole, {each.number: each for each in plan.specs}, held_out, y, classes)
            file = str(folder / OUT_OF_FOLD) if options.folds else ""
            found[named] = whole.out_of_bag(comm, source, masks, file)
        table = None
        if whole.has_test_part(world, source):
            with refuse_together(world):
                rows = whole.rows(source, "test", world.size)
            counts = ensemble_scores.predict_all(world, whole, rows)
            report = ensemble_scores.evaluation_of(whole, next(iter(rows.values())), "test", counts)
            found["scores"], of_members = report["scores"], [each["scores"] for each in report["members"]]
            found |= {name: report[name] for name in ("disagreement", "spread") if name in report}
            table = ensemble_scores.table(report)
    comm.free()
    return found, of_members, whole.stacking, table


def say(options: EnsembleOptions, folder: Path, found: dict[str, Any], table: Any) -> None:
    """Print the results (rank 0)."""
    console = Console(quiet=options.progress == "none", highlight=False)
    if table is not None:
        console.print(table)
    for each in found["members"]:
        if each["failed"] is not None:
            console.print(f"member {each['number']} is left out: {each['failed']}", markup=False, soft_wrap=True)
    for named in ("out_of_bag", "out_of_fold"):
        if scores := found.get(named):
            said = (described(name, scores) for name in scores if name not in ("rows", "members"))
            console.print(f"{named.replace('_', ' ')}: {', '.join(said)}", markup=False)
    if "disagreement" in found:
        console.print(f"disagreement {found['disagreement']:.4g}", markup=False)
    console.print(f"results: {folder}", markup=False, soft_wrap=True)


def described(name: str, scores: dict[str, Any]) -> str:
    """Return a score of all rows as a text, and its mean and standard deviation over the members' own rows."""
    values = [each[name] for each in scores["members"] if each]
    return f"{name} {scores[name]:.4g} (members {np.mean(values):.4g} +- {np.std(values):.2g})"


main = Program("train-ensemble", EnsembleOptions, __doc__, run)


if __name__ == "__main__":
    main()
