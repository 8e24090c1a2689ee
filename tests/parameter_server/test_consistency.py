"""A consistency whose name nobody knows; bounds and rounds are those of test_clocks.py."""

import pytest

from hpcdl.errors import UsageError
from hpcdl.parameter_server.consistency import Consistency


def test_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match=r"unknown consistency 'asink' \(did you mean 'async'\?\)"):
        Consistency("asink").checked()
