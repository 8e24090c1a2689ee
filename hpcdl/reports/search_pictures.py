"""The pictures of a search: scores by option, by time and trials, by rung, and as parallel coordinates.

Scores come from the journal (search/search_log_reader.py). The best trial is orange in all pictures; trials that were
stopped early differ from those that were trained longest.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hpcdl.errors import printable
from hpcdl.formatting import counted
from hpcdl.reports.charts import label, scale, ticks, with_unit
from hpcdl.reports.figures import COLOURS, HEIGHT, Key, Picture
from hpcdl.search.importance import importance
from hpcdl.search.search_log_reader import Axis, TrialRow, Trials, best, extent, finite

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
    """Return the pictures of a search for which there are scores."""
    rows = [row for row in trials.rows() if drawable(row.score)]
    if not rows:
        return []
    axes = ordered(trials.axes(), importance(trials.rows(), trials.axes()))
    found = [*over_time(trials), *rungs(trials, rows), *parallel(trials, rows, axes)]
    for place, axis in enumerate(axes[:MOST_OPTIONS]):
        found += against(trials, rows, axis, place)
    return found


def drawable(value: Any) -> bool:
    """True if the value is a number that can be drawn."""
    number = finite(value)
    return number is not None and (number == 0 or 1 / HUGE <= abs(number) <= HUGE)


def ordered(axes: Sequence[Axis], shares: Sequence[tuple[str, float | None]]) -> list[Axis]:
    """Return the options with several values, those first that explain most."""
    by_name = {axis.name: axis for axis in axes}
    found = [by_name[name] for name, _ in shares]
    return [
        axis for axis in found if len(axis.choices) > 1 or (drawable(axis.high - axis.low) and axis.low < axis.high)
    ]


def named(trials: Trials) -> str:
    """Return the label of the score's axis."""
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


def name_of(row: TrialRow) -> str:
    return f"trial {row.trial}"


def full(rows: Iterable[TrialRow]) -> tuple[list[TrialRow], list[TrialRow]]:
    """Split the trials into those that were trained longest, and the others."""
    rows = [*rows]
    most = max(extent(row.amount) for row in rows)
    return [row for row in rows if extent(row.amount) == most], [row for row in rows if extent(row.amount) < most]


def keys_of(trials: Trials, whole: Sequence[TrialRow], early: Sequence[TrialRow], top: TrialRow) -> list[Key]:
    found = [Key(counted(len(whole), "trial") + (", trained longest" if early else ""), BLUE, None)]
    found += [Key(f"{len(early)}, trained less", GREY, None)] if early else []
    return [*found, Key(f"the best of these, {name_of(top)}", ORANGE, None)]


# -- against options -----------------------------------------------------------------------------------------------


def against(trials: Trials, rows: Sequence[TrialRow], axis: Axis, place: int) -> list[Picture]:
    """Return the picture of score against an option, for the trials in which it was active."""
    active = [row for row in rows if has(row, axis)]
    if not active:
        return []
    whole, early = full(active)
    top, factor = best(active, 1)[0], times(trials)
    name, keys = printable(axis.name, allowed=""), keys_of(trials, whole, early, top)
    columns, labels = positions(axis)
    if labels and too_long(labels):
        keys += [Key(f"{i}: {short(text, LONG)}", GREY, None) for i, text in enumerate(labels, 1)]
        labels = [str(i) for i in range(1, 1 + len(labels))]

    def draw(on: Any) -> None:
        for some, colour, size in ((early, GREY, 3.0), (whole, BLUE, 3.6), ([top], ORANGE, 5.5)):
            xs = [columns(row) for row in some]
            on.plot(xs, [factor * (row.score or 0.0) for row in some], "o", color=colour, ms=size, mew=0)
        score_axis(on, trials, [factor * (row.score or 0.0) for row in active])
        if labels:
            on.set_xlim(-0.6, len(labels) - 0.4)
            on.set_xticks(range(len(labels)), labels)
        else:
            wide = range_of(axis, [float(row.values[axis.name]) for row in active])
            if axis.log and wide[0] > 0:
                on.set_xscale("log")
            on.set_xlim(*wide)
            ticks(on, "x", axis.log and wide[0] > 0)
        label(on, short(name, LONG), named(trials))

    some = f" Of {len(rows)} trials it was active in {len(active)}." if len(active) < len(rows) else ""
    return [
        Picture(
            f"option-{place + 1}",
            f"Score against {short(name, LONG)}",
            f"{better(trials)} A cloud that slopes says that the option counts; a flat one that it does not by itself. "
            f"A best that lies at an edge asks for a wider range.{some}",
            draw,
            keys,
        )
    ]


