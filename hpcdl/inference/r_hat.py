"""R-hat: the convergence of several Markov chains, from the samples of one parameter in all of them.

Split R-hat, of the M = 2C halves of C chains, each of n samples, with means m_i and variances s_i^2:

    W = mean of s_i^2      B/n = variance of m_i       R-hat = sqrt(((n - 1)/n W + B/n) / W)

Rank-normalized: each of the S = M n values is first replaced by z = Phi^-1((r - 3/8) / (S + 1/4)) (Blom, 1958), r its
rank (equal values: their mean rank), which makes R-hat robust to heavy tails. Folded: the same of |value - median|,
which finds chains that differ in spread. A parameter has the larger R-hat of both kinds; up to 1.01 the chains have
converged. (Gelman and Rubin, "Inference from iterative simulation using multiple sequences", 1992; Vehtari, Gelman,
Simpson, Carpenter and Buerkner, "Rank-normalization, folding, and localization", 2021, sections 4.1 to 4.3)"""

from statistics import NormalDist

import numpy as np


def split_r_hat(halves: np.ndarray) -> np.ndarray:
    """Return split R-hat (parameters,) of sequences (M, n, parameters), n >= 2; 1 if each sequence is constant."""
    n = halves.shape[1]
    within = halves.var(axis=1, ddof=1).mean(axis=0)
    between = halves.mean(axis=1).var(axis=0, ddof=1)
    whole = (n - 1) / n * within + between
    return np.sqrt(np.divide(whole, within, out=np.ones(within.size), where=within > 0))


def rank_normalized(values: np.ndarray) -> np.ndarray:
    """Return the z of each value, by its rank among the values of its parameter. values: (S, parameters)."""
    count = len(values)
    order = values.argsort(axis=0)
    rising = np.take_along_axis(values, order, axis=0)
    place = np.arange(count)[:, None]
    begins = np.ones(values.shape, bool)
    begins[1:] = rising[1:] != rising[:-1]
    first = np.maximum.accumulate(np.where(begins, place, 0))  # of the values that are equal
    ends = np.ones(values.shape, bool)
    ends[:-1] = begins[1:]
    last = np.minimum.accumulate(np.where(ends, place, count)[::-1])[::-1]
    normal = NormalDist()
    # By the sum of two ranks, from 1 on, as equal values may share half a rank.
    quantiles = np.array([normal.inv_cdf((twice / 2 - 3 / 8) / (count + 1 / 4)) for twice in range(2, 2 * count + 1)])
    normalized = np.empty(values.shape)
    np.put_along_axis(normalized, order, quantiles[first + last], axis=0)
    return normalized


def rank_normalized_r_hat(chains: np.ndarray) -> np.ndarray:
    """Return the R-hat (parameters,) of the head of this file. chains: (C, samples, parameters), 4 samples or more."""
    n = chains.shape[1] // 2
    values = np.concatenate([chains[:, :n], chains[:, -n:]]).astype(np.float64)
    shape, flat = values.shape, values.reshape(len(values) * n, chains.shape[2])
    folded = np.abs(flat - np.median(flat, axis=0))
    return np.maximum(*(split_r_hat(rank_normalized(each).reshape(shape)) for each in (flat, folded)))
