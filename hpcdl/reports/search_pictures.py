"""Pictures of a search: scores by option, by time and trials, by rung, and as parallel coordinates.
The best trial is orange, except over time. By option and by rung, trials trained longest are blue, others grey."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from hpcdl.errors import printable
from hpcdl.files import finite
from hpcdl.formatting import counted
from hpcdl.reports.charts import label, scale, ticks, with_unit
from hpcdl.reports.figures import COLOURS, GRID, HEIGHT, SOFT, Key, Picture
from hpcdl.search.importance import importance
from hpcdl.search.search_log_reader import TrialRow, Trials, best, extent
from hpcdl.search.space import Parameter

BLUE, _, _, _, SKY, ORANGE, GREY = COLOURS
MOST_OPTIONS = 12  # options with a picture, those that explain most
MOST_AXES = 6  # of parallel coordinates, beside the score
MOST_LINES = 400  # trials with a line in a picture; more are unreadable
ROOM = 36  # characters of all names below an axis
LONG = 40  # characters of a name in a legend
GOOD = 8  # the best eighth stands out
FAR = 30  # ratio of the largest to the smallest score from which on their axis is logarithmic
HUGE = 1e30  # larger numbers, and ones below 1 / HUGE, are not drawn: matplotlib would overflow


def pictures_of(trials: Trials) -> list[Picture]:
    """Return the pictures of a search; [] if no trial has a score."""
    rows = [row for row in trials.rows() if drawable(row.score)]
    if not rows:
        return []
    axes = ordered(trials.axes(), importance(trials.rows(), trials.axes()))
    options = (against(trials, rows, axis, place) for place, axis in enumerate(axes[:MOST_OPTIONS], 1))
    return [*chain(over_time(trials), rungs(trials, rows), parallel(trials, rows, axes), *options)]


def drawable(value: Any) -> bool:
    number = finite(value)
    return number is not None and (number == 0 or 1 / HUGE <= abs(number) <= HUGE)


def ordered(axes: Sequence[Parameter], shares: Sequence[tuple[str, float | None]]) -> list[Parameter]:
    """Return the options with several values; the options that explain most come first."""
    by_name = {axis.name: axis for axis in axes}

    def varies(axis: Parameter) -> bool:
        return len(axis.choices) > 1 or (drawable(axis.high - axis.low) and axis.low < axis.high)

    return [by_name[name] for name, _ in shares if varies(by_name[name])]


def named(trials: Trials) -> str:
    return printable(trials.objective.replace("_", " "), allowed="")[:LONG] + (" (%)" if trials.percent else "")


def times(trials: Trials) -> float:
    return 100.0 if trials.percent else 1.0


def score_axis(axes: Any, trials: Trials, scores: Iterable[float]) -> None:
    """Set up the y axis of scores, logarithmic for a large range."""
    values = np.array([*scores])
    log = bool(not trials.percent and values.min() > 0 and values.max() > FAR * values.min())
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y")
    ticks(axes, "y", log)


def against(trials: Trials, rows: Sequence[TrialRow], axis: Parameter, place: int) -> Iterator[Picture]:
    """Yield the picture of score against an option, for the trials in which it was active."""
    active = [row for row in rows if has(row, axis)]
    if not active:
        return
    most = max(extent(row.amount) for row in active)
    longest = [row for row in active if extent(row.amount) == most]
    early = [row for row in active if extent(row.amount) < most]
    top, factor, name = best(active, 1)[0], times(trials), short(printable(axis.name, allowed=""), LONG)
    keys = [Key(counted(len(longest), "trial") + (", trained longest" if early else ""), BLUE, None)]
    keys += [Key(f"{len(early)}, trained less", GREY, None)] if early else []
    keys += [Key(f"the best of these, trial {top.trial}", ORANGE, None)]
    columns, labels = positions(axis)
    if labels and len(labels) * (max(map(len, labels)) + 1) > ROOM:  # they do not fit below the axis
        keys += [Key(f"{i}: {short(text, LONG)}", GREY, None) for i, text in enumerate(labels, 1)]
        labels = [str(i) for i in range(1, 1 + len(labels))]

    def draw(on: Any) -> None:
        for some, colour, size in ((early, GREY, 3.0), (longest, BLUE, 3.6), ([top], ORANGE, 5.5)):
            xs = [columns(row) for row in some]
            on.plot(xs, [factor * (row.score or 0.0) for row in some], "o", color=colour, ms=size, mew=0)
        score_axis(on, trials, [factor * (row.score or 0.0) for row in active])
        if labels:
            on.set_xlim(-0.6, len(labels) - 0.4)
            on.set_xticks(range(len(labels)), labels)
        else:
            wide = range_of(axis, [float(row.values[axis.name]) for row in active])
            log = axis.log and wide[0] > 0
            if log:
                on.set_xscale("log")
            on.set_xlim(*wide)
            ticks(on, "x", log)
        label(on, name, named(trials))

    some = f" The option was active in {len(active)} of {len(rows)} trials." if len(active) < len(rows) else ""
    yield Picture(
        f"option-{place}",
        f"Score against {name}",
        f"{better(trials)} If the points slope, the option matters; if they lie flat, it does not matter by itself. "
        f"If the best trial lies at an edge, try a wider range.{some}",
        draw,
        keys,
    )


def has(row: TrialRow, axis: Parameter) -> bool:
    """True if the trial has a value of this option that can be drawn."""
    value = row.values.get(axis.name)
    return value is not None and (axis.kind == "choice" or drawable(value))


def better(trials: Trials) -> str:
    return "Higher is better." if trials.maximize else "Lower is better."


def positions(axis: Parameter) -> tuple[Callable[[TrialRow], float], list[str]]:
    """Return a function from a row to its position on an option's axis, and the names of categories, if any."""
    if axis.kind != "choice":
        return lambda row: float(row.values[axis.name]), []
    place = {str(text): i for i, text in enumerate(axis.choices)}
    labels = [printable(text, allowed="") for text in place]
    # Spread by the golden section, so that points do not overlap: the same in each report.
    return lambda row: place[str(row.values[axis.name])] + 0.5 * ((row.trial * 0.618034) % 1 - 0.5), labels


