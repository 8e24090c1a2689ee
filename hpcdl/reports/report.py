"""A report of runs, comparisons and searches: one page; runs are read and drawn on all cores, each on its own."""

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

from hpcdl.checkpoint.export import check_output_file
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_write, unwritable_parent
from hpcdl.formatting import counted
from hpcdl.machine.versions import versions
from hpcdl.reports import page
from hpcdl.reports.comparison import difference, verdict, visible
from hpcdl.reports.comparison_pictures import Comparison, DrawnLine, read_comparison, results_of, together
from hpcdl.reports.discovery import below, find
from hpcdl.reports.downsampling import number
from hpcdl.reports.figures import Picture, check_library, drawing, inline, is_ours, save
from hpcdl.reports.measures import Measure, shown
from hpcdl.reports.page import Cell, Drawn
from hpcdl.reports.run_pictures import described, pictures_of
from hpcdl.reports.run_reader import Recorded, record
from hpcdl.reports.search_pictures import pictures_of as pictures_of_search
from hpcdl.reports.search_section import searched
from hpcdl.reports.statistics import Statistics
from hpcdl.runs.closing_table import ROWS, said_of
from hpcdl.search.search_log_reader import Trials, read

MOST = 40  # most runs with pictures of their own
FEW = 4  # fewest runs for which other processes are started
UNFOLDED = 12  # most pictures of a page that are seen without a click
HOW_TO_READ = (
    "Mean ± standard deviation over the seeds; below it the difference to the first line, paired by seed, with its "
    "interval of 95 %, by Student's t. Within noise: the choice of seeds may explain the difference: p, corrected "
    "for the number of lines, is 0.05 or more. >: some runs missed the target; the true value is larger."
)
ONE_EACH = (
    "Each row is a single run, which cannot tell a difference from noise: hpcdl compare with 3 seeds or more can."
)
PICTURE = re.compile(r"(run|comparison|search)-\d+-[\w.-]*\.(png|svg)|overview-[\w-]+\.(png|svg)")


class ReportJob(NamedTuple):
    """A run to read. look: index of colour, style. detailed: draw it. files: (folder, type) of pictures; None: none."""

    folder: Path
    look: int
    detailed: bool
    prefix: str
    files: tuple[Path, str] | None


@dataclass
class Made:
    """The contents of a page: numbers of runs, comparisons, searches and pictures, a sentence for each missing part."""

    runs: int = 0
    comparisons: int = 0
    searches: int = 0
    pictures: int = 0
    missing: list[str] = field(default_factory=list)


