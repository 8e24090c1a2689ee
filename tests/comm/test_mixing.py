"""Mixing matrices: doubly stochastic, along the edges, and as fast as theory says."""

import functools
import math

import networkx
import numpy as np
import pytest
from graphs import SIZES, graphs, pairs

from hpcdl.comm.gossip.mixing import (
    RULES,
    acceleration,
    check_mixing,
    exact_factors,
    mixing,
    mixing_over_period,
    rounds_until,
    second_eigenvalue,
    spectral_gap,
)
from hpcdl.comm.gossip.topology import SETTINGS, Topology, topology
from hpcdl.errors import UsageError

POWERS = 1, 2, 4, 8, 16
SPECS = [spec for spec in SETTINGS if spec != "random-matching"]
STATIC = [spec for spec in SPECS if spec != "one-peer"]


def eigenvalues(w):
    """Absolute, from the largest on, another way than by singular values."""
    return sorted(abs(np.linalg.eigvals(w)), reverse=True)


def distance(x):
    return np.linalg.norm(x - x.mean(axis=0))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spec", SETTINGS)
def test_weights_are_doubly_stochastic_and_along_the_edges(spec, rule):
    for found in graphs(spec):
        for step in range(found.period or 5):
            w, graph = mixing(found, step, rule), found.graph(step)
            assert w.shape == (found.size, found.size) and w.dtype == np.float64
            assert abs(w.sum(axis=0) - 1).max() < 1e-12 and abs(w.sum(axis=1) - 1).max() < 1e-12
            assert w.min() >= 0
            sends = np.array([[i in graph[j] for j in range(found.size)] for i in range(found.size)])
            assert np.array_equal((w > 0) & ~np.eye(found.size, dtype=bool), sends)
            assert found.directed or np.array_equal(w, w.T)
        check_mixing(mixing_over_period(found, rule))


def test_weights_of_both_rules():
    star = topology("star", 4)
    assert mixing(star, 0, "uniform")[0].tolist() == [0.25, 0.25, 0.25, 0.25]
    path = Topology("path", "path", 4, [[(1,), (0, 2), (1, 3), (2,)]])
    third = 1 / 3
    metropolis = [[2 / 3, third, 0, 0], [third, third, third, 0], [0, third, third, third], [0, 0, third, 2 / 3]]
    assert np.allclose(mixing(path, 0), metropolis, atol=1e-15)
    lollipop = Topology("lollipop", "lollipop", 5, [[(1, 2), (0, 2), (0, 1, 3), (2, 4), (3,)]])
    assert np.isclose(mixing(lollipop, 0)[0, 1], 1 / 3) and np.isclose(mixing(lollipop, 0)[0, 2], 1 / 4)
    assert np.isclose(mixing(lollipop, 0, "uniform")[3, 4], 1 / 4) and np.isclose(mixing(lollipop, 0)[3, 4], 1 / 3)
    for spec in "ring", "exponential", "hypercube", "torus", "complete", "random-regular":
        regular = topology(spec, 8)
        w = mixing(regular, 0, "uniform")
        assert np.allclose(w[w > 0], 1 / (1 + len(regular.graph(0)[0])), atol=1e-15)
    for spec in "one-peer", "random-matching":
        w = mixing(topology(spec, 8), 3)
        assert set(w[w > 0]) == {0.5}
    assert mixing(topology("one-peer", 5), 1)[3, 1] == 0.5, "rank 3 receives from rank 1"


def test_weights_of_a_file_win_and_sum_to_one_at_most(tmp_path):
    path = tmp_path / "graph"
    path.write_text("0 1 0.5\n2 1 0.125\n")
    wanted = [[0.5, 0.5, 0], [0.5, 0.375, 0.125], [0, 0.125, 0.875]]
    for rule in RULES:
        assert np.allclose(mixing(topology(str(path), 3), 0, rule), wanted, atol=1e-15)
    path.write_text("0 1 0.5\n1 2 0.75\n")
    with pytest.raises(UsageError, match=r"row 1 gives rank 1 the weight -0.25, below 0: .* ranks sum to 1.25"):
        check_mixing(mixing(topology(str(path), 3), 0))


