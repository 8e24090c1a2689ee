"""Tracing: counters of every operation, and spans of all ranks on one clock, in Chrome's trace format.

Each host has its own clock. Its offset to the clock of rank 0 is measured by ping-pong when the timeline is made and
when it is written (Cristian, "Probabilistic clock synchronization", 1989): the round with the shortest round trip
counts, and rank 0's clock is assumed to be read in its middle. Times in between are shifted by linear interpolation. As
ranks keep only their last spans, all ranks have spans only for the time that the busiest rank's spans cover."""

import contextlib
import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.comm.counting import Counters, SentCounts
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.comm.progress import activity
from hpcdl.errors import LoneError, blamed_on
from hpcdl.files import atomic_write

ROUNDS = 10


class Traffic(dict[str, Counters]):
    """Counters by kind of operation, as traffic["all_reduce"].bytes. sent: messages by receiver, numbered in the first
    communicator, from which the groups with this traffic are derived. counting: False in `uncounted`."""

    def __init__(self, *counters: Any, **named: Counters):
        super().__init__(*counters, **named)
        self.sent = SentCounts()
        self.counting = True

    def __missing__(self, name: str) -> Counters:
        counters = self[name] = Counters()
        return counters

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context without counting, for messages that are not part of the training."""
        before = {name: dataclasses.replace(counters) for name, counters in self.items()}
        sent = {rank: row.copy() for rank, row in self.sent.items()}
        counting, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = counting
            for rank, row in self.sent.items():
                row[:] = sent.get(rank, [0] * len(row))
            for name, counters in self.items():
                vars(counters).update(vars(before.get(name, Counters())))

    @property
    def bytes(self) -> int:
        return sum(counters.bytes for counters in self.values())

    @property
    def messages(self) -> int | None:
        """Messages sent; None if a library's collective hides some."""
        messages: list[Any] = [counters.messages for counters in self.values()]
        return None if None in messages else sum(messages)

    @property
    def sent_so_far(self) -> tuple[float, float]:
        """Bytes and messages as floats; messages are NaN if unknown."""
        messages = self.messages
        return float(self.bytes), math.nan if messages is None else float(messages)

    @property
    def message_sizes(self) -> dict[str, int]:
        """Histogram of message sizes: upper limit in bytes -> number of messages, as {"0": 3, "4096": 12}."""
        counts = [sum(column) for column in zip(*self.sent.values(), strict=True)][:-1]
        return {str(1 << size - 1 if size else 0): count for size, count in enumerate(counts) if count}

    @property
    def seconds(self) -> float:
        return sum(counters.seconds for counters in self.values())

    @property
    def blocked_seconds(self) -> float:
        return sum(counters.blocked_seconds for counters in self.values())


class SentTotals(dict[int, tuple[float, float]]):
    """Total bytes and messages that other ranks report to have sent, by rank."""

    def note(self, rank: int, bytes: float, messages: float) -> None:
        """Note the totals that a rank reports; keep the larger ones, as an older report may arrive later."""
        before = self.get(rank, (0.0, 0.0))
        self[rank] = max(before[0], bytes), messages if math.isnan(messages) else max(before[1], messages)