def has(row: TrialRow, axis: Axis) -> bool:
    """True if the trial has a value of this option that can be drawn."""
    value = row.values.get(axis.name)
    return value is not None and (axis.kind == "choice" or drawable(value))


def better(trials: Trials) -> str:
    return "Higher is better." if trials.maximize else "Lower is better."


def positions(axis: Axis) -> tuple[Callable[[TrialRow], float], list[str]]:
    """Return a function from a row to its position on an option's axis, and the names of categories, if any."""
    if axis.kind != "choice":
        return lambda row: float(row.values[axis.name]), []
    place = {str(text): i for i, text in enumerate(axis.choices)}
    labels = [printable(text, allowed="") for text in place]
    # Spread by the golden section, so that points do not overlap: the same in each report.
    return lambda row: place[str(row.values[axis.name])] + 0.5 * ((row.trial * 0.618034) % 1 - 0.5), labels


def range_of(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an option with a margin, so that points at its ends are visible."""
    low, high = min([axis.low, *values]), max([axis.high, *values])
    if axis.log and low > 0:
        more = (high / low) ** 0.03
        return low / more, high * more
    more = 0.03 * (high - low)
    return low - more, high + more


def too_long(names: Sequence[str]) -> bool:
    """True if the names do not fit below an axis."""
    return len(names) * (max(map(len, names)) + 1) > ROOM


def short(text: str, most: int) -> str:
    """Return the text, shortened to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


# -- over time -----------------------------------------------------------------------------------------------------


def over_time(trials: Trials) -> list[Picture]:
    """Return pictures of the best score so far against seconds and against trials."""
    ended = [each for each in trials.ended if drawable(each.score)]
    found = []
    for what, at in (("seconds", [each.piece.at for each in ended]), ("trials", [each.trials for each in ended])):
        if ended and all(each is not None for each in at):
            found.append(so_far(trials, what, np.array(at, float), np.array([each.score for each in ended], float)))
    return found


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

    seconds = "Time is that of the search's jobs, from their beginning; all groups work at once. "
    return Picture(
        f"best-{words}",
        f"Best score against {words}",
        f"{better(trials)} The line is the best that any trial had reached by then, whatever its amount of training; "
        f"each point is a score. {seconds if what == 'seconds' else ''}A line that is flat for long says that more "
        "trials of this kind bring little.",
        draw,
        [Key("the best so far", BLUE), Key("scores of trials", GREY, None)],
    )


# -- over rungs ------------------------------------------------------------------------------------------------------


def rungs(trials: Trials, rows: Sequence[TrialRow]) -> list[Picture]:
    """Return the picture of score against the amount of training, with a line per trial, if there are rungs."""
    lines: list[tuple[TrialRow, list[tuple[float, float]]]] = []
    for row in rows:
        of = [
            (piece.amount, piece.score(trials.seeds))
            for piece in row.pieces
            if piece.amount > 0 and drawable(piece.amount)
        ]
        known = [(amount, times(trials) * score) for amount, score in of if score is not None and drawable(score)]
        lines += [(row, known)] if known else []
    if not any(len(points) > 1 for _, points in lines):
        return []
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
    return [
        Picture(
            "rungs",
            "Score against training, trial by trial",
            f"{better(trials)} A point is a rung; a trial whose line goes on was among the best there. Lines that "
            f"cross late say that early scores mislead: let the first rung be longer (--least).{some}",
            draw,
            [*keys, Key(f"the best, {name_of(top)}", ORANGE)],
        )
    ]


# -- all together ------------------------------------------------------------------------------------------------------


def parallel(trials: Trials, rows: Sequence[TrialRow], axes: Sequence[Axis]) -> list[Picture]:
    """Parallel coordinates: a trial is a line through its values and its score (Inselberg, "The plane with parallel
    coordinates", 1985)."""
    shown = axes[:MOST_AXES]
    if len(shown) < 2 or len(rows) < 2:
        return []
    order = best(rows, MOST_LINES)
    scores = [row.score or 0.0 for row in order]
    low, high = min(scores), max(scores)
    good = max(1, len(order) // GOOD)

    def height(row: TrialRow, axis: Axis) -> float:
        if not has(row, axis):
            return -0.16
        if axis.kind == "choice":
            place = [str(each) for each in axis.choices].index(str(row.values[axis.name]))
            return place / max(1, len(axis.choices) - 1)
        least, most = range_of(axis._replace(log=False), [])
        at = [float(row.values[axis.name]), least, most]
        if axis.log and axis.low > 0 and at[0] > 0:
            at = [math.log(at[0]), math.log(axis.low), math.log(axis.high)]
        return min(1.0, max(0.0, (at[0] - at[1]) / (at[2] - at[1])))

    def draw(on: Any) -> None:
        for place, row in reversed([*enumerate(order)]):
            ys = [height(row, axis) for axis in shown]
            ys.append(((row.score or 0.0) - low) / (high - low) if high > low else 0.5)
            colour, width, alpha = (
                (ORANGE, 2.2, 1.0) if place == 0 else (BLUE, 1.1, 0.9) if place < good else (GREY, 0.6, 0.6)
            )
            on.plot(range(len(ys)), ys, color=colour, lw=width, alpha=alpha)
        frame(on, shown, [f"{times(trials) * each:.4g}" for each in (low, high)], trials.percent)

    keys = [Key(f"the best, {name_of(order[0])}", ORANGE), Key(f"the best {good} of {len(order)}", BLUE)]
    keys += [Key("others", GREY), *(Key(said, GREY, None) for said in legend_of(shown))]
    under = (
        " Below an axis: the option was not active."
        if not all(has(row, axis) for row in order for axis in shown)
        else ""
    )
    return [
        Picture(
            "parallel-coordinates",
            "All trials through their values",
            "Each line is a trial, through its value on each axis and its score on the last. Where lines of the best "
            f"come together, that value counts; where they are spread, it does not.{under}",
            draw,
            keys,
            height=HEIGHT + 0.5,
        )
    ]


def legend_of(axes: Sequence[Axis]) -> list[str]:
    """Return the legend of the axes' numbers."""
    found = []
    for number, axis in enumerate(axes, 1):
        of = f"from {axis.low:.4g} to {axis.high:.4g}" + (", logarithmic" if axis.log else "")
        if axis.kind == "choice":
            names = [short(printable(each, allowed=""), 16) for each in axis.choices]
            of = "from below: " + ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        found.append(f"{number} {short(printable(axis.name, allowed=''), 24)}, {of}")
    return found


def frame(on: Any, axes: Sequence[Axis], ends: Sequence[str], percent: bool) -> None:
    """Draw vertical axes with numbers below, and the lowest and highest score at the last one."""
    from hpcdl.reports.figures import GRID, SOFT

    last = len(axes)
    for place in range(last + 1):
        on.plot([place, place], [0, 1], color=SOFT if place == last else GRID, lw=0.9, zorder=0)
    on.set_xlim(-0.15, last + 0.15)
    on.set_ylim(-0.2, 1.04)
    on.set_xticks(range(last + 1), [*map(str, range(1, last + 1)), "score"])
    on.set_yticks([])
    for side in ("left", "bottom"):
        on.spines[side].set_visible(False)
    unit = " %" if percent else ""
    for y, text, where in ((-0.02, ends[0], "top"), (1.02, ends[1], "bottom")):
        on.text(last + 0.13, y, text + unit, ha="right", va=where)
    label(on, "", "")
