"""Compare strategies on the same data, over several seeds:
mpiexec -n 4 python scripts/compare.py --seeds 5 --out compare "train-allreduce" "train-gossip --topology ring"

A line is a program that trains, with its options; `-n 2: train-pipeline` takes 2 of the ranks. Options that stand
beside the lines are common to all; a line's own win. Each line is run with each seed, in turns: all lines with the
first seed, then all with the next one, beginning with another line.

Writes the runs' folders, table.csv, table.md, results.json and report.html (`hpcdl report`). A line that fails is a row
that says why; where all do, the status is 1. Stopped or killed, --resume FOLDER does what is missing.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console

from hpcdl.checkpoint.export import output_file, write_json
from hpcdl.errors import AgreedError, AgreedExit, UsageError, blamed_on, line, printable
from hpcdl.files import atomic_write
from hpcdl.formatting import counted, dashed
from hpcdl.launch.command_lines import DECIDED, Command, read_commands
from hpcdl.launch.option_parser import CommandLine, parse_command_line
from hpcdl.launch.start import Program
from hpcdl.machine.world import check_world
from hpcdl.reports import comparison
from hpcdl.reports.comparison import Line, run_folder
from hpcdl.reports.measures import BY_NAME, read_target, shown
from hpcdl.reports.report import make
from hpcdl.runs import signals
from hpcdl.runs.options import COMMON, Options, kinds_of, option
from hpcdl.shared_memory import unlink_mpich_files

if TYPE_CHECKING:
    from hpcdl.launch.isolated_run import Outcome
    from hpcdl.runs.folder import Folder

AGAIN = {"resume", "seeds", "target", "columns", "at_once", "retry", "progress"}  # may be told where it goes on
MOST_SEEDS = 10_000
WRITTEN = ("config.yaml", "results.json", "summary.json", "table.csv", "table.md")  # what another has left here
RUNS = "[0-9]*-train-*/seed-*"


@dataclass(frozen=True)
class CompareOptions(Options):
    lines: list[str] = option(list, "programs with their options, each in quotes; -n RANKS: before one takes so many")
    seeds: str = option("3", "how many seeds (3: 0, 1 and 2), or which, with commas between (7,8,9)")
    target: str = option("", "tell what it takes to reach accuracy=0.95, loss=0.3, rmse=2 or return=475 in evaluations")
    at_once: bool = option(False, "lines that take fewer ranks run beside each other, where there is room")
    columns: str = option("", "of the tables, with commas between, as test_loss,seconds (results.json names all)")
    retry: bool = option(False, "with --resume: try again what has failed")

    def __post_init__(self):
        super().__post_init__()
        _ = self.chosen, self.goal
        numbers = self.seeds.split(",")
        if not all(each.isdecimal() for each in numbers) or numbers == ["0"]:
            raise UsageError(f"--seeds: how many, or which with commas between, not {self.seeds!r}")
        if len(numbers) == 1 and (len(self.seeds) > 6 or int(self.seeds) > MOST_SEEDS):
            raise UsageError(f"--seeds {self.seeds}: so many are not run; at most {MOST_SEEDS:,}")
        if too_large := [each for each in numbers if len(each) > 19 or int(each) >= 2**63]:
            raise UsageError(f"--seeds: a seed is a whole number of 64 bits, not {too_large[0]}")
        if twice := {each for each in self.seed_list if self.seed_list.count(each) > 1}:
            raise UsageError(f"--seeds: {min(twice)} is given twice; each seed counts once")

    @property
    def chosen(self) -> list[str]:
        """Columns of the tables."""
        return comparison.chosen(self.columns)

    @property
    def goal(self):
        """The score that --target names."""
        return read_target(self.target)

    @property
    def seed_list(self) -> list[int]:
        """The seeds of --seeds."""
        numbers = self.seeds.split(",")
        return [*map(int, numbers)] if len(numbers) > 1 else [*range(int(numbers[0]))]


def run(arguments):
    from mpi4py import MPI

    from hpcdl.comm import refuse_together
    from hpcdl.launch.isolated_run import all_come
    from hpcdl.launch.launch_consistency import reading
    from hpcdl.launch.program import ended
    from hpcdl.machine.doctor import warn
    from hpcdl.runs.folder import Folder, automatic

    world = MPI.COMM_WORLD
    with ended("compare", world.rank):
        check_world(world)
        with reading(world, parse_command_line) as read:
            command_line = read(CompareOptions, "compare", __doc__, arguments)
            options, entries = command_line.options, read_lines(command_line, world.size)
        warn(world)
        lock, done, status = Folder(None, world.rank), None, 0
        with contextlib.closing(lock):
            with refuse_together(world):
                if world.rank == 0:
                    lock.path = automatic("compare") if options.out in ("", "auto") else Path(options.out)
                    done = prepare(lock, command_line, entries)
            unlink_mpich_files()  # all ranks have come so far
            folder, done = world.bcast((lock.path, done))
            known: dict = {}
            stopped = run_all(world, command_line, entries, folder, done, known)
            if world.rank == 0:
                status = conclude(command_line, entries, folder, stopped, known)
            all_come(world)
        raise AgreedExit(world.bcast(status))


# -- what is compared ------------------------------------------------------------------------------------------------


def read_lines(command_line: CommandLine, size: int) -> list[Command]:
    """The lines, each of which could start. Raises UsageError, which names all that could not."""
    options: CompareOptions = command_line.options
    if not options.lines:
        raise UsageError('there is nothing to compare: give lines, as "train-allreduce" "train-gossip --topology ring"')
    if "seed" in command_line.given:
        raise UsageError("--seed is of one run; give --seeds")
    if options.out == "none":
        raise UsageError("--out none: a comparison is made of what its runs have written; name a folder")
    names = [name for name in COMMON if name in command_line.given and name not in (*DECIDED, "progress")]
    given = {name: str(getattr(options, name)) for name in names if getattr(options, name) != ""}  # a file gives all
    return read_commands(options.lines, given, size, command_line.trust)


# -- its folder ------------------------------------------------------------------------------------------------------


def prepare(lock: Folder, command_line: CommandLine, entries: list[Command]) -> dict[tuple[int, int], str]:
    """Make the folder of the comparison, or go on with it (rank 0). Returns what is done: "", or why it has failed.

    Raises UsageError where it cannot be.
    """
    from hpcdl.launch.isolated_run import forget
    from hpcdl.runs.folder import environment, remove_run

    folder, options = lock.path, command_line.options  # type: Any, CompareOptions
    with blamed_on(f"--out {folder} cannot be written"):
        there = any((folder / name).exists() for name in WRITTEN) or any(folder.glob(RUNS))
        if there and not options.resume and not options.force:
            raise UsageError(
                f"--out {folder} holds another comparison, or a run; give another folder, --force to replace it, or "
                f"--resume {folder} to go on with it"
            )
        if options.resume and (other := [name for name in command_line.told if name not in AGAIN]):
            raise UsageError(f"--resume {folder}: with another --{dashed(other[0])} it would be another comparison")
        for entry in entries if options.resume else []:
            refuse_other_ranks(folder, entry)
        folder.mkdir(parents=True, exist_ok=True)
        lock.claim()
        if options.force and not options.resume:
            for path in folder.glob(RUNS):
                remove_run(path)
                forget(path)
        given = {name: getattr(options, name) for name in kinds_of(CompareOptions) if name in command_line.given}
        kept = {name: value for name, value in given.items() if name not in (*DECIDED, "retry", "progress")}
        header = "".join(f"# {name}: {line(value)}\n" for name, value in environment().items())
        with atomic_write(folder / "config.yaml") as file:
            file.write((header + yaml.safe_dump(kept, sort_keys=False)).encode())
        return {
            (i, seed): why
            for i, entry in enumerate(entries)
            for seed in options.seed_list
            if (why := state(folder / run_folder(entry.folder, seed), options.retry)) is not None
        }


def refuse_other_ranks(folder: Path, entry: Command) -> None:
    """Raise UsageError where a line's runs so far had another number of ranks, which would be another line."""
    from hpcdl.runs.folder import summary_of

    for path in sorted((folder / entry.folder).glob("seed-*")):
        had = (summary_of(path) or {}).get("ranks", entry.ranks)
        if had != entry.ranks:
            raise UsageError(
                f"--resume {folder}: {entry.text!r} was run on {counted(had, 'rank')}, and is now to run on "
                f"{entry.ranks}, which would be another comparison"
            )


