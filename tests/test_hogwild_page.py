"""docs/hogwild.md as printed: one thread and its run, scored again; ranks on one vector, and on servers."""

import json
from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "hogwild.md").read_text()


@pytest.mark.long
def test_as_printed(environment, tmp_path):
    shown = commands(PAGE)
    assert len(shown) == 5
    as_printed(shown, tmp_path, environment)
    found = [json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("one", "node", "servers")]
    assert [run["updates"] for run in found] == [5 * 1438] * 3 and [run["vectors"] for run in found] == [1, 1, 2]
    assert found[0]["repeatable"] and sum(found[1]["bytes_sent_per_rank"]) == 0 < sum(found[2]["bytes_sent_per_rank"])
