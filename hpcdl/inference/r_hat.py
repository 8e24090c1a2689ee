"""R-hat: the convergence of several Markov chains, from the samples of one parameter in all of them.

Split R-hat, of the M = 2C halves of C chains, each of n samples, with means m_i and variances s_i^2:

    W = mean of s_i^2      B/n = variance of m_i       R-hat = sqrt(((n - 1)/n W + B/n) / W)

Rank-normalized: the S = M n values are first replaced by z = Phi^-1((r - 3/8) / (S + 1/4)), r their rank among all,
equal values by the mean of their ranks, which makes it robust to heavy tails. Folded: the same of |value - median|,
which finds chains that differ in spread. The R-hat of a parameter is the larger of both; chains have converged where it
is at most 1.01.

(Gelman and Rubin, "Inference from iterative simulation using multiple sequences", Statistical Science 1992; Vehtari,
Gelman, Simpson, Carpenter and Buerkner, "Rank-normalization, folding, and localization: an improved R-hat for assessing
convergence of MCMC", Bayesian Analysis 2021, sections 4.1 to 4.3; the fractions of ranks: Blom, 1958)
"""

from statistics import NormalDist

import numpy as np


def split_r_hat(halves: np.ndarray) -> np.ndarray:
    """Return split R-hat (parameters,) of sequences (M, n, parameters), n >= 2; 1 where all values are equal."""
    n = halves.shape[1]
    within = halves.var(axis=1, ddof=1).mean(axis=0)
    between = halves.mean(axis=1).var(axis=0, ddof=1)
    whole = (n - 1) / n * within + between
    return np.sqrt(np.divide(whole, within, out=np.ones(within.size), where=within > 0))


def rank_normalized(values: np.ndarray) -> np.ndarray:
    """Return z of each value among those of its parameter; values (S, parameters)."""
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
    """Return rank-normalized split R-hat (parameters,); chains (C, samples, parameters), at least 4 samples."""
    n = chains.shape[1] // 2
    values = np.concatenate([chains[:, :n], chains[:, -n:]]).astype(np.float64)
    shape, flat = values.shape, values.reshape(len(values) * n, chains.shape[2])
    folded = np.abs(flat - np.median(flat, axis=0))
    return np.maximum(*(split_r_hat(rank_normalized(each).reshape(shape)) for each in (flat, folded)))
