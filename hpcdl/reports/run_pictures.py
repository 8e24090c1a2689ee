"""Pictures of one run: what it learned, where its time went, who sent what to whom, and what memory it held.
If the run lacks the data of curves, times, timeline or matrix, `run.missing` says so, and why if known."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from hpcdl.formatting import counted
from hpcdl.reports import charts
from hpcdl.reports.charts import Curve, bars, curves, group_size, over_ranks
from hpcdl.reports.downsampling import number
from hpcdl.reports.figures import COLOURS, Key, Picture, look
from hpcdl.reports.run_reader import Recorded
from hpcdl.reports.timeline import KINDS, Lanes, read_timeline

BLUE, RED, GREEN, PURPLE, SKY, ORANGE, GREY = COLOURS
MOST_RANKS = 1_000_000  # of a list in a summary that is read
TIMES = (  # entry of the summary, name, colour
    ("compute", "computing", GREEN),
    ("communication", "communication", BLUE),
    ("idle", "idle", ORANGE),
    ("data", "waiting for data", PURPLE),
    ("bookkeeping", "evaluation, agreement, checkpoints", SKY),
)
BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
MEMORY = (("parameters", BLUE), ("gradients", ORANGE), ("optimizer", GREEN), ("activations", PURPLE))
AGAINST = {"step": ("steps", "steps"), "seconds": ("seconds", "time"), "bytes": ("bytes", "bytes sent")}
MEASURES = {  # name in a sentence, title, which is better
    "loss": ("loss", "Loss (mean per example)", "lower"),
    "accuracy": ("accuracy", "Accuracy", "higher"),
    "rmse": ("RMSE", "Root mean squared error", "lower"),
    "rmse_standardized": ("RMSE, standardized", "Root mean squared error of standardized outputs", "lower"),
    "return": ("return", "Mean return of evaluations", "higher"),
}
COSTS = {
    "steps": "A step is one update.",
    "time": "Time is that of steps and their data, without evaluations.",
    "bytes sent": "Bytes are what all ranks together have sent.",
}
SHADES = {  # of a micro-batch: kind, and whether its chunk is an odd one
    ("F", 0): ("forward", BLUE),
    ("B", 0): ("backward", RED),
    ("F", 1): ("forward, every other chunk", SKY),
    ("B", 1): ("backward, every other chunk", ORANGE),
}


def pictures_of(run: Recorded, index: int = 0) -> list[Picture]:
    """Return all pictures that the run has data for; `run.missing` gets what it lacks. index: of colour and style."""
    shown = learning(run, index), rate(run, index), where_time_went(run), timeline(run), who_to_whom(run), sizes(run)
    return [*chain(*shown, memory(run), staleness(run), consensus(run, index), hidden(run))]


def learning(run: Recorded, index: int) -> Iterator[Picture]:
    for measure in filter(None, ("loss", run.score)):
        for x in AGAINST:
            yield from against(run, measure, x, index)
    if len(run.evaluations) and not np.isfinite(run.evaluations.mean["bytes"]).any():
        run.missing.append("no curves against bytes: the evaluations do not say how much was sent before")
    if not len(run.evaluations) and len(run.steps):
        run.missing.append("no scores: there was no evaluation yet")


def against(run: Recorded, measure: str, x: str, index: int) -> Iterator[Picture]:
    colour = look(index)[0]
    lines, keys = [], []
    if measure == "loss":
        of = run.evaluations if x == "bytes" or not len(run.steps) else run.steps
        at, mean = of.mean[x], of.mean["train_loss"]
        if drawable(at, mean):
            band = of is run.steps and of.width > 1
            low, high = (of.low["train_loss"], of.high["train_loss"]) if band else (None, None)
            grey = GREY if colour != GREY else SKY
            lines.append(Curve(at, mean, grey, 0, low, high, width=1.0))
            keys.append(Key("training" + (f", mean and range of {of.width:,} steps" if band else ""), grey))
    for style, part in enumerate(("test", "validation")):
        at, mean = run.evaluations.mean[x], run.evaluations.mean[f"{part}_{measure}"]
        if drawable(at, mean):
            lines.append(Curve(at, mean, colour, style, marked=True))
            keys.append(Key(part, colour, style))
    if lines:
        more = " A training curve far below the test curve is overfitting." if (measure, x) == ("loss", "step") else ""
        words, (_, title, better) = AGAINST[x][1], MEASURES[measure]
        sense = f"{better.capitalize()} is better; a curve that is steep at the left learns at low cost."
        yield learning_curve(measure, x, f"{title} against {words}", f"{sense} {COSTS[words]}{more}", lines, keys)


def learning_curve(
    measure: str, x: str, title: str, sentence: str, lines: Sequence[Curve], keys: Sequence[Key]
) -> Picture:
    """Return a picture of a measure against steps, time or bytes; y may be logarithmic only if lower is better."""
    (quantity, words), (name, _, better) = AGAINST[x], MEASURES[measure]
    return Picture(
        f"{measure}-{words.replace(' ', '-')}",
        title,
        sentence,
        lambda axes: curves(axes, lines, quantity, name, measure == "accuracy", free=better == "lower"),
        keys,
    )


def drawable(x: np.ndarray, y: np.ndarray) -> bool:
    return bool((np.isfinite(x) & np.isfinite(y)).any())


def rate(run: Recorded, index: int) -> Iterator[Picture]:
    x, y = run.steps.mean["step"], run.steps.mean["learning_rate"]
    if drawable(x, y):
        yield Picture(
            "learning-rate",
            "Learning rate",
            "How far an update moves along the gradient. It often rises at first (warm-up) and falls later, so that "
            "the last updates are fine ones (--schedule).",
            lambda axes: curves(axes, [Curve(x, y, look(index)[0])], "steps", "learning rate", free=False),
        )
    elif len(run.steps):
        run.missing.append("no learning rate: the run has not recorded it (an older version)")


def as_list(value: Any) -> list[Any] | None:
    """Return the numbers of a summary's list, unknown ones as NaN; None if it has none, or is too long."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_RANKS:
        return None
    numbers = [number(each) for each in value]
    return numbers if np.isfinite(numbers).any() else None


