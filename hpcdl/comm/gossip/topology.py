"""Topologies: communication graphs of ranks, as pure functions of their size.

    spec                     rank r sends to                                 degree          steps to reach all
    ring                     r - 1, r + 1                                    2               n / 2
    torus, torus:RxC         the four neighbours on a grid of R rows and     4               R / 2 + C / 2
                             C columns with wrap-around
    hypercube                r with one bit flipped; n = 2^d                 d = log2 n      d
    exponential              r + 1, r + 2, r + 4, ... below r + n            ceil(log2 n)    ceil(log2 n)
    one-peer                 r + 2^(step mod ceil(log2 n)), one each step    1               ceil(log2 n)
    star                     0; and rank 0 to all                            1; n - 1        2
    complete                 all                                             n - 1           1
    random-regular:degree=d  d random ranks                                  d               about log n / log(d - 1)
    erdos-renyi:p=p          each other rank with probability p              about p (n-1)   about log n / log(p n)
    random-matching          one random rank, new in each step               1               about 2 log2 n
    a file                   lines "a b" for an edge, "a b weight" for an edge and its mixing weight

Sums are modulo n. All edges are undirected except those of the exponential graphs. Each rank makes the same graph,
which depends on (spec, size, seed) only. Random graphs that are not connected are drawn again.

(Exponential graphs: Assran et al., "Stochastic gradient push for distributed deep learning", ICML 2019, and Ying et
al., "Exponential graph is provably efficient for decentralized deep training", NeurIPS 2021. Random regular graphs:
Steger and Wormald, "Generating random regular graphs quickly", 1999, as made by NetworkX.)"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx

from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.errors import UsageError, parse_spec
from hpcdl.random import Random

Graph = list[tuple[int, ...]]  # the sorted receivers of each rank

PLAIN = "ring", "torus", "hypercube", "exponential", "one-peer", "star", "complete"
SETTINGS: dict[str, dict[str, Any]] = {name: {} for name in PLAIN}
SETTINGS |= {"random-regular": {"degree": 3}, "erdos-renyi": {"p": 0.5}, "random-matching": {}}
TRIES = 100  # to draw a connected random graph
MOST_GRAPHS = 64  # of a topology, that a forecast uses


@dataclass(frozen=True)
class Topology:
    """A sequence of communication graphs, one for each step. steps: the graphs of one period; empty without a period.
    weights: of the edges (a, b), a < b, if a file gives them."""

    name: str
    spec: str
    size: int
    steps: list[Graph] = field(repr=False)
    directed: bool = False
    seed: int = 0
    weights: dict[tuple[int, int], float] | None = None

    @property
    def period(self) -> int | None:
        """Steps after which the graphs repeat; None if they never do."""
        return len(self.steps) or None

    def graph(self, step: int) -> Graph:
        """Return, for each rank, the sorted ranks other than itself to which it sends at `step`."""
        return self.steps[step % self.period] if self.period else matching(self.size, self.seed, step)

    @property
    def edges(self) -> set[tuple[int, int]]:
        """Return (source, receiver) of all possible messages, in any step."""
        graphs = self.steps or [complete(self.size)]
        return {(rank, to) for graph in graphs for rank in range(self.size) for to in graph[rank]}

    def graphs(self) -> list[Graph]:
        """Return the graphs of one period or, if they never repeat, those of the first steps; at most MOST_GRAPHS."""
        return [self.graph(step) for step in range(min(self.period or MOST_GRAPHS, MOST_GRAPHS))]

    def senders(self, rank: int) -> set[int]:
        """Return the ranks from which a rank receives, in any step."""
        return {source for source, to in self.edges if to == rank and source != rank}


def topology(spec: str, size: int, seed: int = 0) -> Topology:
    """Return the topology `spec` on `size` ranks, by the table of this module. UsageError if there is no such graph."""
    name = spec.partition(":")[0]
    if name not in SETTINGS and (Path(spec).is_file() or "/" in spec or "." in name):
        edges = read_edges(spec, size)
        weights: Any = None if None in edges.values() else edges
        found = Topology(spec, spec, size, [_graph(size, edges)], weights=weights)
        if missing := unreached(found.steps[0]):
            raise UsageError(f"{spec}: no path leads from rank 0 to {missing}; add edges")
        return found
    if name == "torus":
        return Topology(name, spec, size, [torus(*sides(spec, size))])
    name, settings = parse_spec("topology", spec, SETTINGS)
    steps: dict[str, Callable[[], list[Graph]]] = {
        "ring": lambda: [circulant(size, [1, -1])],
        "hypercube": lambda: [hypercube(size)],
        "exponential": lambda: [circulant(size, hops(size))],
        "one-peer": lambda: [circulant(size, [hop]) for hop in hops(size) or [0]],
        "star": lambda: [[tuple(range(1, size))] + [(0,)] * (size - 1)],
        "complete": lambda: [complete(size)],
        "random-regular": lambda: [random_regular(size, settings["degree"], seed)],
        "erdos-renyi": lambda: [erdos_renyi(size, settings["p"], seed)],
        "random-matching": lambda: [],
    }
    return Topology(name, spec, size, steps[name](), name in ("exponential", "one-peer"), seed)


def circulant(size: int, hops: Iterable[int]) -> Graph:
    """Return the circulant graph: rank r sends to r + hop, for each hop."""
    return [tuple(sorted({(rank + hop) % size for hop in hops} - {rank})) for rank in range(size)]


def hops(size: int) -> list[int]:
    """Return 1, 2, 4, ... below the size."""
    return [1 << k for k in range((size - 1).bit_length())]


def complete(size: int) -> Graph:
    """Return the complete graph."""
    return circulant(size, range(1, size))


def torus(rows: int, columns: int) -> Graph:
    """Return the torus: rank r lies in row r // columns; along a side of 2 there is one edge instead of two."""
    steps = (0, 1), (0, -1), (1, 0), (-1, 0)
    return [
        tuple(sorted({(y + dy) % rows * columns + (x + dx) % columns for dy, dx in steps} - {y * columns + x}))
        for y in range(rows)
        for x in range(columns)
    ]


