"""Seconds of messages within a group of ranks: as measured on as many ranks, else by the links (L, B, a: cluster.py).

    all-reduce          its algorithm's steps (collective_time.py); direct: (N-1) K/B + L + (N-1) K/a; shared: of one
                        node, as hierarchical; mpi and auto: the fastest algorithm
    compressed          s L + M/B + c, M bytes that a rank sends in s steps; c seconds of coding: as the method needs
                        within a node, or without measurements CODED K/a
    reduce-scatter      (N-1) (L + K/N/B + K/N/a)       short, on more than 3 ranks: ceil(log2 N) L instead of (N-1) L
    all-gather          (N-1) (L + K/N/B)               likewise
    broadcast, reduce   ceil(log2 N) (L + K/B), or, between nodes, (N-2+s) (L + K/s/B) in s segments (chain.py); a
                        reduce adds K/a or K/s/a each time
    message             L + K/B
    exchange            of each rank with k others at once: L + k K/B + k K/a
    service             S servers, n bytes pushed to each and m pulled: s = n/B + n/a + update/S + start on a server;
                        2 L + max(s, S n/B) + S m/B for a lone worker, whose port all n and m pass

A group takes every `stride`-th rank, so a node holds fewer of its ranks. Groups side by side share the cores."""

import dataclasses
import math
from typing import Any

from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.comm.allreduce.circulant import SHORT
from hpcdl.comm.compression import traffic
from hpcdl.comm.primitives.chain import fastest
from hpcdl.errors import unknown
from hpcdl.models.layout import Layout, Tensor
from hpcdl.planning import collective_time
from hpcdl.planning.machine_sheet import Machine, Section, interpolate
from hpcdl.strategies.description import CODING, Call, Service

BEST_OF = "auto", "mpi"  # take the fastest of several algorithms
CHOICES = "recursive", "ring", "tree", "circulant", "double_tree", "hierarchical"
CODED = 3  # encoding and decoding, in additions of the whole vector
UNSHARED = "elsewhere"  # auto, of vectors outside of the node's shared memory


