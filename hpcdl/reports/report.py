"""A report of runs, comparisons and searches: one page, read and drawn on all cores.

    find the folders -> read, downsample and draw each run, on all cores -> overview, comparisons, searches, runs

Memory is proportional to the pictures. A page has pictures of the first runs, and a row and a curve of all others.
"""

import math
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_write
from hpcdl.formatting import counted
from hpcdl.machine.versions import versions
from hpcdl.reports import page
from hpcdl.reports.comparison import judged
from hpcdl.reports.comparison_pictures import Comparison, DrawnLine, read_comparison, results_of, shown, together
from hpcdl.reports.discovery import below, find
from hpcdl.reports.downsampling import number
from hpcdl.reports.figures import Picture, check_library, drawing, inline, is_ours, save
from hpcdl.reports.page import Cell, Drawn
from hpcdl.reports.run_pictures import described, pictures_of
from hpcdl.reports.run_reader import Recorded, record
from hpcdl.reports.search_pictures import pictures_of as pictures_of_search
from hpcdl.reports.search_section import searched
from hpcdl.runs.closing_table import ROWS, said_of
from hpcdl.search.search_log_reader import Trials, read

MOST = 40  # most runs with pictures of their own
FEW = 4  # fewest runs that are worth the start of other processes
COLUMNS = 6  # measures of a table of a comparison
PICTURE = re.compile(r"(run|comparison|search)-\d+-[\w.-]*\.(png|svg)|overview-[\w-]+\.(png|svg)")


class ReportJob(NamedTuple):
    """A run to read. look: index of colour and style; detailed: with pictures; files: folder and type of these."""

    folder: Path
    look: int
    detailed: bool
    prefix: str
    files: tuple[Path, str] | None


class DrawnRun(NamedTuple):
    recorded: Recorded
    drawn: list[Drawn]


@dataclass
class Made:
    """The contents of a page: numbers of runs, comparisons, searches and pictures, and missing parts."""

    runs: int = 0
    comparisons: int = 0
    searches: int = 0
    pictures: int = 0
    missing: list[str] = field(default_factory=list)


