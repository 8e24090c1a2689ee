"""Discrete-event simulation of all-reduce algorithms: their own generators on simulated ranks and messages.

    for each rank     steps = ring_all_reduce.steps(SimulatedComm(...), vector, op)
    the next event    a rank whose requests are complete runs to its next yield; its messages occupy ports for times by
                      the cluster (cluster.py); its additions take time

No values are sent: a vector is one element with stride 0. The formulas of collective_time.py are tested against the
simulation. It takes about 40 us per message: the ring on 1,000 ranks, with 2 million messages, more than a minute."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hpcdl.planning.cluster import Cluster


class SimulatedRequest:
    """One side of a message. completed: the time at which the message is complete on that side; None: not yet."""

    __slots__ = ("completed", "waits")

    def __init__(self) -> None:
        self.completed: float | None = None
        self.waits: SimulatedRank | None = None  # the rank that waits for it


class SimulatedRank:
    """A rank: its generator and its clock."""

    def __init__(self, number: int, start: float):
        self.number, self.now = number, start
        self.steps: Iterator[Any] = iter(())
        self.missing = 0  # number of requests that it waits for


class SimulatedComm:
    """The communicator of one rank of a `Simulation`, as far as algorithms use it."""

    def __init__(self, simulation: "Simulation", rank: SimulatedRank):
        self.simulation, self.rank = simulation, rank

    def Get_rank(self) -> int:
        return self.rank.number

    def Get_size(self) -> int:
        return len(self.simulation.ranks)

    def Isend(self, vector: np.ndarray, to: int, tag: int = 0) -> SimulatedRequest:
        """Send the vector; the request is complete when the sender's port is free again."""
        request = SimulatedRequest()
        self.simulation.schedule(self.rank.now, self.simulation.send, self.rank.number, to, tag, vector.nbytes, request)
        return request

    def Irecv(self, vector: np.ndarray, source: int, tag: int = 0) -> SimulatedRequest:
        """Receive a message; the request is complete when the message has arrived."""
        request = SimulatedRequest()
        self.simulation.receive(self.rank.number, source, tag, request, self.rank.now)
        return request


class Simulation:
    """An all-reduce of `size` elements of `itemsize` bytes on `ranks` ranks, which begin at the times `start`.
    seconds: the end of each rank, after `run`. sent: (bytes, messages) of each rank. Without `start` all begin at 0."""

    def __init__(self, cluster: Cluster, ranks: int, size: int, itemsize: int = 4, start: np.ndarray | None = None):
        self.cluster, self.size, self.dtype = cluster, size, np.dtype(f"f{itemsize}")
        begun = np.zeros(ranks) if start is None else start
        self.ranks = [SimulatedRank(number, float(begun[number])) for number in range(ranks)]
        self.events: list[tuple[float, int, Callable, tuple]] = []
        self.order = itertools.count()
        self.free: dict[tuple, float] = {}  # time at which a port is free
        self.expected: dict[tuple[int, int, int], deque[SimulatedRequest]] = {}
        self.arrived: dict[tuple[int, int, int], deque[float]] = {}
        self.sent = np.zeros((ranks, 2), np.int64)
        self.seconds = np.full(ranks, np.nan)

    def run(self, steps: Callable[..., Iterator[Any]]) -> np.ndarray:
        """Run an algorithm's generator on each rank; return the end time of each, from time 0."""
        vector = np.lib.stride_tricks.as_strided(np.zeros(1, self.dtype), (self.size,), (0,))
        for rank in self.ranks:
            rank.steps = steps(SimulatedComm(self, rank), vector, partial(self.add, rank))
            self.schedule(rank.now, self.resume, rank)
        while self.events:
            now, _, happens, what = heapq.heappop(self.events)
            happens(now, *what)
        if np.isnan(self.seconds).any():
            raise ValueError(f"rank {int(np.isnan(self.seconds).argmax())} waits for a message that nobody sends")
        return self.seconds

    def add(self, rank: SimulatedRank, into: np.ndarray, values: np.ndarray) -> None:
        rank.now += self.cluster.add(into.nbytes)

    def schedule(self, time: float, happens: Callable, *what: Any) -> None:
        heapq.heappush(self.events, (time, next(self.order), happens, what))

    def resume(self, now: float, rank: SimulatedRank) -> None:
        """Run a rank until it waits again, or ends."""
        rank.now = max(rank.now, now)
        for requests in rank.steps:
            open = [request for request in requests if request.completed is None]
            rank.now = max([rank.now, *(request.completed for request in requests if request.completed is not None)])
            if open:
                rank.missing = len(open)
                for request in open:
                    request.waits = rank
                return
        self.seconds[rank.number] = rank.now

    def complete(self, request: SimulatedRequest, at: float) -> None:
        """Complete a request; the rank that waits for it resumes if it waits for no other request."""
        request.completed, rank = at, request.waits
        if rank is not None:
            rank.missing -= 1
            rank.now = max(rank.now, at)
            if not rank.missing:
                self.schedule(rank.now, self.resume, rank)

    def send(self, now: float, source: int, to: int, tag: int, bytes: int, request: SimulatedRequest) -> None:
        """Send a message as soon as its ports are free."""
        self.sent[source] += bytes, 1
        cluster, inside = self.cluster, self.cluster.node(source) == self.cluster.node(to)
        latency, bandwidth = cluster.link(inside)
        kind, ends = ("rank", (source, to)) if inside else ("node", (cluster.node(source), cluster.node(to)))
        ports: list[tuple[tuple, float]] = [(("out", kind, ends[0]), bandwidth), (("in", kind, ends[1]), bandwidth)]
        switches = cluster.switch(source), cluster.switch(to)
        if switches[0] != switches[1]:
            wide = cluster.nodes_per_switch * cluster.bandwidth / cluster.oversubscription
            ports += [((way, "switch", at), wide) for way, at in zip(("out", "in"), switches, strict=True)]
        for port, wide in ports:  # each port is busy for the time of its messages, in any order
            self.free[port] = max(now, self.free.get(port, 0.0)) + bytes / wide
        left = self.free[ports[0][0]]
        arrival = max(self.free[port] for port, _ in ports) + latency
        self.schedule(left, lambda now, request: self.complete(request, now), request)
        self.schedule(arrival, self.deliver, source, to, tag)

    def deliver(self, now: float, source: int, to: int, tag: int) -> None:
        waiting = self.expected.get((to, source, tag))
        if waiting:
            self.complete(waiting.popleft(), now)
        else:
            self.arrived.setdefault((to, source, tag), deque()).append(now)

    def receive(self, to: int, source: int, tag: int, request: SimulatedRequest, now: float) -> None:
        there = self.arrived.get((to, source, tag))
        if there:
            request.completed = max(now, there.popleft())
        else:
            self.expected.setdefault((to, source, tag), deque()).append(request)


def simulate(
    steps: Callable[..., Iterator[Any]], cluster: Cluster, ranks: int, bytes: int, start: np.ndarray | None = None
) -> np.ndarray:
    """Return the seconds (ranks,) after which each rank ends an all-reduce of `bytes` bytes by `steps`."""
    return Simulation(cluster, ranks, bytes // 4, 4, start).run(steps)
