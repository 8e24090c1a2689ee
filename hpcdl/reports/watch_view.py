"""The view of `hpcdl watch`: some lines of text, and curves that plotext draws with characters."""

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
from hpcdl.search.search_log_reader import best, is_search, read, score_text, values_text

NEWS = 60.0  # seconds without a change after which the view says so
LEAST, MOST = 7, 16  # lines of a curve
BEST = 5  # trials of a search
BESIDE = 100  # fewest columns for two curves side by side


def title(name: str, run: WatchedRun) -> str:
    about = run.started
    model, data = (about.get(key) or run.options.get(key) for key in ("model", "data"))
    parts = [
        str(about.get("program") or about.get("strategy") or ""),
        f"{model} on {data}" if model and data else "",
        counted(about["ranks"], "rank") if number(about.get("ranks"), 0) else "",
        f"job {about['job']}" if about.get("job") else "",
    ]
    return f"{name}: {', '.join(filter(None, parts))}" if any(parts) else name


def progress(run: WatchedRun) -> str:
    """Return the progress: step 120 of 360 (33%), epoch 3.33 of 10."""
    word = "round" if run.rounds else "step"
    of = f" of {run.steps:,} ({min(1, run.step / run.steps):.0%})" if run.steps else ""
    said = f"{word} {run.step:,}{of}"
    epoch = number(run.last.get("epoch"), -1)
    if epoch >= 0 and not run.rounds:
        said += f", epoch {epoch:.2f}" + (f" of {run.epochs:g}" if run.epochs else "")
    return said


def quality(run: WatchedRun) -> str:
    loss = run.last.get("train_loss")
    said = [f"loss {loss:.4g}"] if isinstance(loss, int | float) else []
    for name, value in run.scores.items():
        if isinstance(value, int | float):
            said.append(f"{name.replace('_', ' ')} {format(value, '.2%' if name.endswith('accuracy') else '.4g')}")
    return "  ".join(said)


def speed(run: WatchedRun) -> str:
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
        return ["the run's files are gone"]
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
        when = f"{what} ends it in {duration(seconds)}" if seconds > 0 else f"{what} should have ended it already"
        if left is None or seconds <= 0:
            said.append(when)
        elif left <= seconds:
            said.append(f"{when}, {duration(seconds - left)} to spare")
        else:
            steps = run.step + int(((run.steps or run.step) - run.step) * seconds / left)
            said.append(f"{when}, at {'round' if run.rounds else 'step'} {steps:,} or so: too early")
    return said or ["goes on"]


def remarks(watching: Watching, run: WatchedRun) -> list[str]:
    said = []
    if not watching.single:
        said.append(f"{watching.done} of {counted(len(watching.runs), 'run')} done; this one has changed last")
    if run.lines.broken:
        said.append(f"{counted(run.lines.broken, 'line')} of {run.lines.path} cannot be read")
    return [*said, run.problem] if run.problem else said


def searches(watching: Watching, count: int) -> list[str]:
    """Return the progress of each folder that is a search, and its `count` best trials."""
    said = []
    for folder in map(Path, watching.folders):
        if not is_search(folder):
            continue
        with contextlib.suppress(UsageError):
            found = read(folder)
            rows = found.rows()
            ended, failed = (sum(row.status == each for row in rows) for each in ("ended", "failed"))
            of = f" of {found.asked}" if found.asked is not None else ""
            more = f", {failed} failed" if failed else ""
            said.append(f"{folder.name or folder.absolute().name}: {ended}{of} trials ended{more}")
            for row in best(rows, count):
                epochs = f", {counted(row.amount, 'epoch', 'g')}" if row.amount else ""
                score = f"{found.objective.replace('_', ' ')} {score_text(found, row.score, row.spread)}"
                said.append(f"  trial {row.trial}{epochs}: {score}, {values_text(row)}")
    return said


def facts(watching: Watching, run: WatchedRun) -> list[str]:
    found = [title(watching.name, run), progress(run), quality(run), speed(run), *outlook(run)]
    found += [*remarks(watching, run), *searches(watching, BEST)]
    return [printable(line, allowed="") for line in found if line]


def news(watching: Watching, run: WatchedRun) -> str:
    rates = speed(run).split(" lately")[0]
    found = [f"{watching.name}: {progress(run)}", quality(run), rates, "; ".join(outlook(run)), *remarks(watching, run)]
    found += searches(watching, 0)
    return printable("  ".join(filter(None, found)), allowed="")


def can_draw(console: Console) -> str:
    """Return why no curves can be drawn; "" if they can."""
    if importlib.util.find_spec("plotext") is None:
        return "curves need plotext: pip install 'hpcdl[report]'"
    return "" if "utf" in console.encoding.lower() else f"curves need a UTF-8 terminal, not {console.encoding}"


def curve(name: str, points: list[tuple[float, float]], width: int, height: int, by: str = "step") -> Text:
    """Return a curve of `width` columns and `height` lines. by: "step" or "round", for the title."""
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
    lines, why = facts(watching, run), can_draw(console)
    text = [Text(lines[0], style="bold"), *map(Text, lines[1:])]
    if why:
        return Group(*text, Text(why, style="dim"))
    curves = {name: points for name in run.curves if (points := run.points(name))}
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
