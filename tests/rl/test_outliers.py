"""Outliers: what is far over the mean, once that is known; they count in the mean as any other."""

import math

import numpy as np

from hpcdl.rl.outliers import DECAY, FIRST, OutlierDetector


def test_what_is_far_beyond_the_others_is_found():
    random, outliers = np.random.default_rng(0), OutlierDetector(5.0)
    assert not any(outliers.is_outlier(float(loss)) for loss in random.uniform(0.9, 1.1, 300))
    assert outliers.is_outlier(2.0) and outliers.is_outlier(-3.0)
    assert not outliers.is_outlier(1.05) and not outliers.is_outlier(-1.05)
    assert not outliers.is_outlier(0.0), "what is small is none"


def test_the_first_are_none_for_the_mean_is_not_known():
    outliers = OutlierDetector(1.0)
    assert not any(outliers.is_outlier(loss) for loss in [1.0, 1e6] * (FIRST // 2))
    assert outliers.is_outlier(1e7)
    none_ever = OutlierDetector(0.0)
    assert not any(none_ever.is_outlier(loss) for loss in [1.0] * 200 + [1e9])


def test_mean_and_variance_are_those_of_the_formula():
    """Those of all losses so far, each with the same weight at first; then the weights of older ones fall by KEPT."""
    losses, outliers, weights = 5 + np.random.default_rng(1).exponential(1.0, 400), OutlierDetector(3.0), np.empty(0)
    for count, loss in enumerate(losses, 1):
        outliers.is_outlier(float(loss))
        kept = min(DECAY, 1 - 1 / count)
        weights = np.append(kept * weights, 1 - kept)
        mean = weights @ losses[:count]
        assert math.isclose(outliers.mean, mean)
        assert math.isclose(outliers.variance, weights @ (losses[:count] - mean) ** 2, abs_tol=1e-12)
    assert np.ptp(weights[:100]) < 1e-12 < np.ptp(weights)


def test_what_is_no_number_is_let_through_and_not_remembered():
    outliers = OutlierDetector(5.0)
    for loss in [1.0, 1.1] * 100:
        outliers.is_outlier(loss)
    mean = outliers.mean
    assert not outliers.is_outlier(math.nan) and not outliers.is_outlier(math.inf)
    assert outliers.mean == mean
