"""Seconds of an all-reduce of K bytes on N ranks that begin together, by its steps; L, B, a: cluster.py.

    naive           2 L + N K/B + (N-1) K/a, or 2 L + 2 (N-1) K/B + K/a      whichever is more: to add or to receive
    tree            ceil(log2 N) (2 (L + K/B) + K/a)                         N a power of two; else that at most
    ring            2 (N-1) (L + K/N/B) + (N-1) K/N/a
    recursive       2 log2 P L + 2 (P-1)/P K/B + (P-1)/P K/a                 P = N; else its largest power of two, and
                                                                             2 (L + K/B) + K/a for those beyond
    hierarchical    within a node, in its memory, and the ring or recursive of the nodes

Ranks of one node share its port: a recursive exchange between nodes sends up to ranks_per_node times as much through
it, and one between switches all of a switch's through its port; in a ring only two neighbours per node are on another
one. simulated_comm.py simulates that, and segments that hide the adding; the formulas are its limits without noise, and
are tested against it. (Thakur, Rabenseifner and Gropp, 2005)
"""

import math

from hpcdl.errors import unknown
from hpcdl.planning.cluster import Cluster

ALGORITHMS = ("naive", "tree", "ring", "recursive", "hierarchical")


def seconds(algorithm: str, cluster: Cluster, ranks: int, bytes: float) -> float:
    """Return the seconds of an all-reduce of `bytes` bytes. Raises UsageError for an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise unknown("all-reduce algorithm", algorithm, ALGORITHMS)
    if ranks == 1:
        return 0.0
    if algorithm == "hierarchical":
        return hierarchical(cluster, ranks, bytes)
    inside = cluster.nodes(ranks) == 1
    latency = cluster.node_latency if inside else cluster.latency
    bandwidth = cluster.node_bandwidth if inside else cluster.bandwidth
    sharing = 1 if inside else min(ranks, cluster.ranks_per_node)
    add = cluster.add(bytes)
    if algorithm == "naive":
        wire, others = bytes / bandwidth, ranks - 1
        return 2 * latency + others * wire + max(others * wire + add, wire + others * add)
    if algorithm == "ring":
        part = bytes / ranks
        return 2 * (ranks - 1) * (latency + part / bandwidth) + (ranks - 1) * cluster.add(part)
    if algorithm == "tree":
        return tree(cluster, ranks, bytes)
    power = 2 ** int(math.log2(ranks))
    total = 0.0
    for level in range(int(math.log2(power))):  # halves: the farthest partner, with the longest message, first
        distance, part = power >> (level + 1), bytes / 2 ** (level + 1)
        near = inside or distance < cluster.ranks_per_node
        link = cluster.node_latency if near else latency
        far = cluster.nodes_per_switch and distance >= cluster.nodes_per_switch * cluster.ranks_per_node
        wide = cluster.node_bandwidth if near else bandwidth / sharing / (cluster.oversubscription if far else 1)
        total += 2 * (link + part / wide) + cluster.add(part)
    if power != ranks:  # the excess ranks first send their vectors to others, and receive the sum at the end
        total += 2 * (latency + bytes / bandwidth) + add
    return total


def tree(cluster: Cluster, ranks: int, bytes: float) -> float:
    """Return the seconds up and down a binomial tree; the partners of the first steps are on the same node."""
    total, distance = 0.0, 1
    while distance < ranks:
        near = distance < cluster.ranks_per_node
        latency = cluster.node_latency if near else cluster.latency
        bandwidth = cluster.node_bandwidth if near else cluster.bandwidth
        total += 2 * (latency + bytes / bandwidth) + cluster.add(bytes)
        distance *= 2
    return total


def hierarchical(cluster: Cluster, ranks: int, bytes: float) -> float:
    """Return the seconds if a node's ranks add in its memory, one rank per node exchanges, and all copy."""
    nodes, within = cluster.nodes(ranks), min(ranks, cluster.ranks_per_node)
    inside = (
        (within - 1) * bytes / within / cluster.node_bandwidth + bytes / cluster.node_bandwidth + cluster.add(bytes)
    )
    if nodes == 1:
        return inside
    alone = Cluster(1, cluster.latency, cluster.bandwidth, cluster.node_latency, cluster.node_bandwidth, cluster.adding)
    between = "recursive" if nodes & (nodes - 1) == 0 else "ring"
    return (inside if within > 1 else 0.0) + seconds(between, alone, nodes, bytes)