def where_time_went(run: Recorded) -> Iterator[Picture]:
    of: dict[str, Any] = {name: as_list(run.summary.get(f"{name}_seconds_per_rank")) for name, _, _ in TIMES}
    if of["compute"] is None:
        run.missing += ["no times of ranks: the summary does not have them"] * bool(run.summary)
        return
    if of["idle"] and of["communication"]:
        of["communication"] = inside = np.array(of["communication"])
        common = min(len(of["idle"]), len(inside))
        inside[:common] = np.maximum(inside[:common] - np.nan_to_num(of["idle"][:common]), 0)
    shown = [each for each in TIMES if of[each[0]] is not None]
    without = "" if of["bookkeeping"] else " The time of evaluations and checkpoints is not recorded."
    yield Picture(
        "time-of-ranks",
        "Where the time of each rank went",
        "Computing is the work itself. Idle time is spent blocked until messages of other ranks come: a rank with "
        f"much idle time waits for a slower one. Communication is the rest of the time inside calls.{without}",
        lambda axes: over_ranks(axes, [(of[name], colour) for name, _, colour in shown], "time", "seconds"),
        [Key(said, colour, None) for _, said, colour in shown],
    )


def timeline(run: Recorded) -> Iterator[Picture]:
    path = run.folder / "trace.json"
    if not path.exists():
        why = ": --trace 0" if str(run.options.get("trace")) == "0" else ""
        run.missing.append(f"no timeline: there is no trace.json{why}")
        return
    try:
        found = read_timeline(path)
    except OSError as error:
        run.missing.append(f"no timeline: trace.json: {error.strerror}")
        return
    if found.cut:
        shown = "; the ranks before the cut are shown" if found.ranks else ""
        run.missing.append(f"trace.json is cut off or no trace{shown}")
    elif not found.ranks:
        run.missing.append("no timeline: trace.json has no spans")
    if found.ranks:
        yield last_steps(found)
    if found.boxes:
        yield micro_batches(found)