def state(path: Path, retry: bool) -> str | None:
    """Of a run: "" where it has ended, why it has failed, None where it is to be run."""
    from hpcdl.launch.isolated_run import BEGUN, forget, given_up
    from hpcdl.runs.folder import summary_of

    if summary_of(path) is not None:
        (path / BEGUN).unlink(missing_ok=True)  # of a job that was killed before it noted the end
        return ""
    if retry:
        forget(path)
    return given_up(path)


# -- the runs --------------------------------------------------------------------------------------------------------


def run_all(world, command_line: CommandLine, entries: list[Command], folder: Path, done: dict, known: dict) -> bool:
    """All that is not done; whether a signal has stopped it. Collective. known: see `write`."""
    from hpcdl.launch.isolated_run import BEGUN, packed

    options: CompareOptions = command_line.options
    console, ended_runs = Console(quiet=world.rank > 0 or options.progress == "none", highlight=False), len(done)
    for turn, seed in enumerate(options.seed_list):
        order = [(turn + i) % len(entries) for i in range(len(entries))]
        todo = [entries[i] for i in order if (i, seed) not in done]
        ranks = [entry.ranks if options.at_once else world.size for entry in todo]
        for group in packed(ranks, world.size):
            beside = [todo[i] for i in group]
            ends = run_beside(world, beside, folder, seed)
            for entry, end in zip(beside, ends, strict=True):
                ended_runs += end.stopped != "signal"
                if world.rank == 0:
                    with contextlib.suppress(OSError):
                        (folder / run_folder(entry.folder, seed) / BEGUN).unlink()
                    at = f"[{ended_runs}/{len(entries) * len(options.seed_list)}] seed {seed}"
                    said = printable(f"{at}  {entry.text}: {news(folder, entry, seed, end)}", allowed="")
                    console.print(said, markup=False, soft_wrap=True)
            if world.allreduce(len(signals.received) + any(end.stopped == "signal" for end in ends)):
                return True
        if world.rank == 0 and todo and seed != options.seed_list[-1]:  # then the end writes it
            write(command_line, entries, folder, known)
    return False


