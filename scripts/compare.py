"""Compare strategies on the same data, over several seeds:
mpiexec -n 4 hpcdl compare --seeds 5 --out compare "train-allreduce" "train-gossip --topology ring"

A line is a program that trains, with its options; `-n 2: train-pipeline` takes 2 of the ranks. Options that stand
beside the lines are common to all; a line's own options win. Each line is run with each seed, in turns: all lines with
the first seed, then all with the next one, beginning with another line.

Writes the runs' folders, table.csv, table.md, results.json and report.html (`hpcdl report`). A line that fails is a row
with the reason; if all fail, the status is 1. After a stop or a crash, --resume FOLDER does the missing runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hpcdl.checkpoint.export import output_file, write_json
from hpcdl.errors import AgreedExit, UsageError, blamed_on, printable
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

if TYPE_CHECKING:
    from hpcdl.launch.isolated_run import Outcome
    from hpcdl.runs.folder import Folder

AGAIN = {"resume", "seeds", "target", "columns", "at_once", "retry", "progress"}  # options that --resume allows
MOST_SEEDS = 10_000
WRITTEN = ("config.yaml", "results.json", "summary.json", "table.csv", "table.md")  # files of another comparison or run
RUNS = "[0-9]*-train-*/seed-*"


@dataclass(frozen=True)
class CompareOptions(Options):
    lines: list[str] = option(list, "programs with their options, each in quotes; -n RANKS: before a line, its ranks")
    seeds: str = option("3", "how many seeds (3: 0, 1 and 2), or which, with commas between (7,8,9)")
    target: str = option("", "show the costs until evaluations reach accuracy=0.95, loss=0.3, rmse=2 or return=475")
    at_once: bool = option(False, "run lines side by side if there are ranks enough for several")
    columns: str = option("", "columns of the tables, with commas between, as test_loss,seconds (results.json has all)")
    retry: bool = option(False, "with --resume: repeat the runs that failed")

    def __post_init__(self):
        super().__post_init__()
        comparison.chosen(self.columns)
        read_target(self.target)
        numbers = self.seeds.split(",")
        if not all(each.isdecimal() for each in numbers) or numbers == ["0"]:
            raise UsageError(f"--seeds: the number of seeds, or seeds with commas between, not {self.seeds!r}")
        if len(numbers) == 1 and (len(self.seeds) > 6 or int(self.seeds) > MOST_SEEDS):
            raise UsageError(f"--seeds {self.seeds}: there are at most {MOST_SEEDS:,} seeds")
        if too_large := [each for each in numbers if len(each) > 19 or int(each) >= 2**63]:
            raise UsageError(f"--seeds: a seed is a whole number of 64 bits, not {too_large[0]}")
        if twice := {each for each in self.seed_list if self.seed_list.count(each) > 1}:
            raise UsageError(f"--seeds: {min(twice)} is given twice; each seed counts once")

    @property
    def seed_list(self) -> list[int]:
        """The seeds of --seeds: the numbers in a list or, for one number n, the seeds 0 to n - 1."""
        numbers = self.seeds.split(",")
        return [*map(int, numbers)] if len(numbers) > 1 else [*range(int(numbers[0]))]


def run(world, arguments):
    from hpcdl.launch.isolated_run import all_come, job_folder
    from hpcdl.launch.launch_consistency import reading
    from hpcdl.machine.doctor import warn

    check_world(world)
    with reading(world, parse_command_line) as read:
        command_line = read(CompareOptions, "compare", __doc__, arguments)
        options, entries = command_line.options, read_lines(command_line, world.size)
    status, known = 0, {}
    with job_folder(world, "compare", options.out, lambda lock: prepare(lock, command_line, entries)) as (folder, done):
        warn(world, quiet=options.progress == "none")
        stopped = run_all(world, command_line, entries, folder, world.bcast(done), known)
        if world.rank == 0:
            status = conclude(command_line, entries, folder, stopped, known)
        all_come(world)
    raise AgreedExit(world.bcast(status))


def read_lines(command_line: CommandLine, size: int) -> list[Command]:
    """Return the lines as commands. Raises UsageError, which names all lines that cannot start."""
    options: CompareOptions = command_line.options
    if not options.lines:
        raise UsageError('there is nothing to compare: give lines, as "train-allreduce" "train-gossip --topology ring"')
    if "seed" in command_line.given:
        raise UsageError("--seed is an option of one run; a comparison takes --seeds")
    if options.out == "none":
        raise UsageError("--out none: a comparison reads the files of its runs; name a folder")
    names = [name for name in COMMON if name in command_line.given and name not in (*DECIDED, "progress")]
    given = {name: str(getattr(options, name)) for name in names if getattr(options, name) != ""}  # "": of a file
    return read_commands(options.lines, given, size, command_line.trust)


def prepare(lock: Folder, command_line: CommandLine, entries: list[Command]) -> dict[tuple[int, int], str]:
    """Make the comparison's folder, or continue in it (rank 0); return the `states` of its runs. Raises UsageError."""
    from hpcdl.launch.isolated_run import forget, refuse_taken
    from hpcdl.runs.folder import remove_run, summary_of, write_config

    folder, options = lock.path, command_line.options  # type: Any, CompareOptions
    with blamed_on(f"--out {folder} cannot be written"):
        if any((folder / name).exists() for name in WRITTEN) or any(folder.glob(RUNS)):
            refuse_taken(folder, "comparison, or a run", options)
        if options.resume and (other := [name for name in command_line.told if name not in AGAIN]):
            raise UsageError(f"--resume {folder}: a comparison keeps its --{dashed(other[0])}; leave the option out")
        for entry in entries if options.resume else []:
            for path in sorted((folder / entry.folder).glob("seed-*")):
                if (had := (summary_of(path) or {}).get("ranks", entry.ranks)) != entry.ranks:
                    raise UsageError(
                        f"--resume {folder}: {entry.text!r} ran on {counted(had, 'rank')}, and would now run on "
                        f"{entry.ranks}; start as many ranks as before"
                    )
        folder.mkdir(parents=True, exist_ok=True)
        lock.claim()
        if options.force and not options.resume:
            for path in folder.glob(RUNS):
                remove_run(path)
                forget(path)
        given = {name: getattr(options, name) for name in kinds_of(CompareOptions) if name in command_line.given}
        kept = {name: value for name, value in given.items() if name not in (*DECIDED, "retry", "progress")}
        write_config(folder / "config.yaml", kept)
        return states(options, entries, folder, options.retry)