def last_steps(found: Lanes) -> Picture:
    colours = dict(zip(KINDS, (GREEN, PURPLE, SKY, BLUE), strict=True))
    heights = dict.fromkeys(KINDS, (-0.4, 0.08)) | {"communication": (0.12, 0.4)}
    layers = [(found.spans.get(name, []), colours[name], *heights[name]) for name in KINDS]
    some = f" {len(found.ranks)} of {found.of:,} ranks are shown." if found.of > len(found.ranks) else ""
    return Picture(
        "timeline",
        "The last steps of all ranks in the trace",
        "Each rank is a row: steps and evaluations at the top, operations of communication at the bottom, from call to "
        "completion. A step over a long bar of communication waits for it, or hides it behind computing; a rank that "
        f"starts later than other ranks makes them wait.{some}",
        lambda axes: charts.lanes(axes, [*map(str, found.ranks)], layers, found.seconds),
        [Key(name, colours[name], None) for name in KINDS if found.spans.get(name)],
        height=1.5 + 0.26 * max(3, min(12, len(found.ranks))),
    )


def micro_batches(found: Lanes) -> Picture:
    cells = [
        (box.rank, max(box.start, 0.0), min(box.stop, found.box_seconds), str(box.number), colour)
        for box in found.boxes
        for _, colour in [SHADES[box.kind, box.chunk % 2]]
    ]
    odd = any(box.chunk % 2 for box in found.boxes)
    return Picture(
        "pipeline",
        "Micro-batches in the pipeline's last step",
        "Each row is a stage, each box a micro-batch, with its number if there is room. Gaps are the bubble: "
        "the stage waits for a neighbour. More micro-batches make the bubble smaller.",
        lambda axes: charts.boxes(axes, [*map(str, found.stages)], cells, found.box_seconds),
        [Key(name, colour, None) for (_, each), (name, colour) in SHADES.items() if each <= odd],
        height=1.3 + 0.3 * max(2, min(12, len(found.stages))),
    )


