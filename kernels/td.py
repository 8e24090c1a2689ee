"""Temporal-difference learning of Q-values: n-step returns, targets, Huber errors, importance weights. CPU only.

    n-step return     R = r_t + gamma r_{t+1} + ... + gamma^(m-1) r_{t+m-1},   m = n, or fewer where the episode ends
    its discount      D = gamma^m; 0 if the episode has terminated (not if it was truncated)
    target            y = R + D q'(s', argmax_a q(s', a))       double: the network q chooses, its target q' values
                      y = R + D max_a q'(s', a)                 not double
    error             e = q(s, a) - y
    Huber's loss      H(e) = e^2 / 2 up to |e| = delta, delta (|e| - delta / 2) beyond; delta infinite: the square alone
    slope             w clip(e, -delta, delta) for the action that was taken, 0 for the others
    weight            w = (N P)^-beta,   P = p / (sum of p), N transitions; a learner divides by the batch's largest

A return is built from its last reward backwards, R <- r + gamma R (`step_back`). (n-step: Sutton, 1988; Watkins, 1989;
Huber in DQN: Mnih et al., 2015; double: van Hasselt, Guez and Silver, AAAI 2016; weights: Schaul et al., ICLR 2016)"""

from typing import Any

import numpy as np

from hpcdl.kernels.bind import exact, on_cpu


@exact
def step_back(total, discount, reward, gamma):
    """Return (total, discount) of a return extended by the step before it, which had this reward; at first (0, 1)."""
    return reward + gamma * total, gamma * discount


@exact
def argmax(q, i):
    """Return the column of the first largest element of row i, or of the first NaN, as NumPy does."""
    best = 0
    for a in range(q.shape[1]):
        if q[i, a] != q[i, a]:
            return a
        if q[i, a] > q[i, best]:
            best = a
    return best


@on_cpu
def _targets(valued, chosen, returns, discounts, y):
    for i in range(len(y)):
        y[i] = returns[i] + discounts[i] * valued[i, argmax(chosen, i)]


@on_cpu
def _errors(q, actions, y, weights, delta, slopes, errors):
    total = 0.0
    for i in range(len(y)):
        for a in range(q.shape[1]):
            slopes[i, a] = 0
        e = q[i, actions[i]] - y[i]
        size = abs(e)
        errors[i] = size
        if size <= delta:
            total += np.float64(weights[i]) * (0.5 * np.float64(e) * np.float64(e))
            slopes[i, actions[i]] = weights[i] * e
        elif size > delta:
            total += np.float64(weights[i]) * (delta * (np.float64(size) - 0.5 * delta))
            slopes[i, actions[i]] = weights[i] * q.dtype.type(delta if e > 0 else -delta)
        else:  # NaN
            total += np.float64(e)
            slopes[i, actions[i]] = e
    return total


@on_cpu
def _weights(priorities, total, count, beta, weights):
    for i in range(len(priorities)):
        weights[i] = (count * (priorities[i] / total)) ** -beta


def ready(dtype: Any) -> None:
    """Compile the loops for networks of this type, before a run's clock starts."""
    q, row = np.empty((0, 1), dtype), np.empty(0, dtype)
    targets(q, q, row, row)
    errors(q, row, row, row, 1.0, q)
    importance_weights(np.empty(0), 1.0, 1, 1.0)


def targets(valued: np.ndarray, chosen: np.ndarray, returns: np.ndarray, discounts: np.ndarray) -> np.ndarray:
    """Return the targets y (rows,), of the type of `valued`.
    valued (rows, actions): the target network's values of the next observations. chosen (rows, actions): the values
    that choose the action, the network's for double DQN, else `valued`. returns, discounts (rows,)."""
    y = np.empty(len(valued), valued.dtype)
    arrays = (np.ascontiguousarray(a, valued.dtype) for a in (valued, chosen, returns, discounts))
    _targets(*arrays, y)
    return y


def errors(
    q: np.ndarray, actions: np.ndarray, y: np.ndarray, weights: np.ndarray, delta: float, slopes: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return (the weighted sum of Huber's losses, |e| of each row); slopes (rows, actions) <- the sum's gradient by q.
    q (rows, actions). actions int64 (rows,): columns of q. y, weights (rows,). delta: infinity for the squared loss."""
    sizes, dtype = np.empty(len(q), q.dtype), q.dtype
    rows = (np.ascontiguousarray(a, dtype) for a in (y, weights))
    chosen = np.ascontiguousarray(actions, np.int64)
    return _errors(np.ascontiguousarray(q), chosen, *rows, float(delta), slopes, sizes), sizes


def importance_weights(priorities: np.ndarray, total: float, count: int, beta: float) -> np.ndarray:
    """Return the weights (N P)^-beta, float64 (rows,), of drawn transitions with `priorities`, float64 (rows,), not 0.
    total: the sum of all priorities. count: N. The caller divides by the batch's largest weight (Schaul et al. 2016,
    algorithm 1, line 10), since these rows may be a part of the batch."""
    weights = np.empty(len(priorities))
    _weights(np.ascontiguousarray(priorities), float(total), float(count), float(beta), weights)
    return weights
