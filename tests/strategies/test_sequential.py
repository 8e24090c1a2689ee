"""Sequential SGD against the algorithm as the lecture writes it, in plain numpy."""

import numpy as np
from mpi4py import MPI

from hpcdl.data import from_arrays
from hpcdl.random import Random
from hpcdl.strategies import sequential


def test_linear_regression_step_by_step(follow):
    random = np.random.default_rng(1)
    x, y = random.standard_normal((17, 3)), random.standard_normal(17)
    data = from_arrays(x, y, dtype="float64")
    options = {"optimizer": "sgd", "schedule": "constant", "lr": 0.1, "batch_size": 5, "epochs": 3}
    run = follow(MPI.COMM_SELF, sequential.train, data, "linear", **options)
    first = run.model.initialize(Random(0))
    w, b, t = first[:3].copy(), first[3], 0
    for epoch in range(3):
        order = Random(0)("order", epoch).permutation(17)
        for start in range(0, 17, 5):
            rows = order[start : start + 5]
            error = x[rows] @ w + b - y[rows]
            w, b = w - 0.1 * x[rows].T @ error / len(rows), b - 0.1 * error.mean()
            assert np.allclose(run.path[t], [*w, b], rtol=1e-12, atol=1e-14)
            t += 1
    assert t == len(run.path) == 12


def test_full_gradient_descent_reaches_the_least_squares_solution(follow):
    random = np.random.default_rng(2)
    x, y = random.standard_normal((40, 4)), random.standard_normal(40)
    data = from_arrays(x, y, dtype="float64")
    options = {"optimizer": "sgd", "schedule": "constant", "lr": 0.3, "batch_size": "full", "epochs": 400}
    run = follow(MPI.COMM_SELF, sequential.train, data, "linear", **options)
    exact = np.linalg.lstsq(np.c_[x, np.ones(40)], y, rcond=None)[0]
    assert np.allclose(run.path[-1], exact, atol=1e-8)
