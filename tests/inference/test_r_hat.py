"""Rank-normalized split R-hat, against ArviZ's numbers and against ranks that are counted one by one."""

from statistics import NormalDist

import numpy as np
import pytest

from hpcdl.inference.r_hat import rank_normalized, rank_normalized_r_hat, split_r_hat


@pytest.fixture
def chains():
    """3 chains of 40 samples: of one distribution; a shifted chain; a wider one; values that are often equal."""
    found = np.random.default_rng(7).standard_normal((3, 40, 4))
    found[1, :, 1] += 1
    found[2, :, 2] *= 3
    found[:, :, 3] = np.round(found[:, :, 3] * 2) / 2
    return found


def test_as_arviz_has_it(chains):
    """arviz-stats 0.8.0, rhat by the methods "rank" and "split"."""
    wanted = [1.0044536457716762, 1.1999531340567455, 1.152425564517734, 0.9923056887883189]
    assert rank_normalized_r_hat(chains) == pytest.approx(wanted, rel=1e-12)
    odd = np.insert(chains, 20, 7.0, axis=1)  # the sample in the middle is in neither half
    assert rank_normalized_r_hat(odd) == pytest.approx(wanted, rel=1e-12)
    halves = np.concatenate([chains[:, :20], chains[:, 20:]])
    wanted = [1.0033467709825126, 1.2154722680202799, 0.978416731730532, 0.9810724875392499]
    assert split_r_hat(halves) == pytest.approx(wanted, rel=1e-12)


def test_ranks_of_equal_values_are_their_mean(chains):
    values = chains.reshape(-1, 4)
    ranks = [[(values[:, j] < v).sum() + ((values[:, j] == v).sum() + 1) / 2 for j, v in enumerate(x)] for x in values]
    wanted = [[NormalDist().inv_cdf((rank - 3 / 8) / (120 + 1 / 4)) for rank in row] for row in ranks]
    assert rank_normalized(values) == pytest.approx(np.array(wanted), rel=1e-12)


def test_a_parameter_that_never_moves_has_met_and_heavy_tails_do_not_hide_a_shift():
    assert rank_normalized_r_hat(np.ones((2, 9, 1))) == 1
    cauchy = np.random.default_rng(1).standard_cauchy((2, 500, 1))
    cauchy[1] += 3
    halves = np.concatenate([cauchy[:, :250], cauchy[:, 250:]])
    assert split_r_hat(halves) < 1.01 < 1.1 < rank_normalized_r_hat(cauchy)
