"""docs/search.md as printed: the first commands."""

import json
from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "search.md").read_text()


@pytest.mark.long
def test_a_job_for_each_trial_as_printed(environment, tmp_path):
    shown = [each for each in commands(PAGE) if "runs/a" in each[0]]
    assert len(shown) == 3
    as_printed(shown, tmp_path, environment)
    assert len((tmp_path / "runs/a/trials.csv").read_text().splitlines()) == 4


@pytest.mark.long
def test_the_way_as_printed(environment, tmp_path):
    shown = [each for each in commands(PAGE) if each[0].startswith(("mpiexec -n 2 hpcdl search", "hpcdl "))][:3]
    assert len(shown) == 3
    as_printed(shown, tmp_path, environment)
    lines = [json.loads(line) for line in (tmp_path / "runs/s/journal.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "end" for line in lines) == 6
    summary = json.loads((tmp_path / "runs/s-best/summary.json").read_text())
    assert summary["epochs"] == 6 and summary["validation_accuracy"] > 0.9
