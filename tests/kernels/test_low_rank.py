"""Orthonormal columns, also where columns depend on each other, and the product of two factors."""

import numpy as np
import pytest

from hpcdl.kernels.low_rank import expand, orthogonalize


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("condition", [1.0, 1e5, 1e12])
def test_columns_are_orthonormal_and_span_the_same_space(dtype, condition):
    random, eps = np.random.default_rng(1), float(np.finfo(dtype).eps)
    p = random.standard_normal((200, 7))
    p[:, 3] = p[:, :3] @ [1.0, -2.0, 0.5] + p[:, 3] / condition
    q = p.astype(dtype)
    orthogonalize(q)
    used = q[:, np.linalg.norm(q, axis=0) > 0].astype("f8")
    assert np.abs(used.T @ used - np.eye(used.shape[1])).max() < 50 * eps
    assert used.shape[1] == 7  # with the rounding error of the fourth column as a direction
    assert np.abs(p - used @ (used.T @ p)).max() < 200 * eps * np.abs(p).max()


def test_a_column_that_depends_on_those_before_becomes_zero():
    p = np.zeros((5, 4))
    p[0, 0], p[0, 1], p[1, 3] = 2.0, -3.0, 4.0
    orthogonalize(p)
    assert np.array_equal(p[:2], [[1, 0, 0, 0], [0, 0, 0, 1]]) and not p[2:].any()


def test_float32_does_not_overflow():
    p = np.full((4, 1), 1e30, "float32")
    orthogonalize(p)
    assert p == pytest.approx(0.5)


def test_the_product_and_what_it_leaves():
    random = np.random.default_rng(2)
    p, q, e = (random.standard_normal(shape) for shape in ((6, 3), (5, 3), (6, 5)))
    m, before = np.empty((6, 5)), e.copy()
    expand(m, e, p, q, 0.25)
    assert m == pytest.approx(p @ q.T) and e + m / 4 == pytest.approx(before)
