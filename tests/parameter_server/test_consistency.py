"""The three consistencies: bounds, and what makes no sense."""

import math

import pytest

from hpcdl.errors import UsageError
from hpcdl.parameter_server.consistency import BSP, Consistency


def test_bounds():
    """clocked, bound and in_rounds of each consistency; ssp with a staleness of 0 is bsp."""
    named = {name: (c.clocked, c.bound, c.in_rounds) for name, c in CASES.items()}
    assert named == {
        "bsp": (True, 0, True),
        "ssp 0": (True, 0, True),
        "ssp 3": (True, 3, False),
        "async": (False, math.inf, False),
    }
    assert BSP == CASES["bsp"] == Consistency()
    assert all(case.checked() is case for case in CASES.values())


CASES = {
    "bsp": Consistency("bsp"),
    "ssp 0": Consistency("ssp", 0),
    "ssp 3": Consistency("ssp", 3),
    "async": Consistency("async"),
}


@pytest.mark.parametrize(
    "name, staleness, words",
    [
        ("asink", 0, r"unknown consistency 'asink' \(did you mean 'async'\?\)"),
        ("ssp", -1, "at least 0, not -1"),
        ("bsp", 1, "a staleness of 1 is for ssp; bsp has no bound"),
        ("async", 2, "a staleness of 2 is for ssp; async has no bound"),
    ],
)
def test_refusals(name, staleness, words):
    with pytest.raises(UsageError, match=words):
        Consistency(name, staleness).checked()
