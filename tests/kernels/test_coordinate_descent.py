"""Steps of dual coordinate ascent against the maximum of their objective, and passes against plain numpy."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpcdl.csr import CSR
from hpcdl.kernels import coordinate_descent as kernels
from hpcdl.kernels.bind import prepare
from hpcdl.kernels.linear import HINGE, LOGISTIC, SQUARED

KINDS = {"squared": SQUARED, "hinge": HINGE, "logistic": LOGISTIC}
ROWS, FEATURES = 23, 6


@pytest.mark.parametrize("label", [-1.0, 1.0])
@pytest.mark.parametrize("before", [0.0, 1e-12, 0.3, 1 - 1e-9, 1.0])
def test_a_logistic_step_reaches_the_maximum(before, label):
    for q in (1e-8, 0.01, 1.0, 50.0, 1e6, 1e12):
        for z in (-1e4, -40.0, -3.0, 0.0, 0.5, 7.0, 300.0, 1e4):
            a = kernels.dual_step(LOGISTIC, label * before, z, label, q)
            b = label * a
            assert 0 <= b <= 1
            # Where its derivative is zero. What u loses by b's own rounding, q times an eps of b, is no error of u.
            u = label * z + q * (b - before)
            wanted = np.exp(-np.logaddexp(0, u))
            slack = 1e-13 * (1 + abs(u)) + 4e-16 * q + 4e-16 * abs(z)
            assert abs(b - wanted) <= wanted * np.expm1(min(slack, 500)) + 1e-300, (q, z)


def test_a_logistic_step_that_newton_alone_never_ends():
    margin, q = 3.264618504339292, 13176248.255508061
    b = kernels.dual_step(LOGISTIC, 1.0, margin, 1.0, q)
    low, high = 0.0, 1.0  # of 1 - b, which is the smaller
    for _ in range(2000):
        middle = (low + high) / 2
        low, high = (middle, high) if middle < 1 / (1 + np.exp(min(700, q * middle - margin))) else (low, middle)
    assert 0 < low < 1e-5 and 1 - b == pytest.approx(low, rel=1e-9)


def problem(kind, dtype="float64", scale=1.0, outputs=1):
    """Return rows (two belong to no example), each example's row number, targets, and examples with the bias last."""
    random = np.random.default_rng(7)
    x = random.integers(0, 5, (ROWS + 2, FEATURES)) * random.integers(0, 2, (ROWS + 2, FEATURES))
    x[3] = 0
    x = x.astype(dtype)
    source = random.permutation(ROWS + 2)[:ROWS]
    target = random.standard_normal((ROWS, outputs)) if kind == "squared" else random.choice([-1.0, 1.0], (ROWS, 1))
    seen = np.column_stack([scale * x[source].astype("float64"), np.ones(ROWS)])
    return x, source, target, seen


def given(x, source, scale, sparse):
    x = x.copy()
    if not sparse:
        x.flags.writeable = False
        return x, np.full(FEATURES, scale), np.zeros(FEATURES), source
    x = CSR.of(x)
    for part in (x.data, x.indices, x.indptr):
        part.flags.writeable = False
    return x.data, x.indices, x.indptr, scale, source


