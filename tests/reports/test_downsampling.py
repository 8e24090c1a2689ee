"""hpcdl/reports/downsampling.py: a long series as few bins, each with mean, lowest and highest, in bounded memory."""

import numpy as np
import pytest

from hpcdl.reports.downsampling import Thinned, numbers


def naive(rows, width):
    """Mean, lowest and highest of each bin, the plain way."""
    found = []
    for first in range(0, len(rows), width):
        values = [row for row in rows[first : first + width] if row is not None]
        found.append((np.mean(values), min(values), max(values)) if values else (np.nan,) * 3)
    return np.array(found)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 4999, 5000])
def test_bins_are_those_of_the_plain_way(count):
    values = [None if place % 11 == 3 else float((place * 37) % 101) for place in range(count)]
    thinned = Thinned(["step", "loss"], most=8)
    for step, value in enumerate(values):
        thinned.add({"step": step} if value is None else {"step": step, "loss": value, "other": 1})
    assert thinned.rows == 0 or len(thinned) <= 8
    if count:
        expected = naive(values, thinned.width if len(thinned) else 1)
        assert len(thinned) == len(expected) and (count < 8 or len(thinned) > 4)
        for place, each in enumerate((thinned.mean, thinned.low, thinned.high)):
            np.testing.assert_allclose(each["loss"], expected[:, place])
        assert thinned.mean["step"][0] == (thinned.width - 1) / 2 or count < thinned.width


def test_what_is_no_number_is_left_out():
    huge = 10**400
    found = numbers([(1, None), (2, "3"), (huge, 4.5), (True, float("inf"))])
    np.testing.assert_array_equal(found, [[1, np.nan], [2, np.nan], [np.nan, 4.5], [np.nan, np.nan]])
