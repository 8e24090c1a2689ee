"""docs/planning.md and docs/scale.md as printed."""

from pathlib import Path

import pytest
from printed import as_printed, commands

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.long
@pytest.mark.parametrize(("page", "count"), [("planning", 7), ("scale", 3)])
def test_as_printed(page, count, environment, tmp_path, alone):
    shown = commands((DOCS / f"{page}.md").read_text())
    assert len(shown) == count
    as_printed(shown, tmp_path, environment)
