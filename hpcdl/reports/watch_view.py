"""The view of `hpcdl watch`: some lines, and curves drawn by plotext with characters."""

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hpcdl.errors import UsageError, printable
from hpcdl.formatting import clock, counted, duration
from hpcdl.reports.watching import WatchedRun, Watching, number
from hpcdl.runs.stopping import Budget
from hpcdl.search.search_log_reader import TrialRow, Trials, best, is_search, read, score_text, values_text

NEWS = 60.0  # seconds without any after which that is said
LEAST, MOST = 7, 16  # lines of a curve
BEST = 5  # trials of a search
BESIDE = 100  # columns of a terminal in which two curves stand beside each other
GET_PLOTEXT = "curves need plotext: pip install 'hpcdl[report]'"


def measure(name: str, value: float) -> str:
    """Return a score as text."""
    told = name.replace("_", " ")
    return f"{told} {value:.2%}" if name.endswith("accuracy") else f"{told} {value:.4g}"


def title(name: str, run: WatchedRun) -> str:
    """Return a line about the run."""
    about = run.started
    what = about.get("program") or about.get("strategy")
    model, data = (about.get(key) or run.options.get(key) for key in ("model", "data"))
    parts = [str(what)] if what else []
    parts += [f"{model} on {data}"] if model and data else []
    if number(about.get("ranks"), 0):
        parts.append(counted(about["ranks"], "rank"))
    if about.get("job"):
        parts.append(f"job {about['job']}")
    return f"{name}: {', '.join(parts)}" if parts else name


def progress(run: WatchedRun) -> str:
    """Return the progress: step 120 of 360 (33%), epoch 3.3 of 10."""
    word = "round" if run.rounds else "step"
    of = f" of {run.steps:,} ({min(1, run.step / run.steps):.0%})" if run.steps else ""
    said = f"{word} {run.step:,}{of}"
    epoch = number(run.last.get("epoch"), -1)
    if epoch >= 0 and not run.rounds:
        said += f", epoch {epoch:.2f}" + (f" of {run.epochs:g}" if run.epochs else "")
    return said


def quality(run: WatchedRun) -> str:
    """Return loss and scores."""
    loss = run.last.get("train_loss")
    said = [f"loss {loss:.4g}"] if isinstance(loss, int | float) else []
    said += [measure(name, value) for name, value in run.scores.items() if isinstance(value, int | float)]
    return "  ".join(said)


def speed(run: WatchedRun) -> str:
    """Return examples or steps per second, current and mean."""
    rates = run.rates()
    if rates is None:
        return ""
    each, unit = (run.batch, "examples/s") if run.batch else (1, "rounds/s" if run.rounds else "steps/s")
    now, mean = (f"{rate * each:,.0f}" if rate * each >= 10 else f"{rate * each:.3g}" for rate in rates)
    return f"{now} {unit} lately, {mean} in the mean"


def outlook(run: WatchedRun) -> list[str]:
    """Return lines about the run's state, its expected end, and limits that end it before."""
    state, reason = run.state()
    on = f"go on with --resume {run.folder}" if (run.folder / "checkpoint.h5").exists() else "there is no checkpoint"
    if state == "gone":
        return ["the run is not there any more"]
    if state == "ended":
        return [f"ended: {reason}" if reason else "ended"]
    if state == "stopped":
        return [f"stopped: {reason}; {on}"]
    quiet = f"no news for {duration(run.quiet())}" if run.quiet() >= NEWS else ""
    if state == "dead":
        return [f"seems dead: no process writes to it, and it has not ended; {on}"]
    left, said = run.left(), [quiet] if quiet else []
    if left is not None:
        budget = f" (--budget {run.options['budget']})" if run.budget != Budget() else ""
        said.append(f"{duration(left)} left{budget}, until {clock(run.now() + left, run.now())}")
    for what, seconds in run.ends():
        when = f"{what} ends it in {duration(seconds)}" if seconds > 0 else f"{what} should have ended it"
        if left is None or seconds <= 0:
            said.append(when)
        elif left <= seconds:
            said.append(f"{when}, {duration(seconds - left)} to spare")
        else:
            steps = run.step + int(((run.steps or run.step) - run.step) * seconds / left)
            said.append(f"{when}, at {'round' if run.rounds else 'step'} {steps:,} or so: too early")
    return said or ["goes on"]


