"""docs/ensembles.md: its commands as printed."""

import json
from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "ensembles.md").read_text()


@pytest.mark.long
def test_as_printed(environment, tmp_path):
    shown = commands(PAGE)
    assert len(shown) == 6
    as_printed(shown, tmp_path, environment)
    found = json.loads((tmp_path / "runs/e/summary.json").read_text())
    assert len(found["members"]) == 4 and found["out_of_bag"]["accuracy"] > 0.7