def make(folders: list[str], out: Path, pictures: Path | None = None, kind: str = "png", force: bool = False) -> Made:
    """Write the page to `out`, and pictures as `kind` files into the folder `pictures`, if given; return the contents.
    Raises UsageError for folders without runs, unwritable files and (unless `force`) files that no report wrote."""
    check_library()
    if not folders:
        raise UsageError("give the folder of a run, a comparison or a search, or a folder above them")
    found = find(folders)
    check_output_file("--out", str(out), (".html", ".htm"))
    refuse_foreign(out, "--out", force)
    if pictures is not None:
        check_pictures(pictures, kind, force)
    files = None if pictures is None else (pictures, kind)
    comparisons = [read_comparison(folder) for folder in found.comparisons]
    for comparison in comparisons:
        if not comparison.lines:  # its runs can still be shown
            known = {os.path.realpath(run) for run in found.runs}
            more = below(comparison.folder, within=True).runs
            found.runs.extend(run for run in more if os.path.realpath(run) not in known)
    searches = [(folder, read(folder)) for folder in found.searches]
    lines = [DrawnLine(name_of(folder, found.runs), index) for index, folder in enumerate(found.runs)]
    jobs: list[tuple[DrawnLine, ReportJob]] = []
    for index, (line, folder) in enumerate(zip(lines, found.runs, strict=True)):
        jobs.append((line, ReportJob(folder, index, index < MOST, f"run-{index + 1}-{slug(folder.name)}", files)))
    for place, comparison in enumerate(comparisons, 1):
        for line in comparison.lines:
            first = next((run for run in line.runs if not run.failed), None)
            for run in line.runs:
                if not run.failed and run.folder is not None and run.folder.is_dir():
                    name = f"comparison-{place}-{slug(run.folder.parent.name)}-{slug(run.folder.name)}"
                    detailed = run is first and line.index < MOST
                    jobs.append((line, ReportJob(run.folder, line.index, detailed, name, files)))
    if pictures is not None:
        with blamed_on(f"--pictures {pictures} cannot be written"):
            pictures.mkdir(parents=True, exist_ok=True)
    done = list(in_parallel(work, [job for _, job in jobs]))
    for (line, _), recorded in zip(jobs, done, strict=True):
        line.records.append(recorded)
    made = Made(runs=len(jobs), comparisons=len(comparisons), searches=len(searches))
    parts = sections(lines, comparisons, searches, files, made)
    about = page.paragraph(f"Made by hpcdl report, version {versions()['hpcdl']}.")
    html = page.page(title_of(made, lines, comparisons), [*parts, about])
    with blamed_on(f"--out {out} cannot be written"), atomic_write(out) as file:
        file.write(html.encode())
    said = [(comparison.folder, each) for comparison in comparisons for each in comparison.missing]
    said += [(folder, each) for folder, trials in searches for each in trials.missing]
    said += [(recorded.folder, what) for recorded in done for what in recorded.missing]
    for what in dict.fromkeys(what for _, what in said):
        of = [folder for folder, other in said if other == what]
        made.missing.append(f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {what}")
    return made


def sections(
    lines: list[DrawnLine],
    comparisons: list[Comparison],
    searches: list[tuple[Path, Trials]],
    files: tuple[Path, str] | None,
    made: Made,
) -> list[str]:
    """Return the page's sections: overview, comparisons, searches, and runs, folded if there are others; count pictures
    (made)."""
    parts: list[str] = []
    entries: list[tuple[str, str]] = []
    room = UNFOLDED

    def add(title: str, anchor: str, body: list[str]) -> None:
        entries.append((anchor, title))
        parts.append(page.section(title, anchor, body))

    def figures(drawn: Sequence[Drawn], inside: bool = False) -> str:
        """Return pictures as a part of the page. inside: of a part that is folded as a whole."""
        nonlocal room
        made.pictures += len(drawn)
        seen = len(drawn) if inside else min(room, len(drawn))
        room -= 0 if inside else seen
        return page.figures(drawn, seen)

    def folded(line: DrawnLine, run: Recorded, note: str = "") -> str:
        return page.folded(
            line.key.label, "\n".join([page.paragraph(note), *one(run, figures(run.drawn, inside=True))])
        )

    if len(lines) > 1:
        drawn = draw(together(lines, 1, "run"), "overview", "o", files)
        add(f"All {len(lines)} runs", "o", overview(lines, figures(drawn)))
    for place, comparison in enumerate(comparisons, 1):
        shown = *together(comparison.lines, len(comparison.seeds), "line"), *results_of(comparison)
        body = compared(comparison, figures(draw(shown, f"comparison-{place}", f"c{place}", files)))
        for line in comparison.lines:
            for run in filter(lambda each: each.drawn, line.records):
                body.append(folded(line, run, f"One run of this line, with its first seed: {run.folder}"))
        add(f"Comparison {named(comparison.folder)}", f"c{place}", body)
    for place, (folder, trials) in enumerate(searches, 1):
        drawn = draw(pictures_of_search(trials), f"search-{place}", f"s{place}", files)
        add(f"Search {named(folder)}", f"s{place}", searched(trials, figures(drawn)))
    if len(lines) == 1 and not entries:
        (run,) = lines[0].records
        add(", ".join(described(run)), "r", one(run, figures(run.drawn)))
    elif lines:
        body = [folded(line, line.records[0]) for line in lines[:MOST]]
        if len(lines) > MOST:
            more = f"the pictures of the first {MOST} are shown; for other runs, give their folders alone."
            body.append(page.missing([f"Of {len(lines):,} runs {more}"]))
        parts.append(page.section("Each run", "r", body))
    return ([page.contents(entries)] if len(entries) > 1 else []) + parts


def work(job: ReportJob) -> Recorded:
    """Read and draw a run, possibly in a process of its own."""
    recorded = record(job.folder)
    if job.detailed:
        recorded.drawn = draw(pictures_of(recorded, job.look), job.prefix, slug(job.prefix), job.files)
    return recorded


def draw(pictures: Iterable[Picture], prefix: str, anchor: str, files: tuple[Path, str] | None) -> list[Drawn]:
    """Return the pictures for the page, and write them to `files` (folder, type), if given. anchor: of ids."""
    found = []
    with drawing():
        for place, picture in enumerate(pictures):
            svg = inline(picture, f"{anchor}-{place}-")
            found.append(Drawn(picture.title, picture.sentence, picture.legend, svg))
            if files is not None:
                save(picture, files[0] / f"{prefix}-{picture.name}.{files[1]}")
    return found


def in_parallel(function: Callable[[Any], Any], jobs: Sequence[Any]) -> Iterable[Any]:
    """Return function(job) of each job, in the order of the jobs; many jobs are computed on all cores."""
    cores = min(len(os.sched_getaffinity(0)), len(jobs))
    if cores < 2 or len(jobs) < FEW or "mpi4py.MPI" in sys.modules:  # a rank of an MPI job must not start processes
        return map(function, jobs)
    # spawn: this process may have threads, and a process that is forked from it their locks.
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, jobs, chunksize=1))


