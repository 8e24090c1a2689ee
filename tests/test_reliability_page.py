"""The page on what happens when something dies: its commands do what it says."""

from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


@pytest.mark.long
def test_the_commands_of_the_page(environment, tmp_path):
    shown = commands(PAGE.read_text())
    assert len(shown) == 4
    as_printed(shown, tmp_path, environment)
