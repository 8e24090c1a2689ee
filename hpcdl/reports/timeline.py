"""The last steps that all ranks have in trace.json, as lanes of a picture, and a pipeline's micro-batches.

rank 0   |#### step ####|#### step ####|= evaluate =|        what the rank is in
         |     ~~~~~~~~~|     ~~~~~~~~~|                     operations of communication that are under way
rank 1   ..."""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CHUNK = 1 << 20  # characters read at once
STEPS = 3  # shown at most
RANKS = 16  # lanes at most
COLUMNS = 500  # spans nearer than 1/COLUMNS of a lane's width are merged
FEW = 60  # spans that are not merged, however near
BOXES = 400  # drawn micro-batches at most
WITHOUT_STEPS = 24  # shown spans of a pipeline that lie in no steps
LANE = re.compile(r"rank (\d+)\b")
STEP, DATA, BOOKKEEPING, COMMUNICATION, FORWARD, BACKWARD, LONG = range(7)
KIND_OF = {"step": STEP, "serve": STEP, "wait for data": DATA, "data": DATA, "agree": BOOKKEEPING, "meet": BOOKKEEPING}
KIND_OF |= {"forward": FORWARD, "backward": BACKWARD}
KIND_OF |= dict.fromkeys(("evaluate", "checkpoint", "try overlap"), LONG)  # may lie within a step, making it long
ARGUMENTS = (("micro-batch", -1), ("chunk", 0))  # arguments of a pipeline's spans, and their defaults
KINDS = ("steps", "waiting for data", "evaluation, agreement, checkpoints", "communication")


class Box(NamedTuple):
    """A micro-batch's forward ("F") or backward ("B"). rank: index in `stages`. start, stop: seconds in the picture."""

    rank: int
    kind: str
    number: int
    chunk: int
    start: float
    stop: float


@dataclass
class Lanes:
    """Lanes of the shown `ranks`. spans: by kind, (index in `ranks`, start, stop) in seconds of the picture."""

    ranks: list[int] = field(default_factory=list)
    of: int = 0  # number of ranks in the trace
    seconds: float = 0.0
    spans: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    box_seconds: float = 0.0
    stages: list[int] = field(default_factory=list)
    cut: bool = False


class TruncatedTrace(Exception):
    """The trace is cut off, or holds other values than events; spans before the cut are used."""


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in Chrome's trace format, which may be large. Raises TruncatedTrace and OSError."""
    decode = json.JSONDecoder().raw_decode
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(CHUNK)
        opened = re.search(r'"traceEvents"\s*:\s*\[', text)
        if opened is None:
            raise TruncatedTrace
        place = opened.end()
        while True:
            while place < len(text) and text[place] in ", \t\r\n":
                place += 1
            if text[place : place + 1] == "]":
                return
            try:
                found, place = decode(text, place)
            except (ValueError, RecursionError):
                more = file.read(CHUNK) if len(text) - place < 4 * CHUNK else ""
                if not more:
                    raise TruncatedTrace from None
                text, place = text[place:] + more, 0
                continue
            if isinstance(found, dict):
                yield found


class Spans:
    """All spans of a trace in columns: 41 bytes per span instead of hundreds."""

    def __init__(self, path: Path):
        columns: list[array[Any]] = [array(code) for code in "ddqbqq"]  # start, stop, lane, kind, micro-batch, chunk
        ranks: dict[int, int] = {}
        self.cut = False
        try:
            for event in events(path):
                try:
                    if event["ph"] == "X":
                        begun, length, lane = float(event["ts"]), float(event["dur"]), int(event["tid"])
                        args, kind = event.get("args") or {}, KIND_OF.get(event["name"], COMMUNICATION)
                        span = begun, begun + length, lane, kind, *(int(args.get(name, no)) for name, no in ARGUMENTS)
                        if np.isfinite(begun) and 0 <= length < 1e300 and max(abs(lane), *span[4:]) < 2**62:
                            for column, value in zip(columns, span, strict=True):
                                column.append(value)
                    elif event["name"] == "thread_name" and (found := LANE.match(event["args"]["name"])):
                        ranks[int(event["tid"])] = int(found[1])
                except (KeyError, TypeError, ValueError, OverflowError):
                    continue  # no span of ours
        except TruncatedTrace:
            self.cut = True
        start, stop, lanes, self.kind, self.batch, self.chunk = map(np.array, columns)
        self.start, self.stop = start / 1e6, stop / 1e6
        self.rank = np.array([ranks.get(each, -1) for each in lanes.tolist()])


