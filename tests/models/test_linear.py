"""Linear regression: its gradient is zero at the least-squares solution."""

import numpy as np
import pytest

from hpcdl.models import make_model


def test_gradient_vanishes_at_the_least_squares_solution(make_batch):
    model = make_model("linear", (4,), 0, "float64")
    batch = make_batch(30, 4, 0, "float64")
    solution, (squares,), _, _ = np.linalg.lstsq(np.c_[batch.x, np.ones(30)], batch.y, rcond=None)
    gradient = np.zeros(model.size)
    loss = model.loss_and_gradient(solution, batch, gradient)
    np.testing.assert_allclose(gradient, 0, atol=1e-12)
    assert 2 * loss == pytest.approx(squares, rel=1e-12)
    assert model.evaluate(solution, batch)[1] == pytest.approx(squares, rel=1e-12)
    model.loss_and_gradient(solution + 0.1, batch, gradient)
    assert abs(gradient).min() > 0.1