def one_matrix(size: int) -> Layout:
    """Return the layout of a vector as one matrix, as square as it can be, and a vector of what is left."""
    rows = math.isqrt(size)
    matrix = Tensor("matrix", (rows, size // max(1, rows)), 0, "")
    return Layout([matrix, Tensor("rest", (size - math.prod(matrix.shape),), math.prod(matrix.shape), "")], "float32")


class RankGroup:
    """`size` ranks of a job of `job` ranks, `stride` apart. algorithm: of all-reduces. shared: True if reduced vectors
    lie in the node's shared memory (`comm.empty`), as gradients do."""

    def __init__(
        self, machine: Machine, size: int, stride: int = 1, job: int = 0, algorithm: str = "auto", shared: bool = True
    ):
        self.machine, self.size, self.stride, self.algorithm, self.shared = machine, size, stride, algorithm, shared
        self.job = max(job, size)
        near = max(1, machine.links.ranks_per_node // stride)
        self.links = dataclasses.replace(machine.links, ranks_per_node=near)
        self.inside = self.links.nodes(size) == 1
        self.section = machine.section(size) if self.inside or stride == 1 else None
        if self.section is not None and (self.section.nodes == 1) != self.inside:
            self.section = None
        self.beside = machine.sharing(self.job) / machine.sharing(size)  # other groups on the same cores
        self.latency, self.bandwidth = self.links.link(self.inside)  # of the slowest link, which a node's ranks share

    def measured_seconds(self, name: str, bytes: float, section: Section | None = None) -> float | None:
        """Return the measured seconds, interpolated; None if there are no measurements. A method of compression with
        other settings than those measured takes as long."""
        section = section or self.section
        curves = section.collectives if section is not None else {}
        curve = curves.get(name) or curves.get(name.partition(":")[0])
        return None if curve is None else interpolate(curve, bytes) * self.beside

    def seconds(self, name: str, bytes: float, formula: float, times: float = 1) -> float:
        """Return the measured seconds * `times`, or `formula` without measurements; 0 for a single rank."""
        if self.size == 1:
            return 0.0
        measured = self.measured_seconds(name, bytes)
        return formula if measured is None else measured * times

    def all_reduce(self, bytes: float, algorithm: str = "") -> float:
        """Return the seconds of an all-reduce of `bytes` bytes by `algorithm` or the group's. UsageError if unknown."""
        name = algorithm or self.algorithm
        if self.size == 1:
            return 0.0
        measured = self.measured_seconds(UNSHARED, bytes) if name == "auto" and not self.shared else None
        measured = self.measured_seconds(name, bytes) if measured is None else measured
        if measured is not None:
            return measured
        if name in BEST_OF:
            names = (*CHOICES, "shared") if self.inside else CHOICES
            return min(self.all_reduce(bytes, each) for each in names)
        others = self.size - 1
        if name == "direct":
            return self.latency + others * (bytes / self.bandwidth + self.links.add(bytes))
        if name == "shared":
            name = "hierarchical" if self.inside else "ring"
        if name not in collective_time.ALGORITHMS:
            raise unknown("all-reduce algorithm", name, ALGORITHMS)
        return collective_time.seconds(name, self.links, self.size, bytes)

    def compressed(self, bytes: float, spec: str) -> float:
        """Return the seconds of an all-reduce in compressed messages. bytes: of the vector in float32. spec: as in
        --compress, of a method with a codec that leaves the optimizer alone."""
        if self.size == 1:
            return 0.0
        sent, steps = traffic(spec, round(bytes / 4), self.size)
        return self.seconds(spec, bytes, steps * self.latency + sent / self.bandwidth + self.coding(bytes, spec))

    def coding(self, bytes: float, spec: str) -> float:
        """Return the seconds of a method's computing in an all-reduce: all of it where it was measured within a node,
        whose links take little of it."""
        if self.size == 1:
            return 0.0
        near = next((each for each in self.machine.measured if (each.ranks, each.nodes) == (self.size, 1)), None)
        measured = None if near is None else self.measured_seconds(spec, bytes, near)
        return self.links.add(CODED * bytes) if measured is None else measured

    def reduce_scatter(self, bytes: float) -> float:
        """Return the seconds of a reduce-scatter. bytes: of all ranks' chunks."""
        return self.seconds("reduce_scatter", bytes, self.chunks(bytes) + self.links.add(bytes - bytes / self.size))

    def all_gather(self, bytes: float) -> float:
        """Return the seconds of an all-gather. bytes: of all ranks' chunks."""
        return self.seconds("all_gather", bytes, self.chunks(bytes))

    def chunks(self, bytes: float) -> float:
        """Return the seconds in which each rank receives the chunks of all others, together `bytes` with its own."""
        return self.chunk_steps(bytes) * self.latency + (bytes - bytes / self.size) / self.bandwidth

    def chunk_steps(self, bytes: float) -> int:
        """Return the number of steps in which they are received: on a circulant graph if short, or around a ring."""
        return math.ceil(math.log2(self.size)) if bytes <= SHORT and self.size > 3 else self.size - 1

    def broadcast(self, bytes: float) -> float:
        steps, segments = fastest(self.size, bytes, not self.inside)
        return steps * (self.latency + bytes / segments / self.bandwidth)

    def reduce(self, bytes: float) -> float:
        steps, segments = fastest(self.size, bytes, not self.inside)
        return self.broadcast(bytes) + steps * self.links.add(bytes / segments)

    def all_to_all(self, bytes: float) -> float:
        """Return the seconds of a pairwise exchange of the rows of an array."""
        return (self.size - 1) * self.message(bytes / self.size)

    def message(self, bytes: float) -> float:
        return self.seconds("message", bytes, self.latency + bytes / self.bandwidth)

    def exchange(self, bytes: float, partners: float) -> float:
        """Return the seconds if each rank exchanges with `partners` ranks at once and adds what it receives."""
        if not partners:
            return 0.0
        formula = self.latency + partners * (bytes / self.bandwidth + self.links.add(bytes))
        return self.seconds("exchange", bytes, formula, partners)


def call_seconds(case: Any, machine: Machine, call: Call) -> float:
    """Return the seconds of a call of the communicator, among the ranks that take part. case: the Workload."""
    group = RankGroup(machine, call.ranks or case.size, 1, case.ranks, case.options.allreduce)
    if call.operation == "exchange":
        return group.exchange(call.bytes, call.partners)
    if call.operation == "message":
        return group.message(call.bytes)
    if call.operation == "all_reduce":
        return group.all_reduce(call.bytes)
    if call.operation.startswith(CODING):
        return group.coding(call.bytes, call.operation.removeprefix(CODING))
    return group.compressed(call.bytes, call.operation)


def service_seconds(group: RankGroup, service: Service, update: float = 0.0, start: float = 0.0) -> tuple[float, ...]:
    """Return the seconds of a server's work for one push, of its answer, and of a round trip of a lone worker.
    update: seconds to update a server's slice. start: further seconds of each push."""
    answer, push = (max(0.0, group.message(n) - group.latency) for n in (service.pulled, service.pushed))
    serving = push + group.links.add(service.pushed) + start
    if not service.rounds:  # the updates of a round are one
        serving += update
    alone = 2 * group.latency + max(serving, service.servers * push) + service.servers * answer
    return serving, answer, alone + (update if service.rounds else 0.0)
