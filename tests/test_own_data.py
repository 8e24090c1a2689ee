"""docs/own_data.md as printed, from a table to predictions, a killed run on the way; the rest: test_own_values.py."""

import json
from pathlib import Path

import numpy as np
import pytest
from printed import assert_said, commands, shell, write_shown

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own_data.md").read_text()


@pytest.mark.long
def test_the_whole_way_as_printed(environment, tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    shown = commands(PAGE[: PAGE.index("## A value")])
    assert len(shown) == 11
    write_shown(shown, tmp_path)
    for command, printed in shown:
        done = shell(command, tmp_path, environment)
        killed = command.startswith("timeout")
        assert done.returncode == (124 if killed else 0), f"{command}\n{done.stdout}{done.stderr}"
        assert_said(done, printed)
    summary = json.loads((tmp_path / "runs/killed/summary.json").read_text())
    assert [leg["ranks"] for leg in summary["legs"]] == [2, 3] and summary["steps"] == 360
    assert sum(leg["steps"] for leg in summary["legs"]) == 360 and summary["options"]["model"] == "mlp:32"
    whole = json.loads((tmp_path / "runs/penguins/summary.json").read_text())
    assert abs(whole["test_loss"] - summary["test_loss"]) < 1e-3  # whichever way it was gone
    assert json.loads((tmp_path / "scores.json").read_text())["classes"][0]["name"] == "Adelie"
    assert np.load(tmp_path / "weights.npz")["dense1.weight"].shape == (10, 32)


def test_missing_values_are_refused_with_advice(environment, tmp_path):
    command = f"hpcdl prepare-data csv {ROOT / 'docs/penguins.csv'} a.h5 --label species --missing refuse"
    done = shell(command, tmp_path, environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    assert "11 in column 'sex' (the first in line 5); --missing mean or median fills them in" in done.stderr
