"""Train several models side by side, which predict together:
mpiexec -n 4 python scripts/train_ensemble.py --members 8 --bagging --data digits --out ensemble

    hpcdl train-ensemble train-gossip --topology ring --members 4 --ranks-per-member 2 --lr 0.1 --out ensemble
                         ----------------------------                                  --------
                         the training of each member: a program (train-allreduce) and all options that are not below

Each member is a run in a folder of its own, ensemble/members/0000/, on a group of ranks: member m on group m mod G.
Members differ by their seed, and by what is asked for: rows drawn with replacement (--bagging), a fraction of the
features (--subspace 0.5), options that take turns (--vary "model=mlp:64|mlp:256", which may be given several times), or
those of the best trials of a search (--from search/ --best 8). --snapshots 5 takes them from one run, at the end of
each of 5 cycles of its rate. --boost samme trains one after another, on all ranks, each on what those before take for
another class.

`hpcdl evaluate ensemble/` scores members and the whole; `hpcdl predict ensemble/ rows.csv --out p.csv` predicts.
Stopped or killed, --resume FOLDER does what is missing. A member that fails is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import yaml
from rich.console import Console

from hpcdl.checkpoint.export import write_json
from hpcdl.errors import AgreedExit, UsageError, blamed_on, line, printable
from hpcdl.files import atomic_write
from hpcdl.formatting import counted, dashed
from hpcdl.launch.command_lines import read_commands
from hpcdl.launch.nested_command_line import divided
from hpcdl.launch.option_parser import parse, parse_command_line, read_file
from hpcdl.launch.start import Program
from hpcdl.machine.world import check_world
from hpcdl.plugins import is_plugin, refuse_untrusted
from hpcdl.runs import signals
from hpcdl.runs.options import Options, kinds_of, option
from hpcdl.shared_memory import unlink_mpich_files

if TYPE_CHECKING:
    from hpcdl.runs.folder import Folder
    from hpcdl.search.ensemble import EnsembleMember
    from hpcdl.search.ensemble_members import MemberSpec

PROGRAM = "train-allreduce"
SEVERAL = ("vary", "from", "resume")  # read here, not by the parser
AGAIN = {"progress", "retry", "time_limit"}  # may be told where it goes on
ALIKE = {"data", "validation", "seed", "out", "resume", "force", "dtype", "config"}  # of all members


@dataclass
class EnsembleOptions:
    """How members differ, and how they are combined. Raises UsageError where a value makes no sense."""

    members: int = option(0, "how many; by default 8, or as many as --best or --snapshots says")
    ranks_per_member: int = option(1, "ranks that train a member together; what is left over does nothing")
    bagging: bool = option(False, "each on n rows drawn with replacement of n, and scored on those left out")
    subspace: float = option(1.0, "fraction of the features that each sees; the others are 0")
    best: int = option(0, "with --from SEARCH: of so many of its best trials the options")
    vary: str = option("", "options that members take in turns, as 'model=mlp:64|mlp:256'; may be given several times")
    snapshots: int = option(0, "members are the ends of so many cycles of the rate of one run, on all ranks")
    boost: Literal["none", "samme"] = option("none", "samme: one after another, on all ranks, by weighted rows")
    combine: Literal["mean", "vote", "stacking"] = option(
        "mean", "probabilities: their mean, votes, or by weights fitted on the rows of --validation"
    )
    seed: int = option(0, "of what is drawn; member m trains with the seed that is larger by m")
    out: str = option("auto", "folder that is written; auto: runs/ensemble-TIME")
    resume: str = option("", "folder of an ensemble to go on with")
    retry: bool = option(False, "with --resume: try again what has failed")
    force: bool = option(False, "replace what another ensemble has left in --out; other files there stay")
    time_limit: float = option(0.0, "seconds after which all end in good order, to be gone on with; 0: none")
    progress: Literal["auto", "lines", "none"] = option("auto", "none: print nothing but errors")

    def __post_init__(self):
        for name in ("members", "best", "snapshots", "seed", "time_limit"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} must not be negative, and is {getattr(self, name)}")
        if self.ranks_per_member < 1:
            raise UsageError(f"--ranks-per-member must be greater than 0, not {self.ranks_per_member}")
        if not 0 < self.subspace <= 1:
            raise UsageError(f"--subspace is a fraction, more than 0 and at most 1, not {self.subspace}")
        ways = [f"--{name}" for name in ("snapshots", "best") if getattr(self, name)]
        ways += ["--boost"] * (self.boost != "none")
        if len(ways) > 1:
            raise UsageError(f"{' and '.join(ways)}: members come from one of them")
        if ways in (["--snapshots"], ["--boost"]) and (self.ranks_per_member > 1 or self.bagging):
            other = "--bagging" if self.bagging else "--ranks-per-member"
            raise UsageError(f"{ways[0]} trains on all rows, or draws them itself, with all ranks: no {other}")
        if self.boost != "none" and self.combine != "mean":
            raise UsageError("--boost samme combines its members by weighted votes: no --combine")
        if self.boost != "none":
            self.combine = "vote"


class EnsemblePlan(NamedTuple):
    """What is to be trained. asked: as ensemble.yaml says it; told: the options of each line of a training."""

    options: EnsembleOptions
    asked: dict[str, Any]
    specs: list[MemberSpec]
    validation: float
    told: list[Options]


def run(arguments):
    from mpi4py import MPI

    from hpcdl.comm import refuse_together
    from hpcdl.data import row_cache
    from hpcdl.launch.isolated_run import all_come
    from hpcdl.launch.launch_consistency import reading, refuse_unlike
    from hpcdl.launch.program import ended
    from hpcdl.machine.doctor import warn
    from hpcdl.runs.folder import Folder, automatic
    from hpcdl.search.checks import open_all_data

    world = MPI.COMM_WORLD
    with ended("train-ensemble", world.rank):
        check_world(world)
        with reading(world, parse_command_line) as read:
            plan = planned(read, [*arguments], world.size)
        refuse_unlike(world, {name: repr(value) for name, value in plan.asked.items()})
        warn(world)
        lock, status = Folder(None, world.rank), None
        with contextlib.closing(lock):
            with refuse_together(world):
                if world.rank == 0:
                    told = plan.options.resume or plan.options.out
                    lock.path = automatic("ensemble") if told in ("", "auto") else Path(told)
                    prepare(lock, plan)
            unlink_mpich_files()  # all ranks have come so far
            data = open_all_data(
                world, [each for each in plan.told if not is_plugin(each.data)]
            )  # once for all members
            for each in data.values():
                each.close()
            status = trained(world, plan, world.bcast(lock.path))
            row_cache.clear()
            all_come(world)
        raise AgreedExit(world.bcast(status))


# -- what is trained -------------------------------------------------------------------------------------------------


def planned(read, words: list[str], size: int) -> EnsemblePlan:
    """What the command line, or with --resume the folder, asks for. Raises UsageError."""
    from hpcdl.search.ensemble import CONFIG_FILE
    from hpcdl.search.ensemble_members import plugin_names

    kinds = kinds_of(EnsembleOptions)
    found = divided(words, kinds, SEVERAL)
    command_line = read(EnsembleOptions, "train-ensemble", __doc__, found.own)
    text, several = found.line, found.several
    resume = several.pop("resume")[-1:]
    given = {word[2:].partition("=")[0].replace("-", "_") for word in found.own if word.startswith("--")} - {"trust"}
    if resume:
        told = f"--resume {resume[0]}"
        where = Path(resume[0]) / CONFIG_FILE
        if other := [*sorted(given - AGAIN), *(name for name in several if several[name]), *([text] if text else [])]:
            raise UsageError(f"{told}: with another {other[0]} it would be another ensemble")
        if not where.is_file():
            raise UsageError(f"{told}: there is no ensemble in that folder ({CONFIG_FILE} is missing)")
        kept: Any = read_file(where, f"{told}: {CONFIG_FILE}")
        named = plugin_names([str(kept.get("training", ""))], kept.get("vary", []))
        refuse_untrusted(named, str(where), command_line.trust)
        text, several = str(kept.pop("training", "")), {name: [*kept.pop(name, [])] for name in several}
        own = [f"--{dashed(name)}={value}" for name, value in kept.items() if name in kinds and value != "false"]
        own = [each.removesuffix("=true") for each in own]
        command_line = read(EnsembleOptions, "train-ensemble", __doc__, [*own, *found.own])
        command_line.options.resume = resume[0]
    return plan_of(command_line.options, text, several, size, command_line.trust)


def plan_of(
    options: EnsembleOptions, text: str, several: dict[str, list[str]], size: int, trust: tuple[str, ...] = ()
) -> EnsemblePlan:
    """The runs that are asked for. Raises UsageError where one could not start."""
    from hpcdl.search.ensemble_members import (
        best_of_search,
        has_values,
        member_spec,
        plugin_names_of_options,
        variations,
        with_options,
    )

    if len(several["from"]) > 1 or bool(several["from"]) != bool(options.best):
        raise UsageError("--from SEARCH and --best N belong together: the options of its N best trials")
    if several["from"] and (options.snapshots or options.boost != "none" or several["vary"]):
        raise UsageError("--from SEARCH says how members differ: no --vary, --snapshots or --boost")
    turns: list[dict[str, str]] = variations(several["vary"])
    program = PROGRAM
    if several["from"]:
        program, turns = best_of_search(several["from"][0], options.best, trust)
    if fixed := sorted(ALIKE & {name.replace("-", "_") for each in turns for name in each}):
        raise UsageError(f"--vary {fixed[0]}: it is the same for all members")
    if options.snapshots and (several["vary"] or "--schedule" in text or options.members):
        raise UsageError("--snapshots N is one run with a schedule of its own: no --vary, --schedule or --members")
    together = options.snapshots or options.boost != "none"
    ranks = size if together else options.ranks_per_member
    if ranks > size:
        raise UsageError(f"--ranks-per-member {ranks}: there are {counted(size, 'rank')}")
    text = text if text and not text.startswith("-") else f"{program} {text}".strip()
    schedule = f" --schedule=cosine:cycles={options.snapshots}" if options.snapshots else ""
    lines = [with_options(text + schedule, turn) for turn in turns]
    distinct = [*dict.fromkeys(lines)]
    commands = dict(zip(distinct, read_commands(distinct, {}, ranks, trust), strict=True))
    if other := [each for each in commands.values() if each.ranks != ranks]:
        raise UsageError(
            f"{other[0].text} works on {counted(other[0].ranks, 'rank')}: --ranks-per-member {other[0].ranks}"
        )
    about = [each.options(parse, "--seed=0", "--out=auto") for each in commands.values()]
    validation = about[0].validation
    if options.combine == "stacking" and not validation:
        raise UsageError("--combine stacking is fitted on rows that no member is trained on: add --validation FRACTION")
    if options.combine != "mean" and has_values(about[0].data):
        told = "--boost samme" if options.boost != "none" else f"--combine {options.combine}"
        raise UsageError(f"{told} is of classes; {about[0].data} has values to predict, of which the mean is taken")
    if any(each.data_servers for each in about):
        raise UsageError("--data-servers: rows and features are drawn in the memory of those who train; leave it out")
    if (options.bagging or options.boost != "none") and any(each.placement != "shared" for each in about):
        raise UsageError("rows are drawn again (bagging, boosting) with --placement shared only")
    count = 1 if options.snapshots else options.members or options.best or 8
    asked = dataclasses.asdict(options) | {"training": text} | several
    for name in ("out", "resume", "force", *AGAIN):
        asked.pop(name)
    if options.boost != "none":
        asked["combine"] = "mean"
    trust = (
        *trust,
        *(name for each in about for name in plugin_names_of_options(each)),
    )  # also for their checkpoints
    specs = [
        member_spec(options, number, commands[lines[number % len(lines)]], turns[number % len(turns)], trust)
        for number in range(count)
    ]
    return EnsemblePlan(options, asked, specs, validation, about)


def prepare(lock: Folder, plan: EnsemblePlan) -> None:
    """Make the folder of the ensemble, or go on with it (rank 0). Raises UsageError where it cannot be."""
    from hpcdl.launch.isolated_run import FAILED
    from hpcdl.runs.folder import environment, remove_leftovers, remove_run
    from hpcdl.search.ensemble import CONFIG_FILE, MEMBER, MEMBERS, SUMMARY_FILE
    from hpcdl.search.ensemble_members import WEIGHTS

    folder: Any = lock.path
    options = plan.options
    with blamed_on(f"--out {folder} cannot be written"):
        there = any((folder / name).exists() for name in (CONFIG_FILE, SUMMARY_FILE, "config.yaml", MEMBERS))
        if there and not options.resume and not options.force:
            raise UsageError(
                f"--out {folder} holds another ensemble, or a run; give another folder, --force to replace it, or "
                f"--resume {folder} to go on with it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        lock.claim()
        for path in folder.glob(f"{MEMBERS}/[0-9]*"):
            remove_leftovers(path)  # also of a member that is not trained again
        if options.force and not options.resume:
            for path in folder.glob(f"{MEMBERS}/[0-9]*"):
                remove_run(path)
                for name in (FAILED, MEMBER, WEIGHTS, "started.json"):
                    (path / name).unlink(missing_ok=True)
            (folder / SUMMARY_FILE).unlink(missing_ok=True)
        if options.retry:
            for path in folder.glob(f"{MEMBERS}/[0-9]*/{FAILED}"):
                path.unlink()
        header = "".join(f"# {name}: {line(value)}\n" for name, value in environment().items())
        with atomic_write(folder / CONFIG_FILE) as file:
            file.write((header + yaml.safe_dump(plan.asked, sort_keys=False)).encode())


# -- training and what comes out -------------------------------------------------------------------------------------


def trained(world, plan: EnsemblePlan, folder: Path) -> int:
    """Train, combine and score; the exit status. Collective."""
    from hpcdl.search.ensemble_members import (
        has_ended,
        member_folder,
        outcome_text,
        train_boosted,
        train_in_groups,
        train_one,
    )
    from hpcdl.search.stop_broadcast import LATE, StopBroadcast

    options, begun = plan.options, time.perf_counter()
    alarm, silent = StopBroadcast(world, options.time_limit), options.progress == "none"
    alphas: dict[int, float] = {}

    def told(spec: MemberSpec, end: Any) -> None:
        if not silent:
            said = printable(f"member {spec.number}  {spec.differs}: {outcome_text(folder, spec, end)}", allowed="")
            sys.stdout.write(f"{said}\n")  # at once: other groups print, too
            sys.stdout.flush()

    if options.snapshots:
        stopped = False
        if not world.bcast(has_ended(member_folder(folder, 0)) if world.rank == 0 else None):
            end = train_one(world, plan.specs[0], folder, options.seed, options.snapshots)
            stopped = end.stopped in ("signal", "time limit")
    elif options.boost != "none":
        stopped, brought = train_boosted(world, plan.specs, folder, options.seed, plan.validation, alarm.poll, told)
        alphas = {each.number: one.alpha for each, one in brought}
    else:
        left = world.size % options.ranks_per_member
        groups = world.size // options.ranks_per_member
        idle = left + max(0, groups - len(plan.specs)) * options.ranks_per_member
        if idle and world.rank == 0 and not silent:
            print(
                f"{counted(idle, 'rank')} of {world.size} do nothing: {counted(len(plan.specs), 'member')} of "
                f"{counted(options.ranks_per_member, 'rank')}",
                flush=True,
            )
        stopped = train_in_groups(world, plan.specs, options.ranks_per_member, folder, options.seed, alarm.poll, told)
    alarm.close()
    if stopped:
        if world.rank == 0:
            why = "its time is over" if alarm.reason == LATE else "stopped by a signal"
            print(f"{why}; go on with --resume {folder}", flush=True)
        return signals.STATUS
    return conclude(world, plan, folder, alphas, time.perf_counter() - begun)


def conclude(world, plan: EnsemblePlan, folder: Path, alphas: dict[int, float], seconds: float) -> int:
    """Combine the members that there are, score them, write the summary; the exit status. Collective."""
    from hpcdl.launch.isolated_run import say_all_failed
    from hpcdl.runs.folder import launch_line
    from hpcdl.search.ensemble import SUMMARY_FILE

    options = plan.options
    members, failed = world.bcast(there(plan, folder, alphas) if world.rank == 0 else None)
    rows = [each._asdict() | {"failed": None} for each in members] + failed
    found: dict[str, Any] = {
        "schema_version": 1,
        "command": launch_line(),
        "ranks": world.size,
        "seconds": seconds,
        "seed": options.seed,
        "combine": options.combine,
        "asked": plan.asked,
        "stacking": None,
    }
    table = None
    if members:
        scores, stacking, table = scored(world, plan, folder, members)
        if stacking is not None:
            found["stacking"] = {"weights": stacking.weights.tolist(), "bias": stacking.bias.tolist()}
        found |= scores
        for row, one in zip(rows, scores.pop("member_scores"), strict=False):
            row["scores"] = one
        found.pop("member_scores")
    found["members"] = sorted(rows, key=lambda row: row["number"])
    if world.rank == 0:
        write_json(found, folder / SUMMARY_FILE)
        say(options, folder, found, table)
        if not members:
            say_all_failed(row["failed"] for row in failed)
    return int(not members)


def there(
    plan: EnsemblePlan, folder: Path, alphas: dict[int, float]
) -> tuple[list[EnsembleMember], list[dict[str, Any]]]:
    """The members that can predict, and rows that say why others cannot."""
    from hpcdl.launch.isolated_run import failure
    from hpcdl.search.ensemble import MEMBERS, EnsembleMember
    from hpcdl.search.ensemble_members import has_ended, member_folder, snapshot_members

    found, failed = [], []
    for spec in plan.specs:
        path = member_folder(folder, spec.number)
        why = failure(path) or (None if has_ended(path) else "it has no summary, nor a word of why")
        if why is None and plan.options.boost != "none" and spec.number not in alphas:
            why = "no better than chance, or after one that is not"
        if why is not None:
            failed.append(
                EnsembleMember(spec.number, f"{MEMBERS}/{path.name}", spec.differs)._asdict() | {"failed": why}
            )
        elif plan.options.snapshots:
            found += snapshot_members(folder, spec, plan.options.snapshots)
        else:
            found.append(
                EnsembleMember(spec.number, f"{MEMBERS}/{path.name}", spec.differs, alphas.get(spec.number, 1.0))
            )
    return found, failed


def scored(world, plan: EnsemblePlan, folder: Path, members: list[EnsembleMember]) -> tuple[dict[str, Any], Any, Any]:
    """The scores of the whole and of each member, what stacking has fitted, and a table (rank 0). Collective."""
    from hpcdl.comm import Communicator, refuse_together
    from hpcdl.machine.threads import limited
    from hpcdl.search import ensemble_scores
    from hpcdl.search.ensemble import Ensemble
    from hpcdl.search.ensemble_members import held_out_of, out_of_bag_masks

    options = plan.options
    whole = Ensemble(folder, members, options.combine, options.seed, trust=plan.specs[0].trust)
    comm, found = Communicator(world, "tree"), {"member_scores": []}
    with refuse_together(world):
        whole.open(world.rank, world.size)
        if options.combine != "mean" and not whole.reference.classes:
            raise UsageError(f"--combine {options.combine} is of classes; of values the mean is taken")
    source, classes = whole.reference.source, whole.reference.classes
    with limited(world):
        y = whole.labels(world, source) if options.bagging or options.combine == "stacking" else np.zeros(0)
        held_out = (
            held_out_of(y, classes, options.seed, plan.validation) if len(y) and plan.validation else y[:0].astype(int)
        )
        if options.combine == "stacking":
            whole.stack(comm, source, held_out)
        if options.bagging:
            specs = {each.number: each for each in plan.specs}
            found["out_of_bag"] = whole.out_of_bag(comm, source, out_of_bag_masks(whole, specs, held_out, len(y)))
        table = None
        if whole.has_test_part(world, source):
            with refuse_together(world):
                rows = whole.rows(source, "test", world.size)
            counts = ensemble_scores.predict_all(world, whole, rows)
            report = ensemble_scores.evaluation_of(whole, next(iter(rows.values())).name, "test", counts)
            found["scores"], found["member_scores"] = report["scores"], [each["scores"] for each in report["members"]]
            found |= {name: report[name] for name in ("disagreement", "spread") if name in report}
            table = ensemble_scores.table(report)
    comm.free()
    return found, whole.stacking, table


def say(options: EnsembleOptions, folder: Path, found: dict[str, Any], table: Any) -> None:
    """Print what came out (rank 0)."""
    console = Console(quiet=options.progress == "none", highlight=False)
    if table is not None:
        console.print(table)
    for each in found["members"]:
        if each["failed"] is not None:
            console.print(f"member {each['number']} is left out: {each['failed']}", markup=False, soft_wrap=True)
    if found.get("out_of_bag"):
        said = ", ".join(f"{name} {value:.4g}" for name, value in found["out_of_bag"].items() if name != "rows")
        console.print(f"out of bag: {said}", markup=False)
    if "disagreement" in found:
        console.print(f"disagreement {found['disagreement']:.4g}", markup=False)
    console.print(f"all of it: {folder}", markup=False, soft_wrap=True)


main = Program("train-ensemble", EnsembleOptions, __doc__, run)


if __name__ == "__main__":
    main()
