"""docs/checkpoints.md as printed."""

from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()


@pytest.mark.long
def test_as_printed(environment, tmp_path):
    shown = commands(PAGE)
    assert len(shown) == 4
    as_printed(shown, tmp_path, environment)
