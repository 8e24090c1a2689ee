"""docs/sgd.md as printed: a run whose model is the mean of its iterates, and its scores."""

import json
from pathlib import Path

from printed import as_printed, commands

from hpcdl.checkpoint.checkpoint_file import Checkpoint

PAGE = (Path(__file__).parents[1] / "docs" / "sgd.md").read_text()


def test_averaging_as_printed(environment, tmp_path):
    shown = commands(PAGE)
    assert len(shown) == 2
    as_printed(shown, tmp_path, environment)
    run = tmp_path / "runs/mean"
    vectors = Checkpoint.read(run).vectors
    apart = abs(vectors["parameters"] - vectors["optimizer/average"]).max()
    assert 1e-3 < apart < 1
    assert json.loads((run / "summary.json").read_text())["options"]["average"] == "from=5"
