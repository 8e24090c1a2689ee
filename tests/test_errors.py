"""Errors are one line each, whatever is in them."""

import pytest

from hpcdl.errors import LONGEST_LINE, UsageError, blamed_on, line, parse_finite, parse_integer, parse_spec


def test_one_line_that_moves_no_terminal_and_shows_both_ends():
    assert line("a\nb\x1b[31m") == r"a\nb\x1b[31m"
    long = line("begin" + "x" * 5000 + "end")
    assert len(long) <= LONGEST_LINE + 5 and long.startswith("beginx") and long.endswith("xend") and "x ... x" in long


def test_numbers_of_64_bits_and_none_beyond():
    assert parse_integer(str(2**63 - 1)) == 2**63 - 1 and parse_integer("-3") == -3
    for text in (str(2**63), "1e3", "9" * 5000, ""):
        with pytest.raises(ValueError):
            parse_integer(text)
    for text in ("inf", "nan", "1e999"):
        with pytest.raises(ValueError):
            parse_finite(text)
    with pytest.raises(UsageError, match="n should be of type int, not '9"):
        parse_spec("thing", f"a:n={'9' * 30}", {"a": {"n": 1}})


def test_what_a_library_raises_is_blamed_and_ours_passes():
    with pytest.raises(UsageError, match=r"^the file cannot be read: 'key'$"), blamed_on("the file cannot be read"):
        raise KeyError("key")
    with pytest.raises(UsageError, match=r"^mine$"), blamed_on("the file cannot be read"):
        raise UsageError("mine")
