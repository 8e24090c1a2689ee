"""Mixing matrices: the weights of neighbours in gossip averaging, and the convergence rate.

    x_i <- sum over j of W[i, j] x_j            W[i, j] > 0 only where j sends to i

W is doubly stochastic. With rows that sum to 1, equal replicas stay equal; with columns that sum to 1, the average of
the replicas is kept. Each step shrinks the distance to the average at least by the factor lambda:

    |X - mean| <- lambda |X - mean|             lambda = || W - 11^T/n ||, the spectral gap is 1 - lambda

    topology                    weights           1 - lambda for many ranks
    ring                        1/3               about 4 pi^2 / (3 n^2)
    torus of k x k              1/5               about 4 pi^2 / (5 n)
    hypercube, d = log2 n       1/(d+1)           2 / (d+1)
    exponential, even n         1/(d+1)           2 / (d+1), d = ceil(log2 n)
    one-peer, n = 2^d           1/2               after d steps the average is exact
    star                        1/n               1/n
    complete                    1/n               1

(Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004; Xiao, Boyd and Kim, "Distributed average
consensus with least-mean-square deviation", 2007: Metropolis-Hastings weights; Ying et al., "Exponential graph is
provably efficient for decentralized deep training", NeurIPS 2021; Lu and De Sa, "Optimal complexity in decentralized
training", ICML 2021: exact averaging, acceleration)"""

import functools
import math
from collections.abc import Callable

import networkx
import numpy as np

from hpcdl.comm.gossip.topology import Topology, hops, unreached
from hpcdl.errors import UsageError, unknown

RULES = "metropolis-hastings", "uniform"
ROUNDING = 1e-12


def mixing(topology: Topology, step: int, rule: str = RULES[0]) -> np.ndarray:
    """Return W of a step, (size, size) float64. W[i, j], the weight of rank j in the mean of rank i, is the file's, or
    1 / (1 + max(d_i, d_j)) (metropolis-hastings) or 1 / (1 + max d) (uniform), d: degrees. Each row sums to 1."""
    if rule not in RULES:
        raise unknown("mixing rule", rule, RULES)
    graph, size = topology.graph(step), topology.size
    degree = np.array([len(to) for to in graph])
    w = np.zeros((size, size))
    for j, to in enumerate(graph):
        for i in to:
            if topology.weights:
                w[i, j] = topology.weights[min(i, j), max(i, j)]
            else:
                w[i, j] = 1 / (1 + (degree.max() if rule == "uniform" else max(degree[i], degree[j])))
    w[np.diag_indices(size)] = 1 - w.sum(axis=1)
    return w


def matrices(topology: Topology, rule: str) -> Callable[[int], np.ndarray]:
    """Return the function step -> mixing matrix; the matrices of a period are computed once."""
    if topology.period is None:
        return lambda step: mixing(topology, step, rule)
    period = [mixing(topology, step, rule) for step in range(topology.period)]
    return lambda step: period[step % len(period)]


def mixing_over_period(topology: Topology, rule: str = RULES[0]) -> np.ndarray:
    """Return the product over a period, W_(p-1) ... W_1 W_0; for random matchings, the mean E[W] of one step. A
    matching's W is a projection, so E |W x|^2 = x^T E[W] x: E[W]'s second eigenvalue bounds squared distances."""
    size = topology.size
    if topology.period is None:
        pair = 1 / (2 * math.ceil(size / 2) - 1)  # probability that two given ranks are paired
        return np.eye(size) + pair / 2 * (np.ones((size, size)) - size * np.eye(size))
    return functools.reduce(lambda w, step: mixing(topology, step, rule) @ w, range(topology.period), np.eye(size))


def second_eigenvalue(w: np.ndarray) -> float:
    """Return lambda = || W - 11^T/n ||, the largest singular value: a step shrinks |x - mean| at least by this factor.
    It is the second largest absolute eigenvalue of symmetric W and circulants (exponential graphs)."""
    return float(np.linalg.norm(w - 1 / len(w), 2))


def spectral_gap(w: np.ndarray) -> float:
    """Return 1 - lambda, see `second_eigenvalue`."""
    return 1 - second_eigenvalue(w)


