"""The pictures of one run: what it learned, where its time went, who sent what to whom, and what it held.

Each is made where the run has what it shows; else a line says what is missing and which option gives it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.formatting import counted
from hpcdl.reports import charts
from hpcdl.reports.charts import Curve, bars, curves, grouped, ranks_label
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
MEMORY = (("parameters", BLUE), ("gradients", ORANGE), ("optimizer", GREEN), ("activations", PURPLE))
AGAINST = {"step": ("steps", "steps"), "seconds": ("seconds", "time"), "bytes": ("bytes", "bytes sent")}
TITLES = {"loss": "Loss (mean per example)", "accuracy": "Accuracy", "rmse": "Root mean squared error"}
TITLES["return"] = "Mean return of evaluations"
BETTER = {"loss": "lower", "accuracy": "higher", "rmse": "lower", "return": "higher"}
NAMES = {"loss": "loss", "accuracy": "accuracy", "rmse": "RMSE", "return": "return"}
COSTS = {
    "steps": "A step is one update.",
    "time": "Time is that of steps and their data, without evaluations.",
    "bytes sent": "Bytes are what all ranks together have sent.",
}


def pictures_of(run: Recorded, index: int = 0) -> list[Picture]:
    """All that the run has; what it lacks goes to `run.missing`. index: the run's colour and style."""
    found = [*learning(run, index), *rate(run, index), *where_time_went(run)]
    timeline = read_trace(run)
    if timeline is not None:
        found += [*lanes_of(timeline), *micro_batches(timeline)]
    found += [*who_to_whom(run), *sizes(run), *memory(run), *staleness(run), *consensus(run, index), *hidden(run)]
    return found


def learning(run: Recorded, index: int) -> list[Picture]:
    """Loss and score against steps, seconds and bytes."""
    found = []
    for measure in ("loss", run.score):
        for x in AGAINST if measure else ():
            picture = against(run, measure, x, index)
            if picture is not None:
                found.append(picture)
    if len(run.evaluations) and not np.isfinite(run.evaluations.mean["bytes"]).any():
        run.missing.append("nothing against bytes: what was sent by an evaluation is not known")
    if not len(run.evaluations) and len(run.steps):
        run.missing.append("no scores: there was no evaluation yet")
    return found


def against(run: Recorded, measure: str, x: str, index: int) -> Picture | None:
    """One of them; None where there is nothing to draw."""
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
    for part, name, style in (("test", "test", 0), ("validation", "validation", 1)):
        at, mean = run.evaluations.mean[x], run.evaluations.mean[f"{part}_{measure}"]
        if drawable(at, mean):
            lines.append(Curve(at, mean, colour, style, marked=True))
            keys.append(Key(name, colour, style))
    if not lines:
        return None
    quantity, words = AGAINST[x]
    percent = measure == "accuracy"
    sense = f"{BETTER[measure].capitalize()} is better"
    more = " A training curve far below the test curve is overfitting." if measure == "loss" and x == "step" else ""
    return Picture(
        f"{measure}-{words.replace(' ', '-')}",
        f"{TITLES[measure]} against {words}",
        f"{sense}; the steeper at the left, the less it costs to learn. {COSTS[words]}{more}",
        lambda axes: curves(axes, lines, quantity, NAMES[measure], percent, free=BETTER[measure] == "lower"),
        keys,
    )