def who_to_whom(run: Recorded) -> Iterator[Picture]:
    """Yield a picture of the bytes that each rank sent to each; if there are many ranks, neighbours are added up."""
    sent = run.summary.get("sent_to_per_rank")
    if not isinstance(sent, list) or not sent or len(sent) > MOST_RANKS:
        if run.summary and run.said("ranks") != 1:
            why = "too many pairs" if "sent_to_per_rank" in run.summary else "an older version"
            run.missing.append(f"no matrix of who sent to whom: the summary does not have it ({why})")
        return
    count, size = len(sent), group_size(len(sent))
    table = np.zeros((-(-count // size),) * 2)
    for rank, row in enumerate(sent):
        for each in row if isinstance(row, list) else []:
            if isinstance(each, list) and len(each) > 1:
                to, amount = number(each[0]), number(each[1])
                if 0 <= to < count and amount > 0:
                    table[rank // size, int(to) // size] += amount
    if not table.any():
        why = "no sent message was counted (shared memory, or a library's own)"
        run.missing.append(f"no matrix of who sent to whom: {why}")
        return
    factor, unit = charts.scale(table, "bytes")
    yield Picture(
        "who-to-whom",
        "Who sent how much to whom",
        "A row is a sender, a column a receiver; an empty cell has sent nothing. A ring lies beside the diagonal, a "
        "server is a full row and column. Bytes that pass through shared memory, or inside a library's collective, "
        "are not counted.",
        lambda axes: charts.matrix(axes, table / factor, size, unit),
        height=3.4,
    )


def sizes(run: Recorded) -> Iterator[Picture]:
    each, powers = run.summary.get("message_sizes_per_rank"), defaultdict[int, float](float)
    for counts in each if isinstance(each, list) else []:
        for size, count in counts.items() if isinstance(counts, dict) else []:
            if str(size).isdecimal() and len(str(size)) < 19 and (amount := number(count)) > 0:
                powers[int(size).bit_length()] += amount
    if not powers:
        return
    columns = range(min(powers), max(powers) + 1)
    names = [f"{2 ** ((power - 1) % 10)}{BINARY[(power - 1) // 10]}" if power else "0" for power in columns]
    heights = np.array([powers[power] for power in columns])
    yield Picture(
        "message-sizes",
        "Sizes of the messages that all ranks sent",
        "A bar counts the messages of up to its number of bytes, and of more than half of that. Small messages cost "
        "their latency, large ones their bytes: many small messages are worth combining.",
        lambda axes: bars(axes, names, [(heights, BLUE)], "bytes of a message", "messages", "messages"),
    )


def memory(run: Recorded) -> Iterator[Picture]:
    kinds = run.summary.get("memory_bytes_per_rank")
    of = {name: as_list(kinds.get(name)) for name, _ in MEMORY} if isinstance(kinds, dict) else {}
    there = [(name, values, colour) for name, colour in MEMORY if (values := of.get(name))]
    if not any(np.nansum(values) > 0 for _, values, _ in there):
        return
    process = as_list(run.summary.get("peak_memory_bytes_per_rank"))
    peak = f" The whole process had {np.nanmax(process) / 2**20:,.0f} MiB at most." if process else ""
    yield Picture(
        "memory",
        "Memory that the steps of each rank held, by kind",
        "The peak of each kind of memory, stacked. A kind that shrinks with more ranks is cut over the ranks "
        f"(sharding, pipelines); a kind that does not is copied.{peak}",
        lambda axes: over_ranks(axes, [(values, colour) for _, values, colour in there], "memory", "memory"),
        [Key(name, colour, None) for name, _, colour in there],
    )


def staleness(run: Recorded) -> Iterator[Picture]:
    counts = as_list(run.summary.get("staleness_histogram"))
    if counts is None or not np.nansum(counts) > 0:
        return
    firsts = range(0, len(counts), group_size(len(counts)))
    heights = np.array([np.nansum(counts[first : first + firsts.step]) for first in firsts])
    yield Picture(
        "staleness",
        "Staleness of the updates",
        "How many updates other workers made after a worker had read the parameters and before its own update. At 0 "
        "no update was missed; the further to the right, the smaller the learning rate has to be.",
        lambda axes: bars(axes, [*map(str, firsts)], [(heights, BLUE)], "updates missed", "pushes", "messages"),
    )


def consensus(run: Recorded, index: int) -> Iterator[Picture]:
    table, keys, lines = run.evaluations.mean, [], []
    for style, (name, said) in enumerate((("", "when evaluated"), ("_max", "at most so far"))):
        distance = table[f"consensus_distance{name}"]
        if drawable(table["step"], distance):
            lines.append(Curve(table["step"], distance, look(index)[0], style, marked=True))
            keys.append(Key(said, look(index)[0], style))
    if lines:
        yield Picture(
            "consensus",
            "Consensus distance of the replicas",
            "How far the replicas' parameters are from their mean. The distance falls as the replicas agree; if it "
            "stays large, they learn apart, and their mean is worse than each of them.",
            lambda axes: curves(axes, lines, "steps", "distance"),
            keys,
        )


def hidden(run: Recorded) -> Iterator[Picture]:
    share = number(run.summary.get("hidden_fraction"))
    if not 0 <= share <= 1:
        return

    def draw(axes: Any) -> None:
        for left, part, colour in ((0.0, share, GREEN), (share, 1 - share, ORANGE)):
            axes.barh([0], [100 * part], 0.6, left=100 * left, color=colour)
        axes.set_yticks([])
        axes.set_xlim(0, 100)
        axes.set_ylim(-0.5, 0.5)
        charts.ticks(axes, "x")
        charts.label(axes, "share of the exchange's time (%)", "")

    yield Picture(
        "hidden",
        "How much of the exchange was hidden behind computing",
        "The hidden part goes on while gradients are computed; ranks wait for the rest (--overlap).",
        draw,
        [Key(f"hidden, {share:.0%}", GREEN, None), Key("waited for", ORANGE, None)],
        height=1.2,
    )


def described(run: Recorded) -> Sequence[str]:
    """Return strategy, ranks, model and data of a run, as far as known."""
    strategy, ranks = run.said("strategy"), run.said("ranks")
    said = [str(strategy).replace("_", " ") if strategy else "unknown strategy"]
    if isinstance(ranks, int):
        said.append(counted(ranks, "rank", ","))
    return said + [str(found) for name in ("model", "data") if (found := run.said(name) or run.options.get(name))]