def run_beside(world, entries: list[Command], folder: Path, seed: int) -> list[Outcome]:
    """Lines beside each other, each on its part of the ranks; collective."""
    from hpcdl.launch.isolated_run import side_by_side

    ranks = [entry.ranks for entry in entries]
    return side_by_side(world, ranks, lambda part, comm: run_one(comm, entries[part], folder, seed))


def run_one(comm, entry: Command, folder: Path, seed: int) -> Outcome:
    """One line with one seed on the ranks of comm; from its last checkpoint, where it has one."""
    from hpcdl.comm import refuse_together
    from hpcdl.launch.isolated_run import FAILED, Outcome, attempt, begun, record, write_begun
    from hpcdl.launch.launch_consistency import reading

    path = folder / run_folder(entry.folder, seed)
    how = None
    try:
        with refuse_together(comm), blamed_on(f"{path} cannot be written"):
            if comm.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                (path / FAILED).unlink(missing_ok=True)
                write_begun(path, begun(path) + 1)
                how = [f"--resume={path}"] if (path / "checkpoint.h5").exists() else [f"--out={path}", "--force"]
        how = comm.bcast(how)
        with reading(comm) as read:
            options = entry.options(read, f"--seed={seed}", *how)
    except AgreedError as error:
        end = Outcome(failed=line(error))
        if comm.rank == 0:
            record(path, end)
        return end
    return attempt(comm, entry.training, options, path)


def news(folder: Path, entry: Command, seed: int, end: Outcome) -> str:
    """What is said of a run that has ended."""
    from hpcdl.runs.folder import summary_of

    if end.failed is not None:
        return f"failed: {end.failed}"
    if end.stopped == "signal":
        return "stopped"
    found = summary_of(folder / run_folder(entry.folder, seed)) or {}
    names = ("test_accuracy", "test_rmse", "test_loss", "seconds")
    known = [BY_NAME[name] for name in names if isinstance(found.get(name), int | float)]
    return ", ".join(f"{measure.title} {shown(measure, found[measure.name])}" for measure in known)


# -- what comes out --------------------------------------------------------------------------------------------------


def write(command_line: CommandLine, entries: list[Command], folder: Path, known: dict) -> dict:
    """Write what the runs so far make of the comparison (rank 0); returns results.json's.

    known: the runs that were read before, which are not read again (comparison.results); it grows.
    """
    from hpcdl.runs.folder import environment, launch_line

    options: CompareOptions = command_line.options
    failed = {
        (i, seed): why
        for i, entry in enumerate(entries)
        for seed in options.seed_list
        if (i, seed) not in known and (why := state(folder / run_folder(entry.folder, seed), False))
    }
    about = {
        "command": launch_line(),
        "environment": {name: text for name, text in environment().items() if name != "launch"},
        "options": {name: getattr(options, name) for name in kinds_of(CompareOptions) if name in command_line.given},
        "budget": options.budget,
    }
    lines = [Line(entry.text, entry.ranks, entry.folder) for entry in entries]
    found = comparison.results(folder, lines, options.seed_list, options.goal, failed, about, known)
    write_json(found, folder / "results.json")
    for name, text in (
        ("table.csv", comparison.table(found)),
        ("table.md", comparison.markdown(found, options.chosen)),
    ):
        with output_file(folder / name) as file:
            file.write(text.encode())
    return found


def conclude(command_line: CommandLine, entries: list[Command], folder: Path, stopped: bool, known: dict) -> int:
    """Write and print what came out (rank 0); returns the exit status."""
    from hpcdl.launch.isolated_run import say_all_failed

    options, found = command_line.options, write(command_line, entries, folder, known)
    if stopped:
        print(f"stopped by a signal; go on with --resume {folder}", flush=True)
        return signals.STATUS
    console = Console(quiet=options.progress == "none", highlight=False)
    for table in comparison.as_tables(found, options.chosen, console.width):
        console.print(table)
    for remark in [*comparison.remarks(found), *reported(folder)]:
        console.print(remark, markup=False, soft_wrap=True)
    console.print(f"all of it: {folder}", markup=False, soft_wrap=True)
    failed = [run["failed"] for each in found["lines"] for run in each["runs"]]
    if None not in failed:
        say_all_failed(failed)
    return int(None not in failed)


def reported(folder: Path) -> list[str]:
    """Write the page of pictures; returns what is to be said where it cannot be."""
    try:
        make([str(folder)], folder / "report.html")
    except UsageError as error:
        return [f"there is no report.html: {error}"]
    return []


main = Program("compare", CompareOptions, __doc__, run)


if __name__ == "__main__":
    main()
