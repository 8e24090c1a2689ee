"""Seconds of an all-reduce of K bytes on N ranks that begin together. L: latency, B: bandwidth, a: adding (cluster.py).

    naive           2 L + N K/B + (N-1) K/a, or 2 L + 2 (N-1) K/B + K/a      the larger: adding or receiving is slower
    tree            ceil(log2 N) (2 (L + K/B) + K/a)                         N a power of two; else an upper bound
    ring            2 (N-1) (L + K/N/B) + (N-1) K/N/a
    recursive       2 log2 P L + 2 (P-1)/P K/B + (P-1)/P K/a                 P: the largest power of two up to N;
                                                                             P < N: 2 (L + K/B) + K/a more
    hierarchical    add in a node's memory, recursive (2^k nodes) or ring between nodes, copy in memory

The ranks of a node share its port: a recursive exchange between nodes sends up to ranks_per_node times as much through
it. The nodes of a switch share the switch's port. On a ring, a node has only two neighbours on other nodes.
simulated_comm.py simulates the ports, and segments that are added while the next one is sent. The formulas are the
limits of its times without noise, and are tested against it. (Thakur, Rabenseifner and Gropp, 2005)"""

import math

from hpcdl.planning.cluster import Cluster

ALGORITHMS = ("naive", "tree", "ring", "recursive", "hierarchical")


def seconds(algorithm: str, cluster: Cluster, ranks: int, bytes: float) -> float:
    """Return the seconds of an all-reduce of `bytes` bytes by one of ALGORITHMS."""
    if ranks == 1:
        return 0.0
    if algorithm == "hierarchical":
        return hierarchical(cluster, ranks, bytes)
    inside, add = cluster.nodes(ranks) == 1, cluster.add(bytes)
    latency, bandwidth = cluster.link(inside)
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
    power = 2 ** int(math.log2(ranks))
    for level in range(int(math.log2(power))):  # halves: the farthest partner, with the longest message, first
        distance, part = power >> (level + 1), bytes / 2 ** (level + 1)
        near = inside or distance < cluster.ranks_per_node
        step_latency, wide = cluster.link(near)
        if not near:
            far = cluster.nodes_per_switch and distance >= cluster.nodes_per_switch * cluster.ranks_per_node
            wide = wide / min(ranks, cluster.ranks_per_node) / (cluster.oversubscription if far else 1)
        total += 2 * (step_latency + part / wide) + cluster.add(part)
    if power != ranks:  # the excess ranks first send their vectors to others, and receive the sum at the end
        total += 2 * (latency + bytes / bandwidth) + add
    return total


def hierarchical(cluster: Cluster, ranks: int, bytes: float) -> float:
    """Return the seconds of an all-reduce: ranks of a node add in its memory, one per node exchanges, and all copy."""
    nodes, within = cluster.nodes(ranks), min(ranks, cluster.ranks_per_node)
    added, copied = (within - 1) * bytes / within / cluster.node_bandwidth, bytes / cluster.node_bandwidth
    inside = added + copied + cluster.add(bytes)
    if nodes == 1:
        return inside
    alone = Cluster(1, cluster.latency, cluster.bandwidth, cluster.node_latency, cluster.node_bandwidth, cluster.adding)
    between = "recursive" if nodes & (nodes - 1) == 0 else "ring"
    return (inside if within > 1 else 0.0) + seconds(between, alone, nodes, bytes)
