"""docs/watching.md as printed: a run is watched, exported, and loaded."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from events import scalars
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "watching.md").read_text()


@pytest.mark.long
def test_the_page_as_printed(environment, tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    shown = commands(PAGE)
    assert len(shown) == 7
    as_printed(shown, tmp_path, environment)
    assert scalars(tmp_path / "events/a").keys() == scalars(tmp_path / "runs/a/tensorboard").keys()
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "runs/a/metrics.csv").read_bytes()

    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    head, _, *rows = said.getvalue().splitlines()
    assert head.split() == ["run", "a", "b"] and [row.split()[0] for row in rows] == ["45", "90", "135", "180"]
