"""The rest of docs/own_data.md as printed: values to predict, a rare class, and a model and data of one's own."""

import json
import re
from pathlib import Path

import pytest
from printed import as_printed, commands, write_shown

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own_data.md").read_text()


@pytest.mark.long
def test_as_printed(environment, tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "shapes.py").write_text(program)
    shown = commands(PAGE[PAGE.index("## A value") :])
    assert len(shown) == 14
    write_shown(shown, tmp_path)
    as_printed(shown, tmp_path, environment)
    curve = json.loads((tmp_path / "runs/curve/summary.json").read_text())
    assert curve["model"] == "shapes:Polynomial,width=3" and curve["test_loss"] < 0.01
