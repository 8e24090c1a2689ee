"""hpcdl/reports/statistics.py: means, deviations, paired t tests with Holm's correction, and runs that are censored."""

import numpy as np
import pytest

from hpcdl.reports.statistics import holm, incomplete_beta, interval, of_lines, paired_t, sign_test, t_quantile, t_tails


def second(values, first, bounds=None, first_bounds=None):
    """The statistics of a second line."""
    none = [None] * len(values)
    return of_lines([first, values], [first_bounds or none, bounds or none])[1]


def test_means_and_deviations_are_numpys():
    values = [0.3, 0.1, 0.45, 0.2]
    (found,) = of_lines([values])
    assert (found.runs, found.mean) == (4, pytest.approx(np.mean(values)))
    assert found.deviation == pytest.approx(np.std(values, ddof=1))
    assert (found.difference, found.interval, found.within_noise, found.p) == (None, None, None, None)


def test_differences_are_paired_by_seed():
    found = second([1.5, 5.5, 9.5, 2.5], [1.0, 5.0, 9.0, 2.0])  # far less than the deviation of either
    assert found.difference == 0.5 and found.interval == (0.5, 0.5) and found.within_noise is False
    found = second([2.0, 5.0, 9.0], [1.0, 5.0, 10.0])
    assert found.difference == 0 and found.p == 1 and found.within_noise is True


def test_runs_that_failed_are_left_out_of_the_pairs():
    found = second([None, 2.0, 3.0, None], [1.0, None, 1.0, None])
    assert (found.runs, found.mean, found.difference) == (2, 2.5, 2.0)
    assert found.interval is None and found.within_noise is None  # one pair tells nothing of noise
    assert second([None, None], [1.0, 2.0]) == (0, None, None, None, None, None, None, 0)


def test_two_seeds_bring_no_sign():
    found = second([3.0, 3.1], [1.0, 1.0])
    assert found.within_noise is None and found.p is None
    assert found.interval == pytest.approx((2.05 - 12.7062 * 0.05, 2.05 + 12.7062 * 0.05), rel=1e-5)


@pytest.mark.parametrize("degrees, quantile", [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (29, 2.04523)])
def test_students_distribution_by_its_tables(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-5)
    assert t_tails(quantile, degrees) == pytest.approx(0.05, abs=1e-5)


def test_students_distribution_and_the_incomplete_beta_function_as_scipy_has_them():
    special = pytest.importorskip("scipy.special")
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    for a, b, x in random.random((500, 3)) * [60, 5, 1] + [0.5, 0.5, 0]:
        assert incomplete_beta(a, b, x) == pytest.approx(special.betainc(a, b, x), rel=1e-9, abs=1e-13)
    differences = random.standard_normal(7) + 0.5
    wanted = stats.ttest_1samp(differences, 0)
    assert paired_t(differences) == pytest.approx(wanted.pvalue, rel=1e-10)
    assert interval(differences) == pytest.approx(tuple(wanted.confidence_interval()), rel=1e-10)


def test_holm_by_hand():
    assert holm([None, 0.01, 0.04, 0.03, None]) == pytest.approx([None, 0.03, 0.06, 0.06, None])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([None]) == [None]


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_equal_lines_bring_a_sign_in_5_of_100_comparisons_at_most(seeds):
    """4 lines beside the first, which all are equal to it; 4 deviations of the share for chance."""
    random, times = np.random.default_rng(seeds), 1000
    false = 0
    for lines in random.standard_normal((times, 5, seeds)):
        false += any(found.within_noise is False for found in of_lines(lines.tolist())[1:])
    assert 0.01 < false / times < 0.05 + 4 * (0.05 * 0.95 / times) ** 0.5


def test_a_run_that_missed_the_target_does_not_make_its_line_faster():
    """Seconds to a target: a line that gets there in its luckiest runs alone is not the faster one."""
    first = [4.0, 5.0, 4.5, 5.5, 4.0, 5.0, 4.4]
    lucky, missed = [3.0, None, None, None, None, None, None], [None, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    found = second(lucky, first, missed)
    assert (found.runs, found.censored, found.mean) == (7, 6, pytest.approx(57 / 7))
    assert found.deviation is None and found.interval is None and found.difference > 0
    assert found.p == pytest.approx(2 * (1 + 7) / 2**7)  # 6 of 7 known to be slower
    never = second([None] * 7, first, [9.0] * 7)
    assert never.p == pytest.approx(2 / 2**7) and never.within_noise is False
    # A run that ended before the first line reached the target tells nothing.
    assert second([None] * 7, first, [3.0] * 7).p == 1
    assert second(first, [None] * 7, None, [9.0] * 7).within_noise is False
    assert second([None] * 7, [None] * 7, [9.0] * 7, [9.0] * 7).p == 1


def test_the_sign_test_by_hand():
    assert sign_test([1] * 5) == 2 / 32 and sign_test([1, -1, 0]) == 1 and sign_test([]) == 1
    assert sign_test([-1] * 6 + [0]) == 2 / 64