def range_of(axis: Parameter, values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an option and of `values`, with a margin, so that points at its ends are visible."""
    low, high = min([axis.low, *values]), max([axis.high, *values])
    if axis.log and low > 0:
        more = (high / low) ** 0.03
        return low / more, high * more
    more = 0.03 * (high - low)
    return low - more, high + more


def short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def over_time(trials: Trials) -> Iterator[Picture]:
    """Yield pictures of the best score so far against seconds and against trials."""
    ended = [each for each in trials.ended if drawable(each.score)]
    score = np.array([each.score for each in ended], float)
    for what, at in (("seconds", [each.piece.at for each in ended]), ("trials", [each.trials for each in ended])):
        if ended and None not in at:
            yield so_far(trials, what, np.array(at, float), score)


def so_far(trials: Trials, what: str, x: np.ndarray, score: np.ndarray) -> Picture:
    """Return the picture of the best score so far against x; what: "seconds" or "trials"."""
    factor, unit = scale(x, what)
    choose = np.maximum if trials.maximize else np.minimum
    top, y = times(trials) * choose.accumulate(score), times(trials) * score
    words = "time" if what == "seconds" else "trials"

    def draw(on: Any) -> None:
        on.plot(x / factor, y, "o", color=GREY, ms=2.6, mew=0, alpha=0.7)
        on.plot([*x / factor, x[-1] / factor], [*top, top[-1]], color=BLUE, drawstyle="steps-post", lw=1.6)
        score_axis(on, trials, y)
        ticks(on, "x")
        on.margins(x=0.03)
        label(on, with_unit(what, unit, "trials that have ended" if what == "trials" else ""), named(trials))

    seconds = "Time is that of the search's jobs, from the beginning; all groups work at once. "
    return Picture(
        f"best-{words}",
        f"Best score against {words}",
        f"{better(trials)} The line is the best score of all trials until then, whatever their amount of training; "
        f"each point is a score. {seconds if what == 'seconds' else ''}If the line is flat for long, more trials of "
        "this kind bring little.",
        draw,
        [Key("the best so far", BLUE), Key("scores of trials", GREY, None)],
    )


def rungs(trials: Trials, rows: Sequence[TrialRow]) -> Iterator[Picture]:
    """Yield the picture of score against the amount of training, with a line per trial, if there are rungs."""
    lines: list[tuple[TrialRow, list[tuple[float, float]]]] = []
    for row in rows:
        pieces = [piece for piece in row.pieces if piece.amount > 0 and drawable(piece.amount)]
        of = [(piece.amount, piece.score(trials.seeds)) for piece in pieces]
        known = [(amount, times(trials) * score) for amount, score in of if score is not None and drawable(score)]
        lines += [(row, known)] if known else []
    if not any(len(points) > 1 for _, points in lines):
        return
    top, at_work = best(rows, 1)[0], len(lines)
    lines = sorted(lines, key=lambda each: (-len(each[1]), -each[1][-1][0]))[:MOST_LINES]
    amounts = sorted({amount for _, points in lines for amount, _ in points})
    log = len(amounts) > 2 and amounts[-1] > 5 * amounts[0]

    def draw(on: Any) -> None:
        for row, points in reversed(lines):
            colour = ORANGE if row is top else BLUE if points[-1][0] == amounts[-1] else GREY
            line = {"lw": 2.2, "zorder": 4} if row is top else {"lw": 0.8, "alpha": 0.9}
            on.plot(*zip(*points, strict=True), color=colour, marker="o", ms=2.4, mew=0, **line)
        score_axis(on, trials, [score for _, points in lines for _, score in points])
        if log:
            on.set_xscale("log")
        if len(amounts) <= 6 and log:
            from matplotlib.ticker import NullLocator

            on.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
            on.xaxis.set_minor_locator(NullLocator())
        else:
            ticks(on, "x", log)
        label(on, "epochs", named(trials))

    last = [row for row, points in lines if points[-1][0] == amounts[-1]]
    keys = [Key(f"{counted(len(last), 'trial')} trained to the end", BLUE), Key("stopped before", GREY)]
    some = f" {MOST_LINES} of {at_work} trials are shown." if at_work > MOST_LINES else ""
    yield Picture(
        "rungs",
        "Score against training, trial by trial",
        f"{better(trials)} A point is a rung; a trial whose line goes on was among the best on it. Lines that "
        f"cross late show that early scores mislead: make the first rung longer (--least).{some}",
        draw,
        [*keys, Key(f"the best, trial {top.trial}", ORANGE)],
    )


def parallel(trials: Trials, rows: Sequence[TrialRow], axes: Sequence[Parameter]) -> Iterator[Picture]:
    """Yield a picture of trials as lines through values (Inselberg, "The plane with parallel coordinates", 1985)."""
    shown = axes[:MOST_AXES]
    if len(shown) < 2 or len(rows) < 2:
        return
    order = best(rows, MOST_LINES)
    scores = [row.score or 0.0 for row in order]
    low, high = min(scores), max(scores)
    good = max(1, len(order) // GOOD)

    def height(row: TrialRow, axis: Parameter) -> float:
        if not has(row, axis):
            return -0.16
        if axis.kind == "choice":
            place = [str(each) for each in axis.choices].index(str(row.values[axis.name]))
            return place / max(1, len(axis.choices) - 1)
        least, most = range_of(replace(axis, log=False), [])
        at = [float(row.values[axis.name]), least, most]
        if axis.log and axis.low > 0 and at[0] > 0:
            at = [math.log(at[0]), math.log(axis.low), math.log(axis.high)]
        return min(1.0, max(0.0, (at[0] - at[1]) / (at[2] - at[1])))

    def draw(on: Any) -> None:
        for place, row in reversed([*enumerate(order)]):
            ys = [height(row, axis) for axis in shown]
            ys.append(((row.score or 0.0) - low) / (high - low) if high > low else 0.5)
            rank = 0 if place == 0 else 1 if place < good else 2
            colour, width, alpha = ((ORANGE, 2.2, 1.0), (BLUE, 1.1, 0.9), (GREY, 0.6, 0.6))[rank]
            on.plot(range(len(ys)), ys, color=colour, lw=width, alpha=alpha)
        frame(on, shown, [f"{times(trials) * each:.4g}{' %' * trials.percent}" for each in (low, high)])

    keys = [Key(f"the best, trial {order[0].trial}", ORANGE), Key(f"the best {good} of {len(order)}", BLUE)]
    keys += [Key("others", GREY), *(Key(said, GREY, None) for said in legend_of(shown))]
    active = all(has(row, axis) for row in order for axis in shown)
    yield Picture(
        "parallel-coordinates",
        "All trials through their values",
        "Each line is a trial, through its value on each axis and its score on the last one. If the lines of the best "
        "trials meet on an axis, its option matters; if they are spread, it does not."
        + ("" if active else " Below an axis: the option was not active."),
        draw,
        keys,
        height=HEIGHT + 0.5,
    )


def legend_of(axes: Sequence[Parameter]) -> list[str]:
    found = []
    for number, axis in enumerate(axes, 1):
        of = f"from {axis.low:.4g} to {axis.high:.4g}" + (", logarithmic" if axis.log else "")
        if axis.kind == "choice":
            names = [short(printable(each, allowed=""), 16) for each in axis.choices]
            of = "from below: " + ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        found.append(f"{number} {short(printable(axis.name, allowed=''), 24)}, {of}")
    return found


def frame(on: Any, axes: Sequence[Parameter], ends: Sequence[str]) -> None:
    """Draw vertical axes with numbers below, and the lowest and highest score at the last one."""
    last = len(axes)
    for place in range(last + 1):
        on.plot([place, place], [0, 1], color=SOFT if place == last else GRID, lw=0.9, zorder=0)
    on.set_xlim(-0.15, last + 0.15)
    on.set_ylim(-0.2, 1.04)
    on.set_xticks(range(last + 1), [*map(str, range(1, last + 1)), "score"])
    on.set_yticks([])
    for side in ("left", "bottom"):
        on.spines[side].set_visible(False)
    for y, text, where in ((-0.02, ends[0], "top"), (1.02, ends[1], "bottom")):
        on.text(last + 0.13, y, text, ha="right", va=where)
    label(on, "", "")
