"""docs/zero_bubble.md as printed: every command runs, and the schedules are drawn as on the page."""

from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "zero_bubble.md").read_text()


@pytest.mark.long
def test_as_printed(environment, tmp_path):
    shown = commands(PAGE)
    assert len(shown) == 3 and all(printed for _, printed in shown)
    as_printed(shown, tmp_path, environment)