def remarks(watching: Watching, run: WatchedRun) -> list[str]:
    """Return remarks about other runs and unreadable files."""
    said = []
    if not watching.single:
        said.append(f"{watching.done} of {counted(len(watching.runs), 'run')} done; this one has changed last")
    if run.lines.broken:
        said.append(f"{counted(run.lines.broken, 'line')} of {run.lines.path} cannot be read")
    return [*said, run.problem] if run.problem else said


def searches(watching: Watching, count: int) -> list[str]:
    """Of each folder that is a search how far that is, and so many of its best trials."""
    said = []
    for folder in map(Path, watching.folders):
        if not is_search(folder):
            continue
        with contextlib.suppress(UsageError):
            found = read(folder)
            rows = found.rows()
            ended, failed = (sum(row.status == each for row in rows) for each in ("ended", "failed"))
            of = f" of {found.asked}" if found.asked is not None else ""
            said.append(f"{named(folder)}: {ended}{of} trials ended" + (f", {failed} failed" if failed else ""))
            said += [f"  {best_text(found, row)}" for row in best(rows, count)]
    return said


def best_text(found: Trials, row: TrialRow) -> str:
    """Return a line about a trial of a search."""
    epochs = f", {counted(row.amount, 'epoch', 'g')}" if row.amount else ""
    score = f"{found.objective.replace('_', ' ')} {score_text(found, row.score, row.spread)}"
    return f"trial {row.trial}{epochs}: {score}, {values_text(row)}"


def named(folder: Path) -> str:
    """The folder's name, of "." too."""
    return folder.name or folder.absolute().name


def facts(watching: Watching, run: WatchedRun) -> list[str]:
    """Return the state in lines."""
    found = [title(watching.name, run), progress(run), quality(run), speed(run), *outlook(run)]
    found += [*remarks(watching, run), *searches(watching, BEST)]
    return [printable(line, allowed="") for line in found if line]


def news(watching: Watching, run: WatchedRun) -> str:
    """Return the state in one line."""
    rates = speed(run).split(" lately")[0]
    found = [f"{watching.name}: {progress(run)}", quality(run), rates, "; ".join(outlook(run)), *remarks(watching, run)]
    found += searches(watching, 0)
    return printable("  ".join(filter(None, found)), allowed="")


def can_draw(console: Console) -> str:
    """Return why no curves can be drawn; "" if they can."""
    if importlib.util.find_spec("plotext") is None:
        return GET_PLOTEXT
    return "" if "utf" in console.encoding.lower() else f"curves need a terminal of UTF-8, not {console.encoding}"


def curve(name: str, points: list[tuple[float, float]], width: int, height: int, by: str = "step") -> Text:
    """A curve of so many columns and lines; by: what a step is called."""
    import plotext

    plotext.terminal.limit(False, False)  # the size is ours to choose
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(f"{name.replace('_', ' ')}, by {by}")
    steps = [x for x, _ in points]
    ticks = sorted({round(steps[0] + (steps[-1] - steps[0]) * each / 4) for each in range(5)})
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
    signal = figure.signal(steps, [y for _, y in points], marker="braille")
    figure.draw(signal.lines())
    return Text(figure.build().string(colorless=True).rstrip("\n"), no_wrap=True, overflow="crop")


def view(watching: Watching, run: WatchedRun, console: Console) -> Any:
    """Return the whole view for a terminal of this size."""
    lines, why = facts(watching, run), can_draw(console)
    text = [Text(lines[0], style="bold"), *map(Text, lines[1:])]
    if why:
        return Group(*text, Text(why, style="dim"))
    curves = {name: found.drawn() for name, found in run.curves.items() if found.drawn()}
    names, by = [name for name in ("loss", run.score) if name in curves], "round" if run.rounds else "step"
    width = console.width
    room = console.height - 1 - sum(len(line.wrap(console, width)) for line in text)
    beside = len(names) == 2 and width >= BESIDE
    names = names if beside else names[: max(1, room // LEAST)]
    columns, rows = (width // 2 - 1, room) if beside else (width, room // max(1, len(names)))
    drawn = [curve(name, curves[name], columns, min(MOST, max(LEAST, rows)), by) for name in names]
    if not beside:
        return Group(*text, *drawn)
    table = Table.grid(padding=(0, 1))
    table.add_row(*drawn)
    return Group(*text, table)