def make(folders: list[str], out: Path, pictures: Path | None = None, kind: str = "png", force: bool = False) -> Made:
    """Write the page, and the pictures as files if `pictures` is given.

    Raises UsageError for folders without runs, and for files that cannot be written or were not written by a report.
    """
    check_library()
    if not folders:
        raise UsageError("name a folder: of a run, of a comparison or a search, or one above them")
    found = find(folders)
    check_out(out, force)
    files = None
    if pictures is not None:
        check_pictures(pictures, kind, force)
        files = pictures, kind
    comparisons = [read_comparison(folder) for folder in found.comparisons]
    for comparison in comparisons:
        if not comparison.lines:  # of what can be shown: its runs
            known = {os.path.realpath(run) for run in found.runs}
            more = below(comparison.folder, within=True).runs
            found.runs.extend(run for run in more if os.path.realpath(run) not in known)
    searches = [(folder, read(folder)) for folder in found.searches]
    lines = [DrawnLine(name_of(folder, found.runs), index) for index, folder in enumerate(found.runs)]
    jobs = [
        ReportJob(folder, index, index < MOST, f"run-{index + 1}-{slug(folder.name)}", files)
        for index, folder in enumerate(found.runs)
    ]
    owners: list[DrawnLine] = list(lines)
    for place, comparison in enumerate(comparisons):
        for line in comparison.lines:
            whole = next((run for run in line.runs if not run.failed), None)
            for run in line.runs:
                if not run.failed and run.folder is not None and run.folder.is_dir():
                    name = f"comparison-{place + 1}-{slug(run.folder.parent.name)}-{slug(run.folder.name)}"
                    detailed = run is whole and line.index < MOST
                    jobs.append(ReportJob(run.folder, line.index, detailed, name, files))
                    owners.append(line)
    if pictures is not None:
        with blamed_on(f"--pictures {pictures} cannot be written"):
            pictures.mkdir(parents=True, exist_ok=True)
    done = list(in_parallel(work, jobs))
    for line, each in zip(owners, done, strict=True):
        line.records.append(each.recorded)
    made = Made(runs=len(jobs), comparisons=len(comparisons), searches=len(searches))
    parts = sections(lines, comparisons, searches, owners, done, files, made)
    title = title_of(made, lines, comparisons)
    html = page.page(
        title, [page.paragraph(f"Made by hpcdl report, version {versions()['hpcdl']}.", soft=True), *parts]
    )
    with blamed_on(f"--out {out} cannot be written"), atomic_write(out) as file:
        file.write(html.encode())
    said = [(comparison.folder, each) for comparison in comparisons for each in comparison.missing]
    said += [(folder, each) for folder, trials in searches for each in trials.missing]
    said += [(each.recorded.folder, what) for each in done for what in each.recorded.missing]
    for what in dict.fromkeys(what for _, what in said):
        of = [folder for folder, other in said if other == what]
        made.missing.append(f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {what}")
    return made


def sections(
    lines: list[DrawnLine],
    comparisons: list[Comparison],
    searches: list[tuple[Path, Trials]],
    owners: list[DrawnLine],
    done: list[DrawnRun],
    files: tuple[Path, str] | None,
    made: Made,
) -> list[str]:
    """Return the overview, the comparisons with a run of each line, the searches, and the other runs."""
    parts, entries = [], []
    for number_, comparison in enumerate(comparisons, 1):
        anchor, title = f"c{number_}", f"Comparison {named(comparison.folder)}"
        entries.append((anchor, title))
        whole = [*together(comparison.lines, len(comparison.seeds), "line"), *results_of(comparison)]
        drawn = draw(whole, f"comparison-{number_}", anchor, files)
        made.pictures += len(drawn)
        parts.append(page.section(title, anchor, compared(comparison, drawn)))
        for line in comparison.lines:
            for owner, each in zip(owners, done, strict=True):
                if owner is line and each.drawn:
                    name = f"{line.index + 1} {line.name}"
                    where = f"{anchor}l{line.index}"
                    entries.append((where, name))
                    made.pictures += len(each.drawn)
                    note = f"One run of this line, with its first seed: {each.recorded.folder}"
                    parts.append(page.section(name, where, [page.paragraph(note, soft=True), *one(each)]))
    for number_, (folder, trials) in enumerate(searches, 1):
        anchor, title = f"s{number_}", f"Search {named(folder)}"
        entries.append((anchor, title))
        drawn = draw(pictures_of_search(trials), f"search-{number_}", anchor, files)
        made.pictures += len(drawn)
        parts.append(page.section(title, anchor, searched(trials, drawn)))
    if len(lines) > 1:
        drawn = draw(together(lines, 1, "run"), "overview", "o", files)
        made.pictures += len(drawn)
        entries.insert(0, ("o", f"All {len(lines)} runs"))
        parts.insert(0, page.section(f"All {len(lines)} runs", "o", overview(lines, drawn)))
    for line, each in zip(lines, done, strict=False):
        if line.index < MOST:
            title = f"{line.index + 1} {line.name}" if len(lines) > 1 else ", ".join(described(each.recorded))
            entries.append((f"r{line.index}", title))
            made.pictures += len(each.drawn)
            parts.append(page.section(title, f"r{line.index}", one(each)))
    if len(lines) > MOST:
        more = (
            f"Of {len(lines):,} runs the pictures of the first {MOST} are shown; name the folders of others for theirs."
        )
        parts.append(page.missing([more]))
    return ([page.contents(entries)] if len(entries) > 1 else []) + parts


def work(job: ReportJob) -> DrawnRun:
    """Read and draw a run, possibly in a process of its own."""
    recorded = record(job.folder)
    if not job.detailed:
        return DrawnRun(recorded, [])
    drawn = draw(pictures_of(recorded, job.look), job.prefix, slug(job.prefix), job.files)
    return DrawnRun(recorded, drawn)


def draw(pictures: Iterable[Picture], prefix: str, anchor: str, files: tuple[Path, str] | None) -> list[Drawn]:
    """Return the pictures as parts of the page, and write them as files on request."""
    found = []
    with drawing():
        for place, picture in enumerate(pictures):
            svg = inline(picture, f"{anchor}-{place}-")
            found.append(Drawn(picture.name, picture.title, picture.sentence, picture.legend, svg))
            if files is not None:
                save(picture, files[0] / f"{prefix}-{picture.name}.{files[1]}")
    return found


def in_parallel(function: Callable[[Any], Any], jobs: Sequence[Any]) -> Iterable[Any]:
    """Return the results in the order of the jobs, computed on all cores."""
    cores = min(len(os.sched_getaffinity(0)), len(jobs))
    if cores < 2 or len(jobs) < FEW or "mpi4py.MPI" in sys.modules:  # a rank of a job starts no processes
        return map(function, jobs)
    # spawn: this process may have threads, and a process that is forked from it their locks.
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, jobs, chunksize=1))


