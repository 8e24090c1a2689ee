"""docs/comparing.md as printed: the first commands, and the file of a comparison."""

import json
import re
from pathlib import Path

import pytest
import yaml
from printed import as_printed, commands, shell

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "comparing.md").read_text()


@pytest.mark.long
def test_the_way_as_printed(environment, tmp_path):
    shown = commands(PAGE)
    assert len(shown) == 3
    as_printed(shown, tmp_path, environment)
    found = json.loads((tmp_path / "runs/first/results.json").read_text())
    assert [len(line["runs"]) for line in found["lines"]] == [3] * 3 and found["target"] == {"accuracy": 0.9}
    assert "<svg" in (tmp_path / "first.html").read_text()


@pytest.mark.long
def test_the_file_of_a_comparison(environment, tmp_path):
    text = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
    assert len(yaml.safe_load(text)["lines"]) == 2
    (tmp_path / "c.yaml").write_text(text)
    done = shell("mpiexec -n 2 hpcdl compare --config c.yaml --seeds 1 --out c", tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2/2] seed 0  train-gossip --topology ring: " in done.stdout