def states(
    options: CompareOptions, entries: list[Command], folder: Path, retry: bool, known: Iterable[tuple[int, int]] = ()
) -> dict[tuple[int, int], str]:
    """Return by (line, seed) "" for a run that has ended, or why it has failed; runs yet to do are left out.
    retry: failed runs are to be done again. known: runs that are left out, too."""
    from hpcdl.launch.isolated_run import BEGUN, forget, given_up
    from hpcdl.runs.folder import summary_of

    found = {}
    for i, seed in product(range(len(entries)), options.seed_list):
        path = folder / run_folder(entries[i].folder, seed)
        if (i, seed) in known:
            continue
        if summary_of(path) is not None:
            (path / BEGUN).unlink(missing_ok=True)  # left by a job that was killed before it removed the file
            found[i, seed] = ""
            continue
        if retry:
            forget(path)
        if (why := given_up(path)) is not None:
            found[i, seed] = why
    return found


def run_all(world, command_line: CommandLine, entries: list[Command], folder: Path, done: dict, known: dict) -> bool:
    """Do all runs that are not in `done`; return True if a signal has stopped them. Collective. known: see `write`."""
    from hpcdl.launch.isolated_run import packed, side_by_side

    options: CompareOptions = command_line.options
    console, ended_runs = Console(quiet=world.rank > 0 or options.progress == "none", highlight=False), len(done)
    for turn, seed in enumerate(options.seed_list):
        order = [(turn + i) % len(entries) for i in range(len(entries))]
        todo = [entries[i] for i in order if (i, seed) not in done]
        ranks = [entry.ranks if options.at_once else world.size for entry in todo]
        for group in packed(ranks, world.size):
            beside = [todo[i] for i in group]
            sizes = [entry.ranks for entry in beside]
            ends = side_by_side(world, sizes, lambda i, comm, these=beside, s=seed: run_one(comm, these[i], folder, s))
            for entry, end in zip(beside, ends, strict=True):
                ended_runs += end.stopped != "signal"
                if world.rank == 0:
                    at = f"[{ended_runs}/{len(entries) * len(options.seed_list)}] seed {seed}"
                    said = printable(f"{at}  {entry.text}: {news(folder, entry, seed, end)}", allowed="")
                    console.print(said, markup=False, soft_wrap=True)
            if world.allreduce(len(signals.received) + any(end.stopped == "signal" for end in ends)):
                return True
        if world.rank == 0 and todo and seed != options.seed_list[-1]:  # then the end writes it
            write(command_line, entries, folder, known)
    return False