def naive(kind, seen, target, dual, v, order, step, threshold):
    """Take the textbook's steps, one example after the other; return the sum of losses."""
    loss = 0.0
    for i in order:
        for k in range(target.shape[1]):
            w = np.sign(v[k]) * np.maximum(abs(v[k]) - threshold, 0)
            z, y, a, q = w @ seen[i], target[i, k], dual[i, k], step * (seen[i] @ seen[i])
            if kind == "squared":
                new, loss = a + (y - z - a) / (1 + q), loss + (z - y) ** 2 / 2
            elif kind == "hinge":
                new, loss = y * min(1, max(0, y * a + (1 - y * z) / q)), loss + max(0, 1 - y * z)
            else:
                low, high, loss = 0.0, 1.0, loss + np.log1p(np.exp(-y * z))
                for _ in range(100):
                    b = (low + high) / 2
                    low, high = (b, high) if b < 1 / (1 + np.exp(y * z + q * (b - y * a))) else (low, b)
                new = y * low
            v[k] += step * (new - a) * seen[i]
            dual[i, k] = new
    return loss


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
def test_passes(kind, sparse, threshold):
    outputs = 2 if kind == "squared" else 1
    x, source, target, seen = problem(kind, "uint8", 0.25, outputs)
    rows = given(x, source, 0.25, sparse)
    find_norms, go, certify = kernels.SPARSE if sparse else kernels.DENSE
    norms = np.empty(ROWS)
    find_norms(*rows, norms)
    np.testing.assert_allclose(norms, (seen**2).sum(axis=1), rtol=1e-14)
    states = [(np.zeros((ROWS, outputs)), np.zeros((outputs, FEATURES + 1))) for _ in range(3)]
    step = 1 / (0.05 * ROWS)
    for turn in range(5):
        order = np.random.default_rng(turn).permutation(ROWS)[: 15 if turn == 2 else ROWS]
        wanted = naive(kind, seen, target, *states[0], order, step, threshold)
        for (dual, v), atomic in zip(states[1:], (False, True), strict=True):
            loss = go(*rows, target, norms, dual, v, order, KINDS[kind], step, threshold, atomic)
            assert loss == pytest.approx(wanted, rel=1e-11)
            np.testing.assert_allclose(dual, states[0][0], atol=1e-11)
            np.testing.assert_allclose(v, states[0][1], atol=1e-11)
    assert np.array_equal(states[1][1], states[2][1]) and np.array_equal(states[1][0], states[2][0])  # to the bit
    dual, w = states[1][0], np.random.default_rng(0).standard_normal((outputs, FEATURES + 1))
    back, found = np.zeros_like(w), np.zeros(2)
    for first, last in ((0, 9), (9, ROWS)):
        found += certify(*rows, target, dual, w, first, last, KINDS[kind], step, back)
    np.testing.assert_allclose(back, step * dual.T @ seen, atol=1e-12)
    z, m = seen @ w.T, target * (seen @ w.T)
    losses = {"squared": (z - target) ** 2 / 2, "hinge": np.maximum(0, 1 - m), "logistic": np.log1p(np.exp(-m))}
    assert found[0] == pytest.approx(losses[kind].sum(), rel=1e-12)
    b = np.clip(target * dual, 1e-300, 1 - 1e-16)
    entropy = b * np.log(b) + (1 - b) * np.log1p(-b)
    conjugates = {"squared": dual**2 / 2 - dual * target, "hinge": -target * dual, "logistic": entropy}
    assert found[1] == pytest.approx(conjugates[kind].sum(), rel=1e-10)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_threads_that_add_atomically_lose_nothing(sparse):
    rows_each, threads = 2000, 4
    random = np.random.default_rng(1)
    x = random.standard_normal((rows_each * threads, 3))  # few features: all meet at the same numbers
    x.flags.writeable = False
    target = np.sign(random.standard_normal((len(x), 1)))
    source = np.arange(len(x))
    given_rows = (x, np.ones(3), np.zeros(3), source)
    if sparse:
        c = CSR.of(x)
        given_rows = (c.data, c.indices, c.indptr, 1.0, source)
    find_norms, go, certify = kernels.SPARSE if sparse else kernels.DENSE
    norms, dual, v = np.empty(len(x)), np.zeros((len(x), 1)), np.zeros((1, 4))
    find_norms(*given_rows, norms)
    step = 1 / (0.01 * len(x))
    parts = np.array_split(np.random.default_rng(2).permutation(len(x)), threads)
    prepare(go, *given_rows, target, norms, dual, v, parts[0][:0], LOGISTIC, step, 0.0, True)
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(10):
            list(pool.map(lambda part: go(*given_rows, target, norms, dual, v, part, LOGISTIC, step, 0.0, True), parts))
    back = np.zeros_like(v)
    certify(*given_rows, target, dual, v, 0, len(x), LOGISTIC, step, back)
    assert np.abs(back - v).max() <= 1e-12 * np.abs(step * dual * x).sum()


def test_a_value_that_is_no_number_stays_one():
    assert np.isnan(kernels.thresholded(np.nan, 0.5)) and kernels.thresholded(0.4, 0.5) == 0
    assert kernels.thresholded(-0.75, 0.5) == -0.25 and kernels.thresholded(0.75, 0.5) == 0.25
    for kind in KINDS.values():
        assert np.isnan(kernels.loss_of(kind, np.nan, 1.0))
