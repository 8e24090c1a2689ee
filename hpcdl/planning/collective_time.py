"""Seconds of an all-reduce of K bytes on N ranks that begin together. L: latency, B: bandwidth, a: adding (cluster.py).

    naive           2 L + N K/B + (N-1) K/a, or 2 L + 2 (N-1) K/B + K/a      the larger: adding or receiving is slower
    tree            ceil(log2 N) (2 (L + K/B) + K/a)                         N a power of two; else an upper bound
    ring            2 (N-1) (L + K/N/B) + (N-1) K/N/a
    recursive       2 log2 N L + 2 (N-1)/N K/B + (N-1)/N K/a                 N a power of two; else as circulant
    circulant       2 ceil(log2 N) L + 2 (N-1)/N K/B + (N-1)/N K/a
    double_tree     h (2 (L + m/B) + m/a) + (s-1) m (1/B + max(1/B, 1/a))    h = floor(log2 N); s segments of a half;
                                                                             m = K/s; an estimate, to a fifth
    hierarchical    p + e + (q-1) max(e, p + c) + c                          q pieces: p to add one in a node's memory,
                                                                             e recursive between nodes, c to copy

The ranks of a node share its port: a recursive or circulant exchange between nodes sends up to ranks_per_node times as
much through it. The nodes of a switch share its port. On a ring, a node has only two neighbours on other nodes.
simulated_comm.py simulates the ports, and segments that are added while the next one is sent. The formulas are the
limits of its times without noise, and are tested against it. (Thakur, Rabenseifner and Gropp, 2005)"""

import dataclasses
import math

from hpcdl.comm.allreduce import double_tree
from hpcdl.comm.allreduce.circulant import rounds
from hpcdl.comm.allreduce.hierarchical import PIECE
from hpcdl.planning.cluster import Cluster

ALGORITHMS = ("naive", "tree", "ring", "recursive", "circulant", "double_tree", "hierarchical")
COMPARED = ("recursive", "ring", "tree", "naive", "double_tree")  # by `fastest`; equal ones: the first
EQUAL = 1.01  # ratio of times up to which they count as equal


def seconds(algorithm: str, cluster: Cluster, ranks: int, bytes: float) -> float:
    """Return the seconds of an all-reduce of `bytes` bytes by one of ALGORITHMS."""
    if ranks == 1:
        return 0.0
    if algorithm == "hierarchical":
        return hierarchical(cluster, ranks, bytes)
    inside, add = cluster.nodes(ranks) == 1, cluster.add(bytes)
    latency, bandwidth = cluster.link(inside)
    if algorithm == "double_tree":  # an inner rank of a tree has two children, which share its port
        children, count = min(2, ranks - 1), double_tree.segment_count(bytes / 2)
        wire, added = children * bytes / 2 / count / bandwidth, children * cluster.add(bytes / 2 / count)
        return int(math.log2(ranks)) * (2 * (latency + wire) + added) + (count - 1) * (wire + max(wire, added))
    if algorithm == "naive":
        wire, others = bytes / bandwidth, ranks - 1
        return 2 * latency + others * wire + max(others * wire + add, wire + others * add)
    if algorithm == "ring":
        part = bytes / ranks
        return 2 * (ranks - 1) * (latency + part / bandwidth) + (ranks - 1) * cluster.add(part)
    total = 0.0
    if algorithm == "tree":  # up and down; the partners of the first steps are on the same node
        for level in range(math.ceil(math.log2(ranks))):
            latency, bandwidth = cluster.link(2**level < cluster.ranks_per_node)
            total += 2 * (latency + bytes / bandwidth) + add
        return total
    pairs = algorithm == "recursive" and ranks & (ranks - 1) == 0  # of ranks that exchange, with one node each or none
    of_switch = cluster.nodes_per_switch * cluster.ranks_per_node
    for distance, count in rounds(ranks):  # the farthest partner, with the longest message, first
        near, part = inside or (pairs and distance < cluster.ranks_per_node), count * bytes / ranks
        step_latency, wide = cluster.link(near)
        if not near:
            leaving = min(ranks if pairs else distance, cluster.ranks_per_node)  # of a node's ranks, beyond the node
            far = min(1.0, distance // of_switch if pairs else distance / of_switch) if of_switch else 0.0
            wide = wide / leaving / max(1.0, far * cluster.oversubscription)
        total += 2 * (step_latency + part / wide) + cluster.add(part)
    return total


def fastest(cluster: Cluster, ranks: int, bytes: float) -> str:
    """Return the fastest of COMPARED for an all-reduce of `bytes` bytes."""
    times = {name: seconds(name, cluster, ranks, bytes) for name in COMPARED}
    return next(name for name in COMPARED if times[name] <= EQUAL * min(times.values()))


def hierarchical(cluster: Cluster, ranks: int, bytes: float) -> float:
    """Return the seconds of an all-reduce: ranks of a node add in its memory, one per node exchanges, and all copy,
    piece after piece."""
    nodes, within = cluster.nodes(ranks), min(ranks, cluster.ranks_per_node)
    alone = dataclasses.replace(cluster, ranks_per_node=1)
    if within == 1:
        return seconds("recursive", alone, nodes, bytes)
    count = max(1, math.ceil(bytes / PIECE)) if nodes > 1 else 1
    piece = bytes / count
    added = (within - 1) * piece / within / cluster.node_bandwidth + cluster.add(piece)
    copied, exchanged = piece / cluster.node_bandwidth, seconds("recursive", alone, nodes, piece)
    return added + exchanged + (count - 1) * max(exchanged, added + copied) + copied
