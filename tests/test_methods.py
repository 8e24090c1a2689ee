"""The commands of docs/svrg.md, docs/sgld.md and docs/gpt.md, as printed."""

from pathlib import Path

import pytest
from printed import as_printed, commands

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.long
@pytest.mark.parametrize("page, count", [("svrg", 6), ("sgld", 4), ("gpt", 8)])
def test_as_printed(page, count, environment, tmp_path):
    shown = commands((DOCS / f"{page}.md").read_text())
    assert len(shown) == count
    as_printed(shown, tmp_path, environment)
