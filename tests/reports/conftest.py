"""Folders of runs for the tests of this room: written by hand, for what a run leaves is text."""

import json

import pytest
from written_runs import lines_of


@pytest.fixture
def write_run(tmp_path):
    """A function: write the folder of a run with these lines (default: 8 steps'), and return it."""

    def write(name, lines=None, end="", **files):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("# launch: 2 ranks: python\ndata: digits\nmodel: mlp\nbatch_size: 32\n")
        text = "".join(json.dumps(line) + "\n" for line in (lines_of(8) if lines is None else lines))
        (folder / "metrics.jsonl").write_text(text + end)
        for file, value in files.items():
            (folder / f"{file}.json").write_text(json.dumps(value))
        return folder

    return write
