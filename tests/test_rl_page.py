"""docs/rl.md: its commands as printed."""

import json
from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "rl.md").read_text()


def test_as_printed(environment, tmp_path):
    for name in ("gymnasium", "imageio", "pygame"):
        pytest.importorskip(name)
    shown = [each for each in commands(PAGE) if "train-apex" not in each[0]]  # test_apex_page.py
    assert len(shown) == 6
    as_printed(shown, tmp_path, environment | {"SDL_VIDEODRIVER": "dummy"})
    summary = json.loads((tmp_path / "runs/pole/summary.json").read_text())
    assert summary["environment_steps"] == 4000 and len(summary["legs"]) == 2
    assert len(json.loads((tmp_path / "pole.json").read_text())["returns"]) == 10
    assert (tmp_path / "pole.gif").stat().st_size > 1000
    for name, steps in (("gorila", 3000), ("apart", 2000)):
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        assert summary["environment_steps"] == steps and summary["updates"] > 0