def read_timeline(path: Path) -> Lanes:
    """Return the lanes that show a trace; they have no ranks if the trace has no spans. May raise OSError."""
    spans = Spans(path)
    found = Lanes(cut=spans.cut)
    known = [int(rank) for rank in np.unique(spans.rank) if rank >= 0] if len(spans.rank) else []
    found.of = len(known)
    if not known:
        return found
    steps = spans.kind == STEP
    stepping = [rank for rank in known if (steps & (spans.rank == rank)).sum() > 1]
    leader = stepping[0] if stepping else known[0]
    others = stepping or known
    if spans.cut:  # the file has rank after rank: those after the cut are not there
        others = [leader]
    end = min(spans.stop[spans.rank == rank].max() for rank in others)
    own = np.flatnonzero((spans.rank == leader) & (steps if stepping else np.ones_like(steps)))
    own = own[np.argsort(spans.start[own])]
    before = own[spans.stop[own] <= end]
    last = usual(spans, leader, before if len(before) else own)
    begin = float(spans.start[last].min())
    end = max(float(end if not stepping else spans.stop[last].max()), begin)
    found.seconds = max(end - begin, 1e-9)
    found.ranks = [known[place] for place in np.linspace(0, len(known) - 1, min(RANKS, len(known))).astype(int)]
    for kind, name in enumerate(KINDS):
        chosen = (spans.kind == kind) | ((spans.kind == LONG) & (kind == BOOKKEEPING))
        found.spans[name] = merged(spans, chosen, found.ranks, begin, end)
    chart(found, spans, leader, last)
    return found


def usual(spans: Spans, leader: int, steps: np.ndarray) -> np.ndarray:
    """Return the last 1 to STEPS consecutive steps without evaluation or checkpoint; the last STEPS if all have one."""
    long = (spans.kind == LONG) & (spans.rank == leader)
    begun = np.sort(spans.start[long])
    within = np.searchsorted(begun, spans.stop[steps]) - np.searchsorted(begun, spans.start[steps])
    places = np.flatnonzero(within == 0)
    if not len(places):
        return steps[-STEPS:]
    first = places[-1]
    while first > 0 and within[first - 1] == 0 and places[-1] - first + 1 < STEPS:
        first -= 1
    return steps[first : places[-1] + 1]


def merged(spans: Spans, chosen: np.ndarray, ranks: list[int], begin: float, end: float) -> list:
    """Return the chosen spans between begin and end: (index in ranks, start, stop) from begin; near ones are merged."""
    least, found = (end - begin) / COLUMNS, []
    chosen = chosen & (spans.stop > begin) & (spans.start < end)
    for place, rank in enumerate(ranks):
        own = np.flatnonzero(chosen & (spans.rank == rank))
        near = least if len(own) > FEW else 0.0
        pieces: list[list[float]] = []
        for index in own[np.argsort(spans.start[own])]:
            start, stop = max(float(spans.start[index]), begin), min(float(spans.stop[index]), end)
            if pieces and start - pieces[-1][1] < near:
                pieces[-1][1] = max(pieces[-1][1], stop)
            else:
                pieces.append([start, stop])
        found += [(place, start - begin, start - begin + max(stop - start, least / 2)) for start, stop in pieces]
    return found


def chart(found: Lanes, spans: Spans, leader: int, last: np.ndarray) -> None:
    """Fill in the micro-batches of the last step; if the leader has fewer than 2 there, of its last spans."""
    micro = ((spans.kind == FORWARD) | (spans.kind == BACKWARD)) & (spans.batch >= 0) & (spans.rank >= 0)
    own = np.flatnonzero(micro & (spans.rank == leader))
    if not len(own):
        return
    begin, end = spans.start[last[-1]], spans.stop[last[-1]]
    if ((spans.start[own] >= begin) & (spans.stop[own] <= end)).sum() < 2:
        few = own[spans.stop[own] <= end][-WITHOUT_STEPS:]
        if len(few):
            begin, end = spans.start[few].min(), spans.stop[few].max()
    shown = np.flatnonzero(micro & (spans.start < end) & (spans.stop > begin))
    stages = [int(rank) for rank in np.unique(spans.rank[shown])][:RANKS]
    shown = shown[np.isin(spans.rank[shown], stages)]
    shown = shown[np.argsort(spans.start[shown])][:BOXES]
    found.stages, found.box_seconds = stages, float(end - begin)
    for index in shown:
        kind, start, stop = spans.kind[index], spans.start[index] - begin, spans.stop[index] - begin
        stage, numbers = stages.index(int(spans.rank[index])), (int(spans.batch[index]), int(spans.chunk[index]))
        found.boxes.append(Box(stage, "F" if kind == FORWARD else "B", *numbers, float(start), float(stop)))