def cosine(k, n):
    return math.cos(2 * math.pi * k / n)


@pytest.mark.parametrize("n", range(3, 17))
def test_closed_forms(n):
    def found(spec):
        return second_eigenvalue(mixing(topology(spec, n), 0, "uniform"))

    assert np.isclose(found("ring"), max(abs(1 + 2 * cosine(k, n)) / 3 for k in range(1, n)), atol=1e-12)
    assert np.isclose(found("complete"), 0, atol=1e-12)
    assert np.isclose(found("star"), 1 - 1 / n, atol=1e-12)
    if n % 2 == 0:
        assert np.isclose(1 - found("exponential"), 2 / (1 + math.ceil(math.log2(n))), atol=1e-12)
    if n in POWERS:
        assert np.isclose(found("hypercube"), 1 - 2 / (math.log2(n) + 1), atol=1e-12)


@pytest.mark.parametrize("rows, columns", [(3, 3), (3, 4), (4, 4), (3, 5)])
def test_closed_form_of_the_torus(rows, columns):
    """Its eigenvalues are sums of those of two rings: (1 + 2 cos + 2 cos) / 5."""
    wanted = sorted(
        abs(1 + 2 * cosine(i, rows) + 2 * cosine(j, columns)) / 5 for i in range(rows) for j in range(columns)
    )[-2]
    w = mixing(topology(f"torus:{rows}x{columns}", rows * columns), 0, "uniform")
    assert np.isclose(second_eigenvalue(w), wanted, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spec", STATIC)
def test_second_eigenvalue_is_one(spec, rule):
    """For symmetric matrices and for circulants the largest singular value of W - 11^T/n is an eigenvalue of W."""
    for found in graphs(spec):
        w = mixing(found, 0, rule)
        wanted = eigenvalues(w)[1] if found.size > 1 else 0
        assert np.isclose(second_eigenvalue(w), wanted, atol=1e-10)
        assert spectral_gap(w) == 1 - second_eigenvalue(w) > 1e-3


@pytest.mark.parametrize("spec", SETTINGS)
def test_averaging_shrinks_the_distance_at_least_so(spec):
    for found in graphs(spec, (2, 4, 5, 8, 12, 16)):
        random = np.random.default_rng(2)
        x = random.normal(size=(found.size, 50))
        mean = x.mean(axis=0)
        if found.period == 1:
            w = mixing(found, 0)
            slowest = np.linalg.svd(w - 1 / found.size)[2][0]
            assert np.isclose(distance(w @ slowest), second_eigenvalue(w) * distance(slowest), atol=1e-12)
        for start in range(0, 12, found.period or 1):
            before, squared = x, distance(x) ** 2
            for step in range(start, start + (found.period or 1)):
                x = mixing(found, step) @ x
            assert np.allclose(x.mean(axis=0), mean, atol=1e-12)
            if found.period:
                assert distance(x) <= second_eigenvalue(mixing_over_period(found)) * distance(before) + 1e-12
            else:
                assert distance(x) ** 2 <= squared + 1e-12


@pytest.mark.parametrize("size", [2, 5, 6])
def test_random_matchings_in_the_mean(size):
    """Over all orders of the ranks: E[W], and the mean squared distance that it bounds."""
    found, steps = topology("random-matching", size), 2000
    mean = sum(mixing(found, step) for step in range(steps)) / steps
    assert abs(mean - mixing_over_period(found)).max() < 0.05
    wanted = 0.5 if size % 2 else (size - 2) / (2 * (size - 1))
    assert np.isclose(second_eigenvalue(mixing_over_period(found)), wanted, atol=1e-12)
    w = mixing(found, 0)
    assert np.allclose(w @ w, w, atol=1e-15)


@pytest.mark.parametrize("size", SIZES)
def test_a_period_of_one_peer_averages_exactly_on_powers_of_two(size):
    gap = abs(mixing_over_period(topology("one-peer", size)) - 1 / size).max()
    assert gap < 1e-12 if size in POWERS else gap > 1e-3


@pytest.mark.parametrize("spec", ["ring", "torus", "hypercube", "star", "complete", "random-regular"])
def test_acceleration(spec):
    w = mixing(topology(spec, 16), 0)
    eta, second = acceleration(w), second_eigenvalue(w)
    assert np.isclose((1 + eta) ** 2 * second**2, 4 * eta, atol=1e-10), "critical damping of the slowest part"
    x = before = start = np.random.default_rng(3).normal(size=16)
    for _ in range(60):
        x, before = (1 + eta) * (w @ x) - eta * before, x
    assert distance(x) < 60 * math.sqrt(eta) ** 60 * distance(start) + 1e-12
    assert np.isclose(x.mean(), start.mean(), atol=1e-12)


def test_no_acceleration_where_it_would_slow_down():
    for size in SIZES:
        w = mixing(topology("exponential", size), 0)
        assert acceleration(w) == 0 or np.array_equal(w, w.T)


@pytest.mark.parametrize("spec", SPECS)
def test_factors_average_exactly_along_the_edges(spec):
    for found in graphs(spec):
        size = found.size
        if found.name == "one-peer" and size not in POWERS:
            with pytest.raises(UsageError, match=f"on {size} ranks: one-peer needs a power of two"):
                exact_factors(found)
            continue
        factors = exact_factors(found)
        assert abs(functools.reduce(lambda done, f: f @ done, factors, np.eye(size)) - 1 / size).max() < 1e-12
        for step, f in enumerate(factors):
            sends = {(int(j), int(i)) for i, j in np.argwhere(f) if i != j}
            assert sends <= (pairs(found.graph(step)) if found.name == "one-peer" else found.edges)
            assert f.min() >= 0
        halvings = found.name in ("hypercube", "exponential", "one-peer") and size in POWERS
        if halvings:
            assert len(factors) == math.log2(size)
        elif found.name == "complete":
            assert len(factors) == 1
        elif not found.directed:
            undirected = networkx.Graph(list(found.edges))
            assert len(factors) == (2 * networkx.radius(undirected) if size > 1 else 0)
            assert sum(np.count_nonzero(f * (1 - np.eye(size))) for f in factors) == 2 * (size - 1)
        else:
            assert len(factors) <= 2 * math.ceil(math.log2(size))


@pytest.mark.parametrize(
    "w, says",
    [
        ([[0.5, 0.5, 0], [0.25, 0.25, 0.5], [0.25, 0.5, 0.5]], "row 2 sums to 1.25, not to 1"),
        ([[0.5, 0.25, 0.25], [0.5, 0.5, 0], [0.5, 0, 0.5]], "column 0 sums to 1.5, not to 1"),
        ([[1.25, -0.25], [-0.25, 1.25]], "row 0 gives rank 1 the weight -0.25, below 0"),
        (np.kron(np.eye(2), np.full((2, 2), 0.5)), "no path leads from rank 0 to ranks 2, 3"),
        (np.eye(12), "no path leads from rank 0 to ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"),
        ([[0, 1], [1, 0]], "the vectors do not converge to their mean"),
    ],
)
def test_bad_matrices(w, says):
    with pytest.raises(UsageError) as error:
        check_mixing(np.array(w, float))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_there_is_not():
    with pytest.raises(UsageError, match=r"unknown mixing rule 'unifrom' \(did you mean 'uniform'\?\)"):
        mixing(topology("ring", 4), 0, "unifrom")
    with pytest.raises(UsageError, match="no exact averaging in factors on 6 ranks"):
        exact_factors(topology("random-matching", 6))


@pytest.mark.parametrize("spec", ["ring", "star", "exponential", "torus", "hypercube", "complete"])
def test_rounds_until_the_distance_is_what_is_asked(spec):
    for size in (4, 16, 64):
        w = mixing(topology(spec, size), 0)
        rounds, eta = rounds_until(w, 1 / size), acceleration(w)
        now, before, left = w, np.eye(size), []
        for _ in range(rounds):
            left.append(np.linalg.norm(now - 1 / size, 2))
            now, before = (1 + eta) * w @ now - eta * before, now
        assert left[-1] <= 1 / size and all(each > 1 / size for each in left[:-1])