def drawable(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether there is a point to draw."""
    return bool((np.isfinite(x) & np.isfinite(y)).any())


def rate(run: Recorded, index: int) -> list[Picture]:
    """The learning rate against steps."""
    x, y = run.steps.mean["step"], run.steps.mean["learning_rate"]
    if not drawable(x, y):
        if len(run.steps):
            run.missing.append("no learning rate: the run has not recorded it (an older version)")
        return []
    return [
        Picture(
            "learning-rate",
            "Learning rate",
            "How far an update moves along the gradient. It often rises at first (warm-up) and falls later, so that "
            "the last updates are fine ones (--schedule).",
            lambda axes: curves(axes, [Curve(x, y, look(index)[0])], "steps", "learning rate", free=False),
        )
    ]


def of_ranks(run: Recorded, name: str) -> list[Any] | None:
    """An entry of the summary that is a list with a number, or null, for each rank; None where it is none."""
    return as_list(run.summary.get(name))


def as_list(value: Any) -> list[Any] | None:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_RANKS:
        return None
    numbers = [number(each) for each in value]
    return numbers if np.isfinite(numbers).any() else None


def where_time_went(run: Recorded) -> list[Picture]:
    """Seconds of each rank by what it did in them."""
    of = {name: of_ranks(run, f"{name}_seconds_per_rank") for name, _, _ in TIMES}
    there = [values for values in of.values() if values is not None]
    if of["compute"] is None:
        if run.summary:
            run.missing.append("no times of ranks: the summary does not have them")
        return []
    count = max(map(len, there))
    numbers = {name: np.array([*values, *[np.nan] * (count - len(values))]) for name, values in of.items() if values}
    if "idle" in numbers and "communication" in numbers:
        numbers["communication"] = np.maximum(numbers["communication"] - np.nan_to_num(numbers["idle"]), 0)
    names = grouped(numbers["compute"])[0]
    parts = [(grouped(numbers[name])[1], colour) for name, _, colour in TIMES if name in numbers]
    without = "" if "bookkeeping" in numbers else " What evaluations and checkpoints took is not recorded."
    return [
        Picture(
            "time-of-ranks",
            "Where the time of each rank went",
            "Computing is the work itself. Idle is blocked until messages of others came: a rank with much of it waits "
            f"for a slower one, and communication is the rest of the time inside calls.{without}",
            lambda axes: bars(axes, names, parts, ranks_label(count), "time", "seconds"),
            [Key(said, colour, None) for name, said, colour in TIMES if name in numbers],
        )
    ]


def read_trace(run: Recorded) -> Lanes | None:
    """The timeline of trace.json, where there is one."""
    path = run.folder / "trace.json"
    if not path.exists():
        why = ": --trace 0" if str(run.options.get("trace")) == "0" else ""
        run.missing.append(f"no timeline: there is no trace.json{why}")
        return None
    try:
        found = read_timeline(path)
    except OSError as error:
        run.missing.append(f"no timeline: trace.json: {error.strerror}")
        return None
    if found.cut:
        run.missing.append(
            "trace.json is cut off or no trace" + ("; the ranks before the cut are shown" if found.ranks else "")
        )
    elif not found.ranks:
        run.missing.append("no timeline: trace.json has no spans")
    return found if found.ranks else None


def lanes_of(timeline: Lanes) -> list[Picture]:
    """The last steps of all ranks."""
    colours = dict(zip(KINDS, (GREEN, PURPLE, SKY, BLUE), strict=True))
    layers = []
    for name in KINDS:
        low, high = (0.12, 0.4) if name == "communication" else (-0.4, 0.08)
        layers.append((timeline.spans.get(name, []), colours[name], low, high))
    some = f" {len(timeline.ranks)} of {timeline.of:,} ranks are shown." if timeline.of > len(timeline.ranks) else ""
    return [
        Picture(
            "timeline",
            "The last steps of all ranks in the trace",
            "Each rank is a row: above what it is in, below which operations of communication are under way, from call "
            "to completion. A step over a long bar of communication waits, or hides it behind computing; a rank that "
            f"starts later than others makes them wait.{some}",
            lambda axes: charts.lanes(axes, [str(rank) for rank in timeline.ranks], layers, timeline.seconds),
            [Key(name, colours[name], None) for name in KINDS if timeline.spans.get(name)],
            height=1.5 + 0.26 * max(3, min(12, len(timeline.ranks))),
        )
    ]


def micro_batches(timeline: Lanes) -> list[Picture]:
    """A pipeline's last step: which stage has which micro-batch when."""
    if not timeline.boxes:
        return []
    shade = {("F", 0): BLUE, ("B", 0): RED, ("F", 1): SKY, ("B", 1): ORANGE}
    cells = [
        (
            box.rank,
            max(box.start, 0.0),
            min(box.stop, timeline.box_seconds),
            str(box.number),
            shade[box.kind, box.chunk % 2],
        )
        for box in timeline.boxes
    ]
    keys = [Key("forward", BLUE, None), Key("backward", RED, None)]
    if any(box.chunk % 2 for box in timeline.boxes):
        keys += [Key("forward, every other chunk", SKY, None), Key("backward, every other chunk", ORANGE, None)]
    names = [str(rank) for rank in timeline.stages]
    return [
        Picture(
            "pipeline",
            "Micro-batches in the pipeline's last step",
            "Each row is a stage, each box a micro-batch, with its number where it has room. Gaps are the bubble: "
            "the stage waits for a neighbour. More micro-batches make it smaller.",
            lambda axes: charts.boxes(axes, names, cells, timeline.box_seconds),
            keys,
            height=1.3 + 0.3 * max(2, min(12, len(names))),
        )
    ]


def who_to_whom(run: Recorded) -> list[Picture]:
    """Bytes from each rank to each, of neighbours together where there are many."""
    sent = run.summary.get("sent_to_per_rank")
    if not isinstance(sent, list) or not sent or len(sent) > MOST_RANKS:
        if run.summary and run.said("ranks") != 1:
            why = "too many pairs" if "sent_to_per_rank" in run.summary else "an older version"
            run.missing.append(f"no matrix of who sent to whom: the summary does not have it ({why})")
        return []
    count = len(sent)
    size = max(1, -(-count // charts.GROUPS))
    table = np.zeros((-(-count // size),) * 2)
    for rank, row in enumerate(sent):
        for each in row if isinstance(row, list) else []:
            if isinstance(each, list) and len(each) > 1:
                to, amount = number(each[0]), number(each[1])
                if 0 <= to < count and amount > 0:
                    table[rank // size, int(to) // size] += amount
    if not table.any():
        run.missing.append(
            "no matrix of who sent to whom: no message was seen leaving (shared memory, or a library's own)"
        )
        return []
    factor, unit = charts.scale(table, "bytes")
    return [
        Picture(
            "who-to-whom",
            "Who sent how much to whom",
            "A row sends, a column receives; empty cells have exchanged nothing. A ring lies beside the diagonal, a "
            "server is a full row and column. What passes through shared memory, or inside a library's collective, "
            "is not seen.",
            lambda axes: charts.matrix(axes, table / factor, size, unit),
            height=3.4,
        )
    ]


def sizes(run: Recorded) -> list[Picture]:
    """How many messages had up to so many bytes."""
    each = run.summary.get("message_sizes_per_rank")
    total: dict[int, float] = {}
    for counts in each if isinstance(each, list) else []:
        for size, count in counts.items() if isinstance(counts, dict) else []:
            if str(size).isdecimal() and len(str(size)) < 19 and (amount := number(count)) > 0:
                total[int(size)] = total.get(int(size), 0.0) + amount
    if not total:
        return []
    powers = sorted({max(size, 1).bit_length() if size else 0 for size in total})
    columns = list(range(powers[0], powers[-1] + 1))
    heights = np.zeros(len(columns))
    for size, amount in total.items():
        heights[(max(size, 1).bit_length() if size else 0) - columns[0]] += amount
    names = [size_name(2 ** (power - 1)) if power else "0" for power in columns]
    return [
        Picture(
            "message-sizes",
            "Sizes of the messages that all ranks sent",
            "A bar counts messages of up to so many bytes, and more than half of it. Small ones cost their latency, "
            "large ones their bytes: many small ones are worth putting together.",
            lambda axes: bars(axes, names, [(heights, BLUE)], "bytes of a message", "messages", "messages"),
        )
    ]


def size_name(size: int) -> str:
    """4 Ki for 4096"""
    for power, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size >= 2**power:
            return f"{size >> power}{unit}"
    return str(size)


def memory(run: Recorded) -> list[Picture]:
    """Peaks of what each rank's steps held, by kind."""
    kinds = run.summary.get("memory_bytes_per_rank")
    found = {name: as_list(kinds.get(name)) for name, _ in MEMORY} if isinstance(kinds, dict) else {}
    there = {name: values for name, values in found.items() if values}
    if not there or not any(np.nansum(values) > 0 for values in there.values()):
        return []
    count = max(map(len, there.values()))
    padded = {name: [*values, *[0.0] * (count - len(values))] for name, values in there.items()}
    names = grouped(padded[next(iter(padded))])[0]
    parts = [(grouped(padded[name])[1], colour) for name, colour in MEMORY if name in padded]
    whole = as_list(run.summary.get("peak_memory_bytes_per_rank"))
    peak = f" The whole process had {np.nanmax(whole) / 2**20:,.0f} MiB at most." if whole else ""
    return [
        Picture(
            "memory",
            "Memory that the steps of each rank held, by kind",
            "Peaks of each kind, on top of each other. Kinds that shrink with more ranks are cut over them (sharding, "
            f"pipelines); equal bars are copies.{peak}",
            lambda axes: bars(axes, names, parts, ranks_label(count), "memory", "memory"),
            [Key(name, colour, None) for name, colour in MEMORY if name in padded],
        )
    ]


def staleness(run: Recorded) -> list[Picture]:
    """How many updates were stale by how much."""
    counts = as_list(run.summary.get("staleness_histogram"))
    if counts is None or not np.nansum(counts) > 0:
        return []
    size = max(1, -(-len(counts) // charts.GROUPS))
    heights = np.array([np.nansum(counts[first : first + size]) for first in range(0, len(counts), size)])
    names = [str(first) for first in range(0, len(counts), size)]
    return [
        Picture(
            "staleness",
            "Staleness of the updates",
            "How many updates others had made between the reading of the parameters and the update made from them. "
            "At 0 nothing was missed; the further to the right, the smaller the learning rate has to be.",
            lambda axes: bars(axes, names, [(heights, BLUE)], "updates missed", "pushes", "messages"),
        )
    ]


def consensus(run: Recorded, index: int) -> list[Picture]:
    """How far replicas are from their mean."""
    x, keys, lines = run.evaluations.mean["step"], [], []
    for name, said, style in (
        ("consensus_distance", "when evaluated", 0),
        ("consensus_distance_max", "at most so far", 1),
    ):
        if drawable(x, run.evaluations.mean[name]):
            lines.append(Curve(x, run.evaluations.mean[name], look(index)[0], style, marked=True))
            keys.append(Key(said, look(index)[0], style))
    if not lines:
        return []
    return [
        Picture(
            "consensus",
            "Consensus distance of the replicas",
            "How far the replicas' parameters are from their mean. It falls as they agree; where it stays, they learn "
            "apart, and their mean is worth less than each.",
            lambda axes: curves(axes, lines, "steps", "distance"),
            keys,
        )
    ]


def hidden(run: Recorded) -> list[Picture]:
    """Which part of the exchange went on while ranks computed."""
    share = number(run.summary.get("hidden_fraction"))
    if not 0 <= share <= 1:
        return []

    def draw(axes: Any) -> None:
        for left, part, colour in ((0.0, share, GREEN), (share, 1 - share, ORANGE)):
            axes.barh([0], [100 * part], 0.6, left=100 * left, color=colour)
        axes.set_yticks([])
        axes.set_xlim(0, 100)
        axes.set_ylim(-0.5, 0.5)
        charts.ticks(axes, "x")
        charts.label(axes, "share of the exchange's time (%)", "")

    return [
        Picture(
            "hidden",
            "How much of the exchange was hidden behind computing",
            "The hidden part goes on while gradients are computed; ranks wait for the rest (--overlap).",
            draw,
            [Key(f"hidden, {share:.0%}", GREEN, None), Key("waited for", ORANGE, None)],
            height=1.2,
        )
    ]


def described(run: Recorded) -> Sequence[str]:
    """One line on a run: strategy, ranks, model and data, as far as they are known."""
    strategy, ranks = run.said("strategy"), run.said("ranks")
    said = [str(strategy).replace("_", " ") if strategy else "unknown strategy"]
    if isinstance(ranks, int):
        said.append(counted(ranks, "rank", ","))
    return said + [str(found) for name in ("model", "data") if (found := run.said(name) or run.options.get(name))]