def sides(spec: str, size: int) -> tuple[int, int]:
    """Return rows and columns of `torus:RxC` or, for `torus`, those nearest to a square. UsageError if none fit."""
    if spec != "torus":
        found = re.fullmatch(r"torus:(\d+)x(\d+)", spec)
        if not found:
            raise UsageError(f"topology {spec!r}: write torus:ROWSxCOLUMNS, as in torus:2x4")
        rows, columns = map(int, found.groups())
        if rows * columns != size:
            raise UsageError(f"a torus of {rows}x{columns} has {rows * columns} ranks, not {size}")
        return rows, columns
    rows = max(side for side in range(1, math.isqrt(size) + 1) if size % side == 0)
    if rows == 1 < size:
        raise UsageError(f"torus: {size} is a prime number, so {size} ranks form no grid; take another number, or ring")
    return rows, size // rows


def hypercube(size: int) -> Graph:
    """Return the hypercube: neighbours differ in one bit. UsageError unless the size is a power of two."""
    if size & (size - 1):
        lower = 1 << size.bit_length() - 1
        raise UsageError(f"a hypercube has a power of two of ranks, not {size}: start {lower} or {2 * lower}")
    return [tuple(sorted(rank ^ hop for hop in hops(size))) for rank in range(size)]


def random_regular(size: int, degree: int, seed: int) -> Graph:
    """Return a connected random regular graph; UsageError if none exists, or none of TRIES is connected."""
    if not 0 <= degree < size:
        raise UsageError(f"random-regular: on {size} ranks the degree is 0 to {size - 1}, not {degree}")
    if degree * size % 2:
        raise UsageError(f"random-regular: {size} ranks of degree {degree} would have half an edge; make one even")
    draw = functools.partial(networkx.random_regular_graph, degree, size)
    return _connected("random-regular", "degree", size, seed, draw)