def compared(comparison: Comparison, drawn: list[Drawn]) -> list[str]:
    """Return the section of a comparison."""
    rows = [("command", comparison.command), ("budget", comparison.budget)]
    rows.append(("seeds", ", ".join(map(str, comparison.seeds))))
    rows.append(("target", ", ".join(f"{name} {value}" for name, value in comparison.target.items())))
    told = {name: value for name, value in comparison.environment.items() if name != "launch" or not comparison.command}
    rows += environment_of(told)
    parts = [page.facts([row for row in rows if row[1]]), page.missing(comparison.missing)]
    known = [each for each in comparison.measures if any(mean_of(line, each) for line in comparison.lines)]
    tables = max(1, -(-len(known) // COLUMNS))
    for part in range(tables):
        parts.append(measured(comparison, known[part * len(known) // tables : (part + 1) * len(known) // tables]))
    if known:
        parts.append(
            page.paragraph(
                "Mean ± standard deviation over the seeds; below it the difference to the first line, paired by seed, "
                "with its interval of 95 %, by Student's t. Within noise: the seeds may have made the difference, "
                "as many lines as there are: p, corrected for their number, is 0.05 or more. "
                ">: runs missed the target, and took more than this.",
                soft=True,
            )
        )
    return [*parts, page.figures(drawn)]


def mean_of(line: DrawnLine, measure: dict[str, Any]) -> bool:
    """True if a line has this measure."""
    return math.isfinite(number(line.statistics.get(str(measure["name"]), {}).get("mean")))


def measured(comparison: Comparison, measures: list[dict[str, Any]]) -> str:
    """Return a table of measures, a row per line; a failed line shows the reason."""
    names = ["line", *(str(each.get("title") or each["name"]) for each in measures or [{"name": ""}])]
    rows = []
    for line in comparison.lines:
        failed = [run for run in line.runs if run.failed]
        ranks = counted(line.ranks, "rank") if line.ranks is not None else ""
        if failed and len(failed) < len(line.runs):
            ranks += f"; {len(failed)} of {len(line.runs)} runs failed: {failed[0].failed}"
        row = [Cell(line.key.label, ranks, key=line.key)]
        if failed and len(failed) == len(line.runs):
            row.append(Cell(f"failed: {failed[0].failed}", failed=True))
        else:
            row += [statistic(line.statistics.get(str(each["name"]), {}), each) for each in measures]
        rows.append(row)
    return page.table(names, rows)


def statistic(of: dict[str, Any], measure: dict[str, Any]) -> Cell:
    """Return the cell of mean and deviation, and the difference to the first line."""
    mean, deviation, difference = (number(of.get(name)) for name in ("mean", "deviation", "difference"))
    if not math.isfinite(mean):
        return Cell("-")
    said = "> " * bool(of.get("censored")) + shown(mean, measure, unit=True)
    if math.isfinite(deviation) and deviation > 0:
        said += f" ± {shown(deviation, measure)}"
    if not math.isfinite(difference):
        return Cell(said)
    if difference == 0 and of.get("interval") in (None, [0, 0]):
        return Cell(said, "the same")
    more, interval = shown(difference, measure, sign="+"), of.get("interval")
    if isinstance(interval, list) and len(interval) == 2 and all(math.isfinite(number(each)) for each in interval):
        low, high = (shown(number(each), measure, sign="+") for each in interval)
        more += f" ({low} to {high})"
    p = number(of.get("p"))
    return Cell(said, more + judged(p if math.isfinite(p) else None, of.get("within_noise") is True))


OVERVIEW = (  # name, entry of the summary, format, unit
    ("steps", "steps", ",.0f", 1),
    ("train loss", "train_loss", ".4f", 1),
    ("test loss", "test_loss", ".4f", 1),
    ("test accuracy", "test_accuracy", ".2%", 1),
    ("test RMSE", "test_rmse", ".4g", 1),
    ("test return", "test_return", ".4g", 1),
    ("seconds", "seconds", ",.2f", 1),
    ("examples/s", "examples_per_second", ",.0f", 1),
    ("sent, MB in all", "bytes_sent_per_rank", ",.2f", 1e6),
)


def overview(lines: list[DrawnLine], drawn: list[Drawn]) -> list[str]:
    """Return the table of all runs, and pictures of them together."""

    def value(recorded: Recorded, entry: str) -> float:
        found = recorded.summary.get(entry)
        if isinstance(found, list):
            return sum(map(number, found))
        if found is None and entry in recorded.evaluations.names:  # of a run that has not ended
            column = recorded.evaluations.mean[entry]
            return float(column[-1]) if len(column) else math.nan
        return number(found)

    known = [column for column in OVERVIEW if any(math.isfinite(value(line.records[0], column[1])) for line in lines)]
    rows = []
    for line in lines:
        recorded = line.records[0]
        cells = [Cell(line.key.label, ", ".join(described(recorded)), key=line.key)]
        for _, entry, form, unit in known:
            found = value(recorded, entry)
            cells.append(Cell(format(found / unit, form) if math.isfinite(found) else "-"))
        rows.append(cells)
    alike = len({tuple(described(line.records[0])[2:]) for line in lines}) == 1
    note = (
        "" if alike else "These runs have different models or data: losses and scores on other data are not comparable."
    )
    return [
        page.table(["run", *(column[0] for column in known)], rows),
        page.missing([note] if note else []),
        page.figures(drawn),
    ]


def one(done: DrawnRun) -> list[str]:
    """Return the section of a run: its facts, pictures, results and options."""
    run = done.recorded
    environment = run.summary.get("environment") or run.started.get("environment") or run.header
    about = [("run", ", ".join(described(run)))]
    if isinstance(environment, dict):
        about += environment_of(environment)
    legs = run.summary.get("legs")
    hosts = [leg.get("hosts") for leg in legs if isinstance(leg, dict)] if isinstance(legs, list) else []
    hosts = [host for each in [*hosts, run.started.get("hosts")] if isinstance(each, list) for host in each]
    about += [("hosts", ", ".join(sorted({str(host) for host in hosts})))] if hosts else []
    result = []
    for name, entry, show in ROWS if run.summary else ():
        try:
            said = said_of(run.summary, entry, show)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            continue  # an entry that is not as ours are
        if said is not None:
            result.append((name, said))
    options = [(str(name), str(value)) for name, value in run.options.items()]
    return [
        page.missing(run.missing),
        page.facts(about),
        page.figures(done.drawn),
        page.folded("What it reached, and what it cost", page.facts(result)),
        page.folded("All options", page.facts(options)),
    ]


def environment_of(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of command, commit and machine, and all versions in one row."""
    names = {"launch": "command", "commit": "commit", "mpi": "MPI", "machine": "machine"}
    rows = [(said, str(told[name])) for name, said in names.items() if told.get(name)]
    versions = ", ".join(f"{name} {value}" for name, value in told.items() if name not in names)
    return [*rows, ("versions", versions)] if versions else rows


def check_out(out: Path, force: bool) -> None:
    """Raise UsageError if the page cannot be written, or would replace a file of another program."""
    from hpcdl.checkpoint.export import check_output_file

    check_output_file("--out", str(out), (".html", ".htm"))
    refuse_foreign(out, "--out", force)


def check_pictures(folder: Path, kind: str, force: bool) -> None:
    """Raise UsageError if pictures cannot be written, or would replace a file of another program."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--pictures {folder} is a file; name a folder")
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        raise UsageError(f"--pictures {folder} cannot be written: no permission in {parent}")
    if folder.exists():
        with blamed_on(f"--pictures {folder} cannot be read"):
            for path in sorted(folder.iterdir()):
                if PICTURE.fullmatch(path.name) and path.suffix == f".{kind}":
                    refuse_foreign(path, "--pictures", force)


def refuse_foreign(path: Path, option: str, force: bool) -> None:
    """Raise UsageError if the file exists, and no report has written it."""
    if force or not path.is_file():
        return
    with blamed_on(f"{option} {path} cannot be read"):
        ours = is_ours(path)
    if not ours:
        raise UsageError(f"{option} {path} is there, and no report has written it; give another name, or --force")


def name_of(folder: Path, all_of_them: list[Path]) -> str:
    """Return a run's name: its folder without the common parent of all."""
    if len(all_of_them) < 2:
        return named(folder)
    common = os.path.commonpath([each.absolute() for each in all_of_them])
    return os.path.relpath(folder.absolute(), common)


def named(folder: Path) -> str:
    """Return a folder as it was given; for "." its own name."""
    return str(folder) if folder.name else folder.absolute().name


def slug(name: str) -> str:
    """Return the name in a form for file names."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "run"


def title_of(made: Made, lines: list[DrawnLine], comparisons: list[Comparison]) -> str:
    if not comparisons and not made.searches and len(lines) == 1:
        return f"Run {lines[0].name}"
    if len(comparisons) == 1 and not lines and not made.searches:
        return f"Comparison of {counted(len(comparisons[0].lines), 'line')}"
    counts = (made.comparisons, "comparison"), (made.searches, "search"), (len(lines), "run")
    return "Report of " + " and ".join(counted(number, noun) for number, noun in counts if number)