def compared(comparison: Comparison, pictures: str) -> list[str]:
    """Return the section of a comparison: verdict, table, pictures, and how it was run."""
    told = {name: value for name, value in comparison.environment.items() if name != "launch" or not comparison.command}
    rows = [
        ("command", comparison.command),
        ("budget", comparison.budget),
        ("seeds", ", ".join(map(str, comparison.seeds))),
        ("target", ", ".join(f"{name} {value}" for name, value in comparison.target.items())),
        *environment_of(told),
    ]
    lines, seeds = comparison.lines, len(comparison.seeds)
    known = [each for each in comparison.measures if any(line.has(each) for line in lines)]
    said = verdict(lines[0].name, seeds, known, [line.statistics for line in lines]) if lines else ""
    return [
        page.paragraph(said, "verdict"),
        page.missing(comparison.missing),
        measured(comparison, known),
        page.paragraph(HOW_TO_READ if known else ""),
        pictures,
        page.folded("How it was run", page.facts([row for row in rows if row[1]])),
    ]


def measured(comparison: Comparison, measures: list[Measure]) -> str:
    """Return a table of measures, a row per line; a failed line shows the reason."""
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
            row += [statistic(line.statistics[each.name], each) if line.has(each) else Cell("-") for each in measures]
        rows.append(row)
    return page.table(["line", *([each.title for each in measures] or [""])], rows)


def statistic(found: Statistics, measure: Measure) -> Cell:
    """Return the cell of mean and deviation, with the difference to the first line."""
    spread = f" ± {shown(measure, found.deviation, unit=False)}" if found.deviation else ""
    said = "> " * bool(found.censored) + shown(measure, found.mean) + spread
    same = found.difference == 0 and found.interval in (None, (0, 0))
    if found.difference is not None and not any(
        visible(measure, each) for each in (found.difference, *(found.interval or ()))
    ):
        return Cell(said, "the same" if same else "the same in these digits")
    return Cell(said, difference(measure, found))


