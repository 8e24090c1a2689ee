"""What temporal-difference learning of Q-values needs: n-step returns, targets, errors and their weights. CPU only.

    n-step return     R = r_t + gamma r_{t+1} + ... + gamma^(m-1) r_{t+m-1},   m = n, or fewer where the episode ends
    its discount      D = gamma^m; 0 where the episode has terminated, not where it was cut
    target            y = R + D q'(s', argmax_a q(s', a))       double: chosen by the network, valued by its target
                      y = R + D max_a q'(s', a)                 not double
    error             e = q(s, a) - y
    Huber's loss      H(e) = e^2 / 2 up to |e| = delta, delta (|e| - delta / 2) beyond; delta infinite: the square alone
    slope             w clip(e, -delta, delta) for the action that was taken, 0 for the others
    weight            w = (N P)^-beta,   P = p / (sum of p), N transitions; a learner divides by the batch's largest

A return is built from its last reward backwards, R <- r + gamma R, so that every suffix of an episode's end costs one
step (`step_back`; the replay's loop uses it). Each function has a twin in plain NumPy of the same arguments, *_numpy.

(n-step: Sutton, 1988; Watkins, 1989; Huber in DQN: Mnih et al., Nature 2015; double: van Hasselt, Guez and Silver, AAAI
2016; weights: Schaul et al., ICLR 2016)
"""

from functools import cache
from typing import Any

import numba
import numpy as np

from hpcdl.kernels.bind import exact, on_cpu, prepare


@exact
def step_back(total, discount, reward, gamma):
    """(return, discount) over one step more, the one before, which had this reward; of no steps they are (0, 1)."""
    return reward + gamma * total, gamma * discount


@exact
def argmax(q, i):
    """The first of the largest of row i; of NaN the first, as NumPy has it."""
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


@cache
def loops(dtype: np.dtype) -> tuple[Any, Any, Any]:
    """The three loops, compiled for networks of this type."""
    T, number, whole = numba.from_dtype(dtype), numba.types.float64, numba.types.int64
    row, matrix = T[::1], T[:, ::1]
    return (
        prepare(_targets, matrix, matrix, row, row, row),
        prepare(_errors, matrix, whole[::1], row, row, number, matrix, row),
        prepare(_weights, number[::1], number, number, number, number[::1]),
    )


def ready(dtype: Any) -> None:
    """Compile what networks of this type need, before any clock runs."""
    loops(np.dtype(dtype))


def targets(valued: np.ndarray, chosen: np.ndarray, returns: np.ndarray, discounts: np.ndarray) -> np.ndarray:
    """The targets y (rows,), of the type of `valued`.

    valued (rows, actions): the target network's values of what came after; chosen (rows, actions): those by which the
    action is chosen, for double DQN the network's own, else `valued` again. returns, discounts (rows,).
    """
    y = np.empty(len(valued), valued.dtype)
    given = (np.ascontiguousarray(each, valued.dtype) for each in (valued, chosen, returns, discounts))
    loops(valued.dtype)[0](*given, y)
    return y


def errors(
    q: np.ndarray, actions: np.ndarray, y: np.ndarray, weights: np.ndarray, delta: float, slopes: np.ndarray
) -> tuple[float, np.ndarray]:
    """(the weighted sum of Huber's losses, |e| of each row); slopes (rows, actions) become those of that sum at q.

    q (rows, actions); actions int64 (rows,), which must be columns of q; y, weights (rows,). delta: infinity for the
    square.
    """
    found, dtype = np.empty(len(q), q.dtype), q.dtype
    rows = (np.ascontiguousarray(each, dtype) for each in (y, weights))
    chosen = np.ascontiguousarray(actions, np.int64)
    return loops(dtype)[1](np.ascontiguousarray(q), chosen, *rows, float(delta), slopes, found), found


def importance_weights(priorities: np.ndarray, total: float, count: int, beta: float) -> np.ndarray:
    """Weights (N P)^-beta, float64 (rows,), of what was drawn by priorities float64 (rows,), none of them 0.

    total: the sum of the priorities of all; count: N, how many they are. Nothing is divided by the largest weight here:
    rows may be part of a batch, whose largest is elsewhere (Schaul et al. 2016, algorithm 1, line 10).
    """
    weights = np.empty(len(priorities))
    loops(np.dtype(np.float32))[2](np.ascontiguousarray(priorities), float(total), float(count), float(beta), weights)
    return weights


def n_step_numpy(
    rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, gamma: float, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of steps (T,) in order: (returns, discounts, how many steps each spans; 0: what is needed has not come yet).

    A step whose episode goes on beyond the last of them has n steps, or not all of its rewards.
    """
    T = len(rewards)
    returns, discounts, spans = np.zeros(T), np.zeros(T), np.zeros(T, np.int64)
    ends = terminated | truncated
    for t in range(T):
        stop = t + 1 + np.flatnonzero(ends[t : t + n])[0] if ends[t : t + n].any() else t + n
        if stop <= T:
            spans[t] = stop - t
            returns[t] = (gamma ** np.arange(spans[t]) * rewards[t:stop]).sum()
            discounts[t] = 0 if terminated[stop - 1] else gamma ** spans[t]
    return returns, discounts, spans


def targets_numpy(valued: np.ndarray, chosen: np.ndarray, returns: np.ndarray, discounts: np.ndarray) -> np.ndarray:
    """As `targets`."""
    return returns + discounts * valued[np.arange(len(valued)), chosen.argmax(axis=1)]


def errors_numpy(
    q: np.ndarray, actions: np.ndarray, y: np.ndarray, weights: np.ndarray, delta: float, slopes: np.ndarray
) -> tuple[float, np.ndarray]:
    """As `errors`."""
    rows = np.arange(len(q))
    e = q[rows, actions] - y
    near = np.clip(e, -delta, delta)
    slopes[:] = 0
    slopes[rows, actions] = weights * near
    return float((weights * near * (e - near / 2)).sum(dtype=np.float64)), np.abs(e)


def importance_weights_numpy(priorities: np.ndarray, total: float, count: int, beta: float) -> np.ndarray:
    """As `importance_weights`."""
    return (count * (priorities / total)) ** -beta
