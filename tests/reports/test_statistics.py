"""hpcdl/reports/statistics.py: means, deviations and paired differences with their intervals."""

import numpy as np
import pytest

from hpcdl.reports.statistics import bootstrap, statistics


def test_means_and_deviations_are_numpys():
    values = [0.3, 0.1, 0.45, 0.2]
    found = statistics(values, None)
    assert (found.runs, found.mean) == (4, pytest.approx(np.mean(values)))
    assert found.deviation == pytest.approx(np.std(values, ddof=1))
    assert (found.difference, found.interval, found.within_noise) == (None, None, None)


def test_differences_are_paired_by_seed():
    first, second = [1.0, 5.0, 9.0, 2.0], [1.5, 5.5, 9.5, 2.5]
    found = statistics(second, first)  # far less than the deviation of either
    assert found.difference == 0.5 and found.interval == (0.5, 0.5) and found.within_noise is False


def test_runs_that_failed_are_left_out_of_the_pairs():
    found = statistics([None, 2.0, 3.0, None], [1.0, None, 1.0, None])
    assert (found.runs, found.mean, found.difference) == (2, 2.5, 2.0)
    assert found.interval is None and found.within_noise is None  # one pair tells nothing of noise
    assert statistics([None, None], [1.0, 2.0]) == (0, None, None, None, None, None)


def test_the_interval_is_of_the_mean_and_the_same_in_each_call():
    differences = np.random.default_rng(0).normal(1.0, 2.0, 200)
    low, high = bootstrap(differences)
    half = 1.96 * differences.std() / 200**0.5  # of the normal approximation
    assert low == pytest.approx(differences.mean() - half, abs=0.06)
    assert high == pytest.approx(differences.mean() + half, abs=0.06)
    assert (low, high) == bootstrap(differences)


@pytest.mark.parametrize("shift, noise", [(0.0, True), (10.0, False)])
def test_within_noise_is_said_of_intervals_that_hold_zero(shift, noise):
    random = np.random.default_rng(1)
    first = random.normal(size=20)
    found = statistics(list(first + shift + random.normal(size=20)), list(first))
    assert found.within_noise is noise