OVERVIEW = (  # name, entry of the summary, format, unit
    ("steps", "steps", ",.0f", 1),
    ("train loss", "train_loss", ".4f", 1),
    ("test loss", "test_loss", ".4f", 1),
    ("test accuracy", "test_accuracy", ".2%", 1),
    ("test RMSE", "test_rmse", ".4g", 1),
    ("test RMSE, standardized", "test_rmse_standardized", ".4g", 1),
    ("test return", "test_return", ".4g", 1),
    ("seconds", "seconds", ",.2f", 1),
    ("examples/s", "examples_per_second", ",.0f", 1),
    ("sent, MB in all", "bytes_sent_per_rank", ",.2f", 1e6),
)


def overview(lines: list[DrawnLine], pictures: str) -> list[str]:
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
        cells = [Cell(line.key.label, ", ".join(described(line.records[0])), key=line.key)]
        for _, entry, form, unit in known:
            found = value(line.records[0], entry)
            cells.append(Cell(format(found / unit, form) if math.isfinite(found) else "-"))
        rows.append(cells)
    differ = len({tuple(described(line.records[0])[2:]) for line in lines}) > 1
    note = "These runs have different models or data: losses and scores on other data are not comparable."
    table = page.table(["run", *(column[0] for column in known)], rows)
    return [page.paragraph(ONE_EACH, "verdict"), table, page.missing([note] * differ), pictures]


def one(run: Recorded, pictures: str) -> list[str]:
    """Return the section of a run: its facts, pictures, results and options."""
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
            continue  # an entry of another form
        if said is not None:
            result.append((name, said))
    options = [(str(name), str(value)) for name, value in run.options.items()]
    return [
        page.missing(run.missing),
        page.facts(about),
        pictures,
        page.folded("What it reached, and what it cost", page.facts(result), unfolded=True),
        page.folded("All options", page.facts(options)),
    ]


def environment_of(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows (name, text) of command, commit, MPI and machine, and one row of all versions."""
    names = {"launch": "command", "commit": "commit", "mpi": "MPI", "machine": "machine"}
    rows = [(said, str(told[name])) for name, said in names.items() if told.get(name)]
    versions = ", ".join(f"{name} {value}" for name, value in told.items() if name not in names)
    return [*rows, ("versions", versions)] if versions else rows


def check_pictures(folder: Path, kind: str, force: bool) -> None:
    """Raise UsageError if pictures cannot be written, or would replace a file of another program."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--pictures {folder} is a file; give a folder")
    if parent := unwritable_parent(folder):
        raise UsageError(f"--pictures {folder} cannot be written: no permission in {parent}")
    if folder.exists():
        with blamed_on(f"--pictures {folder} cannot be read"):
            for path in sorted(folder.iterdir()):
                if PICTURE.fullmatch(path.name) and path.suffix == f".{kind}":
                    refuse_foreign(path, "--pictures", force)


def refuse_foreign(path: Path, option: str, force: bool) -> None:
    """Raise UsageError if the file exists and no report has written it, unless `force`. option: in the message."""
    if force or not path.is_file():
        return
    with blamed_on(f"{option} {path} cannot be read"):
        ours = is_ours(path)
    if not ours:
        raise UsageError(f"{option} {path} exists, and no report has written it; give another name, or --force")


def name_of(folder: Path, all_of_them: list[Path]) -> str:
    """Return a run's name: the path of its folder from the common parent of all runs; as given if there is one run."""
    if len(all_of_them) < 2:
        return named(folder)
    common = os.path.commonpath([each.absolute() for each in all_of_them])
    return os.path.relpath(folder.absolute(), common)


def named(folder: Path) -> str:
    """Return a folder as it was given; for "." its own name."""
    return str(folder) if folder.name else folder.absolute().name


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "run"


def title_of(made: Made, lines: list[DrawnLine], comparisons: list[Comparison]) -> str:
    if not comparisons and not made.searches and len(lines) == 1:
        return f"Run {lines[0].name}"
    if len(comparisons) == 1 and not lines and not made.searches:
        return f"Comparison of {counted(len(comparisons[0].lines), 'line')}"
    counts = (made.comparisons, "comparison"), (made.searches, "search"), (len(lines), "run")
    return "Report of " + " and ".join(counted(number, noun) for number, noun in counts if number)