def check_mixing(w: np.ndarray) -> None:
    """Raise UsageError if W is not doubly stochastic, or does not converge to the average."""
    for axis, name in ((1, "row"), (0, "column")):
        sums = w.sum(axis=axis)
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > ROUNDING:
            raise UsageError(f"mixing matrix: {name} {worst} sums to {sums[worst]:.6g}, not to 1")
    i, j = np.unravel_index(np.argmin(w), w.shape)
    if w[i, j] < -ROUNDING:
        rest = f": the weights of the other ranks sum to {1 - w[i, i]:.6g}" if i == j else ""
        raise UsageError(f"mixing matrix: row {i} gives rank {j} the weight {w[i, j]:.6g}, below 0{rest}")
    if missing := unreached([tuple(np.flatnonzero(column)) for column in w.T]):
        raise UsageError(f"mixing matrix: no path leads from rank 0 to {missing}")
    if second_eigenvalue(w) > 1 - ROUNDING:
        raise UsageError("mixing matrix: the vectors do not converge to their mean; give each rank weight for its own")


def acceleration(w: np.ndarray) -> float:
    """Return eta = (1 - sqrt(1 - lambda^2)) / (1 + sqrt(1 - lambda^2)) of accelerated gossip (rounds.py): the distance
    falls like sqrt(eta)^k, not lambda^k. 0 for asymmetric W: with complex eigenvalues acceleration would slow it."""
    root = math.sqrt(1 - second_eigenvalue(w) ** 2) if np.array_equal(w, w.T) else 1
    return (1 - root) / (1 + root)


def rounds_until(w: np.ndarray, distance: float) -> int:
    """Return how many rounds of accelerated gossip reduce |X - mean| by the factor `distance`; at least 1."""
    eta, before, now, rounds = acceleration(w), np.eye(len(w)), w, 1
    while second_eigenvalue(now) > distance:
        now, before, rounds = (1 + eta) * w @ now - eta * before, now, rounds + 1
    return rounds


def exact_factors(topology: Topology) -> list[np.ndarray]:
    """Return F_0, F_1, ..., F_(k-1), (size, size) and zero off the edges, with F_(k-1) ... F_1 F_0 = 11^T/n.

    A complete graph needs one factor; a hypercube, and exponential graphs on 2^d ranks, d halvings. On other graphs
    partial sums go to a root by shortest paths, and the mean returns: the number of factors is the longest distance to
    the root plus that from it, for the best root (undirected: 2 radius), with 2 (n-1) messages in all. Rings and some
    others need half as many (Hendrickx et al., "Graph diameter, eigenvalues, and minimum-time consensus", 2014), but
    every factor sends over every edge. Raises UsageError for random matchings, and for one-peer unless size is 2^d."""
    size, me = topology.size, np.arange(topology.size)
    if topology.name == "complete":
        return [mixing(topology, 0)]
    if topology.name == "hypercube":
        return [(np.eye(size) + np.eye(size)[me ^ hop]) / 2 for hop in hops(size)]
    if topology.directed and size & (size - 1) == 0:
        return [(np.eye(size) + np.eye(size)[(me - hop) % size]) / 2 for hop in hops(size)]
    if topology.period != 1:
        what = "one-peer needs a power of two of ranks" if topology.period else "random matchings never average exactly"
        raise UsageError(f"no exact averaging in factors on {size} ranks: {what}; take exponential, or ring")
    graph = networkx.DiGraph(topology.edges)
    graph.add_nodes_from(range(size))
    away = dict(networkx.all_pairs_shortest_path_length(graph))
    up, down, root = min(
        (max(away[rank][root] for rank in range(size)), max(away[root].values()), root) for root in range(size)
    )
    factors = []
    for depth in range(up, 0, -1):
        f = np.eye(size)
        for rank in range(size):
            if away[rank][root] == depth:
                f[min(to for to in graph.successors(rank) if away[to][root] == depth - 1), rank] = 1
        factors.append(f)
    if factors:
        factors[-1][root] /= size
    for depth in range(1, down + 1):
        f = np.eye(size)
        for rank in range(size):
            if away[root][rank] == depth:
                f[rank] = np.eye(size)[min(by for by in graph.predecessors(rank) if away[root][by] == depth - 1)]
        factors.append(f)
    return factors