def erdos_renyi(size: int, p: float, seed: int) -> Graph:
    """Return a connected graph with edge probability p; UsageError for a bad p, or if none of TRIES is connected."""
    if not 0 <= p <= 1:
        raise UsageError(f"erdos-renyi: p is a probability, from 0 to 1, not {p}")
    return _connected("erdos-renyi", "p", size, seed, functools.partial(networkx.gnp_random_graph, size, p))


def _connected(name: str, setting: str, size: int, seed: int, draw: Callable[..., networkx.Graph]) -> Graph:
    for attempt in range(TRIES):
        drawn = draw(seed=int(Random(seed)(name, size, attempt).integers(1 << 62)))
        if networkx.is_connected(drawn):
            return _graph(size, drawn.edges)
    raise UsageError(f"{name}: none of {TRIES} random graphs on {size} ranks was connected; raise {setting}")


def matching(size: int, seed: int, step: int) -> Graph:
    """Return a graph of random pairs of ranks; an odd size leaves one rank without a partner."""
    order = Random(seed)("random-matching", step).permutation(size).tolist()
    return _graph(size, zip(order[::2], order[1::2], strict=False))


def _graph(size: int, edges: Iterable[tuple[int, int]]) -> Graph:
    to: list[set[int]] = [set() for _ in range(size)]
    for a, b in edges:
        to[a].add(b)
        to[b].add(a)
    return [tuple(sorted(ranks)) for ranks in to]


def without(before: Topology, ranks: Sequence[int]) -> Topology:
    """Return topology `before`, undirected and without weights, after the loss of these ranks. The neighbours of a lost
    rank form a ring: a connected graph stays connected, and a rank gains at most one more neighbour than it loses."""
    graphs = []
    for step in before.steps:
        graph = [set(to) for to in step]
        for lost in sorted(ranks, reverse=True):
            around = sorted(graph.pop(lost))
            for a, b in zip(around, around[1:] + around[:1], strict=True):
                graph[a - (a > lost)] |= {b} - {a}
                graph[b - (b > lost)] |= {a} - {b}
            graph = [{to - (to > lost) for to in others - {lost}} for others in graph]  # later ranks' numbers decrease
        graphs.append([tuple(sorted(to)) for to in graph])
    name = f"{before.spec} without {format_ranks(sorted(ranks))}" if ranks else before.spec
    return Topology(before.name, name, before.size - len(ranks), graphs)


def read_edges(path: str, size: int) -> dict[tuple[int, int], float | None]:
    """Return the edges of a file, (a, b) with a < b, with their weights or None. # begins a comment. Raises UsageError
    for an unreadable file or, with its number, an invalid line."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"cannot read the edges in {path}: {reason}") from None
    edges: dict[tuple[int, int], float | None] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        here = f"{path}, line {number}"
        try:
            a, b, weight = int(words[0]), int(words[1]), float(words[2]) if words[2:] else None
        except (ValueError, IndexError):
            words = []
        if not 2 <= len(words) <= 3:
            raise UsageError(f"{here}: write 'a b' or 'a b weight', not {line.strip()!r}")
        for rank in (a, b):
            if not 0 <= rank < size:
                raise UsageError(f"{here}: there is no rank {rank}; the ranks are 0 to {size - 1}")
        if a == b:
            raise UsageError(f"{here}: the edge leads from rank {a} to itself; an edge joins two ranks")
        if weight is not None and not 0 < weight <= 1:
            raise UsageError(f"{here}: a weight is above 0 and at most 1, not {weight:g}")
        if edges and (weight is None) != (None in edges.values()):
            raise UsageError(f"{here}: give all edges a weight, or none")
        if edges.setdefault((min(a, b), max(a, b)), weight) != weight:
            raise UsageError(f"{here}: the edge {a} {b} had another weight before")
    return edges


def unreached(graph: Graph) -> str:
    """Return, as text, the ranks that no path from rank 0 reaches; empty if there are none."""
    reached = networkx.descendants(networkx.DiGraph(dict(enumerate(graph))), 0)
    missing = sorted(set(range(1, len(graph))) - reached)
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}{more}" if missing else ""
