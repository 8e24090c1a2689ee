"""The last steps that all ranks have in trace.json, as lanes of a picture, and a pipeline's micro-batches.

    rank 0   |#### step ####|#### step ####|= evaluate =|        what the rank is in
             |     ~~~~~~~~~|     ~~~~~~~~~|                     operations of communication that are under way
    rank 1   ...

The file is read event by event, for it may have tens of megabytes, and may be cut: what comes before the cut is shown.
Of many ranks some are shown. Spans that no picture could show apart are merged, so that what is drawn has a bound.
"""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CHUNK = 1 << 20  # characters that are read at once
STEPS = 3  # that are shown
RANKS = 16  # lanes at most
COLUMNS = 500  # spans nearer than a lane's width by this are one
FEW = 60  # that are shown apart, however near
BOXES = 400  # of micro-batches that are drawn
WITHOUT_STEPS = 24  # of a pipeline's spans, where they lie in no steps
LANE = re.compile(r"rank (\d+)\b")
WORKING = ("step", "serve")
FETCHING = ("wait for data", "data")
AGREEING = ("agree", "meet")
SCORING = ("evaluate", "checkpoint", "try overlap")  # lie within a step, too, and make it a long one
STEP, DATA, BOOKKEEPING, COMMUNICATION, FORWARD, BACKWARD, LONG = range(7)
KINDS = ("steps", "waiting for data", "evaluation, agreement, checkpoints", "communication")


class Box(NamedTuple):
    """A micro-batch's forward ("F") or backward ("B") on a stage, in seconds from the picture's start."""

    rank: int
    kind: str
    number: int
    chunk: int
    start: float
    stop: float


@dataclass
class Lanes:
    """Lanes of some ranks. spans: by kind (rank's place among those shown, start, stop), in seconds from the start."""

    ranks: list[int] = field(default_factory=list)
    of: int = 0  # ranks that there are
    seconds: float = 0.0
    spans: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    box_seconds: float = 0.0
    stages: list[int] = field(default_factory=list)
    cut: bool = False


class TruncatedTrace(Exception):
    """The trace is cut off, or holds other values than events."""


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file in Chrome's trace format, one by one. Raises Cut where it ends too early, and OSError."""
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
    """All spans of a trace in columns: 8 to 24 bytes each instead of hundreds."""

    def __init__(self, path: Path):
        start, stop, row, kind = array("d"), array("d"), array("q"), array("b")
        batch, chunk = array("q"), array("q")
        ranks: dict[int, int] = {}
        self.cut = False
        kinds = dict.fromkeys(WORKING, STEP) | dict.fromkeys(FETCHING, DATA) | dict.fromkeys(AGREEING, BOOKKEEPING)
        kinds |= {"forward": FORWARD, "backward": BACKWARD} | dict.fromkeys(SCORING, LONG)
        try:
            for event in events(path):
                try:
                    if event["ph"] == "X":
                        begun, length, lane = float(event["ts"]), float(event["dur"]), int(event["tid"])
                        args = event.get("args") or {}
                        what = kinds.get(event["name"], COMMUNICATION)
                        micro = int(args.get("micro-batch", -1)), int(args.get("chunk", 0))
                        if not (
                            np.isfinite(begun) and 0 <= length < 1e300 and abs(lane) < 2**62 and max(micro) < 2**62
                        ):
                            continue
                    elif event["name"] == "thread_name" and (found := LANE.match(event["args"]["name"])):
                        ranks[int(event["tid"])] = int(found[1])
                        continue
                    else:
                        continue
                except (KeyError, TypeError, ValueError, OverflowError):
                    continue  # no span of ours
                start.append(begun)
                stop.append(begun + length)
                row.append(lane)
                kind.append(what)
                batch.append(micro[0])
                chunk.append(micro[1])
        except TruncatedTrace:
            self.cut = True
        self.start, self.stop, self.kind = np.array(start) / 1e6, np.array(stop) / 1e6, np.array(kind)
        self.batch, self.chunk = np.array(batch), np.array(chunk)
        self.rank = np.array([ranks.get(each, -1) for each in row])


def read_timeline(path: Path) -> Lanes:
    """What is shown of a trace; without ranks where there is nothing. May raise OSError."""
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
    found.ranks = [
        known[place] for place in sorted({*np.linspace(0, len(known) - 1, min(RANKS, len(known))).astype(int)})
    ]
    for kind, name in enumerate(KINDS):
        chosen = (spans.kind == kind) | ((spans.kind == LONG) & (kind == BOOKKEEPING))
        found.spans[name] = merged(spans, chosen, found.ranks, begin, end)
    chart(found, spans, leader, last)
    return found


def usual(spans: Spans, leader: int, steps: np.ndarray) -> np.ndarray:
    """Return the last consecutive steps without evaluation or checkpoint; else the last step."""
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
    """Return the chosen spans within the window by rank; spans too near to distinguish are merged."""
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
        found += [(place, start - begin, max(stop - start, least / 2)) for start, stop in pieces]
    return [(place, start, start + length) for place, start, length in found]


def chart(found: Lanes, spans: Spans, leader: int, last: np.ndarray) -> None:
    """Fill in the micro-batches of the last step, or of the last few if a step has one."""
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
        found.boxes.append(
            Box(
                stages.index(int(spans.rank[index])),
                "F" if spans.kind[index] == FORWARD else "B",
                int(spans.batch[index]),
                int(spans.chunk[index]),
                float(spans.start[index] - begin),
                float(spans.stop[index] - begin),
            )
        )