def clock_offset(comm: MPI.Intracomm, node: MPI.Intracomm) -> int:
    """Return the nanoseconds to add to this rank's clock to get rank 0's; collective. One rank per node measures."""
    leaders = comm.Split(0 if node.rank == 0 else MPI.UNDEFINED, comm.rank)
    offset = np.zeros(1, np.int64)
    if leaders != MPI.COMM_NULL:
        ball = np.zeros(1, np.int64)
        for other in range(1, leaders.size):
            if leaders.rank == 0:
                for _ in range(ROUNDS):
                    leaders.Recv(ball, other)
                    ball[0] = time.perf_counter_ns()
                    leaders.Send(ball, other)
            elif leaders.rank == other:
                trips = []
                for _ in range(ROUNDS):
                    start = time.perf_counter_ns()
                    leaders.Send(ball, 0)
                    leaders.Recv(ball, 0)
                    stop = time.perf_counter_ns()
                    trips.append((stop - start, int(ball[0]) - (start + stop) // 2))
                offset[0] = min(trips)[1]
        leaders.Free()
    node.Bcast(offset)
    return int(offset[0])


class Timeline:
    """The last `limit` spans of one rank, in the order of their ends; `ended` counts all spans."""

    def __init__(self, comm: MPI.Intracomm, limit: int = 0):
        self.comm, self.limit = comm, limit
        self.spans: deque[tuple[str, int, int, dict]] = deque(maxlen=limit)
        self.ended = 0
        self.node: Any = ranks_of_node(comm) if limit else None  # MPI.Intracomm | None
        self.first: Any = (time.perf_counter_ns(), clock_offset(comm, self.node)) if limit else None  # type: ignore[arg-type]

    def add(self, name: str, start: int, stop: int, **details: Any) -> None:
        """Keep one span; start and stop are `time.perf_counter_ns()`; details: shown in the trace, by name."""
        if self.limit:
            self.spans.append((name, start, stop, details))
            self.ended += 1

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Context that records its body as a span: `with timeline.span("evaluate"): ...`."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter_ns())

    def close(self) -> None:
        """Free the communicator of the node."""
        if self.node is not None:
            self.node.Free()
            self.node = None

    def write(self, path: str | Path | None, root: int = 0) -> None:
        """Write all ranks' spans, on rank 0's clock, to `path` on rank `root`, for ui.perfetto.dev; collective."""
        with activity.inside("write the trace"):
            now, last = time.perf_counter_ns(), clock_offset(self.comm, self.node)
            then, first = self.first
            drift = (last - first) / max(1, now - then)
            spans = [(name, t + first + drift * (t - then), stop - t, details) for name, t, stop, details in self.spans]
            everyone = self.comm.gather((MPI.Get_processor_name(), spans, self.ended - len(spans)), root)
        if everyone is not None and path is not None:
            blame = blamed_on(f"{path} cannot be written", LoneError)
            with activity.exempt(), blame, atomic_write(path) as file:
                file.write(json.dumps({"traceEvents": trace_events(everyone), "displayTimeUnit": "ms"}).encode())


def trace_events(everyone: list[tuple[str, list, int]]) -> list[dict]:
    """Return the trace events, in microseconds. everyone: (host, spans, number of dropped spans) of each rank."""
    origin = min((start for _, spans, _ in everyone for _, start, _, _ in spans), default=0)
    events: list[dict] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "hpcdl"}}]
    for rank, (host, spans, dropped) in enumerate(everyone):
        label = f"rank {rank} on {host}" + (f" ({dropped} earlier spans not kept)" if dropped else "")
        for row, nested in enumerate(rows(spans) or [[]]):
            place: dict[str, Any] = {"ph": "M", "pid": 0, "tid": row * len(everyone) + rank}
            events.append(place | {"name": "thread_name", "args": {"name": label}})
            events.append(place | {"name": "thread_sort_index", "args": {"sort_index": rank}})
            for name, start, length, details in nested:
                event = {"name": name, "ph": "X", "pid": 0, "tid": place["tid"]}
                event |= {"ts": round((start - origin) / 1e3, 3), "dur": round(length / 1e3, 3)}
                events.append(event | {"args": details} if details else event)
            label = f"rank {rank}, in flight at once"  # label of further rows
    return events


def rows(spans: list) -> list[list]:
    """Distribute spans (name, start, length, details) over rows, in which they nest or follow each other."""
    spread: list[list] = []  # spans of each row,
    open_until: list[list[float]] = []  # and the ends of its open spans, the innermost last
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        start, end = span[1], span[1] + span[2]
        for ends in open_until:
            while ends and ends[-1] <= start:
                ends.pop()
        row = next((row for row, ends in enumerate(open_until) if not ends or end <= ends[-1]), len(spread))
        if row == len(spread):
            spread.append([])
            open_until.append([])
        open_until[row].append(end)
        spread[row].append(span)
    return spread
