"""docs/report.md as printed: the runs, their pages and pictures."""

from pathlib import Path

import pytest
from printed import as_printed, commands

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "report.md").read_text()


def run_as_printed(chosen, folder, environment):
    as_printed(chosen, folder, environment)
    return {path.name for path in (folder / "pictures").iterdir()}


@pytest.mark.long
def test_a_run_and_its_page_as_printed(environment, tmp_path):
    chosen = [each for each in commands(PAGE) if "allreduce" in each[0] or "report runs" in each[0]]
    assert len(chosen) == 2
    pictures = run_as_printed(chosen, tmp_path, environment)
    assert "run-1-allreduce-loss-steps.png" in pictures
    assert (tmp_path / "runs.html").read_text().count("<figure>") == len(pictures)


@pytest.mark.exhaustive
def test_all_as_printed(environment, tmp_path):
    chosen = commands(PAGE)
    assert len(chosen) == 6
    pictures = run_as_printed(chosen, tmp_path, environment)
    assert {"overview-accuracy-bytes-sent.png", "run-2-gossip-consensus.png"} <= pictures
    assert {"run-1-pipeline-pipeline.png", "run-1-pipeline-time-of-ranks.png"} <= pictures
    assert "Micro-batches in the pipeline" in (tmp_path / "pipeline" / "report.html").read_text()
