"""Scales that no rate fits are seen, and nothing is said of those that do no harm."""

import numpy as np
import pytest

from hpcdl.data import from_arrays, open_data
from hpcdl.data.scale_warning import feature_scales, scale_warning


def data(*columns, **how):
    random = np.random.default_rng(0)
    x = np.column_stack([mean + deviation * random.standard_normal(500) for mean, deviation in columns])
    return from_arrays(x, np.arange(500) % 2, **how)


def test_what_is_measured():
    low, high, _ = feature_scales(data((0, 0.01), (3, 4), (7, 0)))
    assert low == pytest.approx(0.01, rel=0.1) and high == pytest.approx(7, rel=0.01)  # a constant has a size, too


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ([(0, 0.01), (0, 1000)], r"the features have scales from 0\.0.* to [\d.e+]+: add --standardize"),
        ([(0, 1), (500, 3)], "scales from"),
        ([(0, 1), (0, 2)], None),
        ([(0, 0.001), (0.5, 0.2)], None),  # pixels that hardly ever change
        ([(0, 20), (0, 30)], None),
    ],
)
def test_what_is_said(columns, said):
    found = scale_warning(data(*columns).scales)
    assert found is None if said is None else __import__("re").search(said, found)


def test_values_that_are_too_large():
    x = np.random.default_rng(0).standard_normal((50, 2))
    data = from_arrays(x, 4200 + 800 * x[:, 0])
    assert scale_warning(data.scales) == "the values to predict are of the size 4.3e+03: add --standardize"
    assert scale_warning(from_arrays(x, 3 * x[:, 0]).scales) is None


def test_of_what_nothing_is_said():
    assert scale_warning(data((0, 0.01), (0, 1000), standardize=True).scales) is None
    assert open_data("digits").scales is None and open_data("text").scales is None and scale_warning(None) is None