def run_one(comm, entry: Command, folder: Path, seed: int) -> Outcome:
    """Run a line with one seed on the ranks of comm, from its last checkpoint if it has one."""
    from hpcdl.launch.isolated_run import FAILED, attempt_in, begun, placed, write_begun

    path = folder / run_folder(entry.folder, seed)

    def begin() -> list[str]:
        path.mkdir(parents=True, exist_ok=True)
        (path / FAILED).unlink(missing_ok=True)
        write_begun(path, begun(path) + 1)
        return placed(path)

    return attempt_in(comm, entry, path, begin, [f"--seed={seed}"])


def news(folder: Path, entry: Command, seed: int, end: Outcome) -> str:
    """Return the text to print on a run that has ended."""
    from hpcdl.runs.folder import summary_of

    if end.failed is not None:
        return f"failed: {end.failed}"
    if end.stopped == "signal":
        return "stopped"
    found = summary_of(folder / run_folder(entry.folder, seed)) or {}
    names = ("test_accuracy", "test_rmse", "test_rmse_standardized", "test_loss", "seconds")
    known = [BY_NAME[name] for name in names if isinstance(found.get(name), int | float)]
    return ", ".join(f"{measure.title} {shown(measure, found[measure.name])}" for measure in known)


def write(command_line: CommandLine, entries: list[Command], folder: Path, known: dict) -> dict:
    """Write the comparison of the runs so far (rank 0); return the content of results.json.
    known: results of runs that were read before, and are not read again (comparison.results); new ones are added."""
    from hpcdl.runs.folder import environment, launch_line

    options: CompareOptions = command_line.options
    failed = {run: why for run, why in states(options, entries, folder, False, known).items() if why}
    about = {
        "command": launch_line(),
        "environment": {name: text for name, text in environment().items() if name != "launch"},
        "options": {name: getattr(options, name) for name in kinds_of(CompareOptions) if name in command_line.given},
        "budget": options.budget,
    }
    lines = [Line(entry.text, entry.ranks, entry.folder) for entry in entries]
    found = comparison.results(folder, lines, options.seed_list, read_target(options.target), failed, about, known)
    write_json(found, folder / "results.json")
    markdown = comparison.markdown(found, comparison.chosen(options.columns, found))
    for name, text in (("table.csv", comparison.table(found)), ("table.md", markdown)):
        with output_file(folder / name) as file:
            file.write(text.encode())
    return found


def conclude(command_line: CommandLine, entries: list[Command], folder: Path, stopped: bool, known: dict) -> int:
    """Write and print the results (rank 0); return the exit status."""
    from hpcdl.launch.isolated_run import say_all_failed

    options, found = command_line.options, write(command_line, entries, folder, known)
    if stopped:
        print(f"stopped by a signal; go on with --resume {folder}", flush=True)
        return signals.STATUS
    console = Console(quiet=options.progress == "none", highlight=False)
    for table in comparison.as_tables(found, comparison.chosen(options.columns, found), console.width):
        console.print(table)
    remarks = comparison.remarks(found)
    try:
        make([str(folder)], folder / "report.html")
    except UsageError as error:
        remarks = [*remarks, f"report.html cannot be written: {error}"]
    for remark in remarks:
        console.print(remark, markup=False, soft_wrap=True)
    console.print(f"results: {folder}", markup=False, soft_wrap=True)
    failed = [run["failed"] for each in found["lines"] for run in each["runs"]]
    if None not in failed:
        say_all_failed(failed)
    return int(None not in failed)


main = Program("compare", CompareOptions, __doc__, run)


if __name__ == "__main__":
    main()
