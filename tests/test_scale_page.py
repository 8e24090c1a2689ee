"""docs/scale.md as printed: its first command, which takes a second."""

from pathlib import Path

from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs/scale.md").read_text()


def test_as_printed(environment, tmp_path, alone):
    shown = commands(PAGE)
    assert len(shown) == 1
    as_printed(shown, tmp_path, environment)
