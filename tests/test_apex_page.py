"""docs/rl.md: Ape-X's command as printed, and the bytes that its table says."""

import json
from pathlib import Path

import pytest
from printed import as_printed, commands

PAGE = (Path(__file__).parents[1] / "docs" / "rl.md").read_text()


@pytest.mark.long
def test_as_printed(environment, tmp_path):
    pytest.importorskip("gymnasium")
    (shown,) = [each for each in commands(PAGE) if "train-apex" in each[0]]
    as_printed([shown], tmp_path, environment)
    found = json.loads((tmp_path / "runs/apex/summary.json").read_text())
    assert found["actors"] == 3 and found["environment_steps"] >= 3000
    parameters, updates, width = found["parameters"], found["updates"], 4 * 4  # bytes of an observation
    sent = {
        kind: sum(each[kind] for each in found["bytes_by_kind_per_rank"]) for kind in found["bytes_by_kind_per_rank"][0]
    }
    batch, every = found["batch_size"], found["options"]["broadcast_every"]
    assert sent["priorities"] == 12 * batch * updates and sent["gradients"] == 0
    assert sent["parameters"] % (4 * parameters) == 0 and 0 < sent["parameters"] <= 4 * parameters * 3 * (
        updates // every + 1
    )
    # Two more samples are asked for, which nobody takes.
    assert sent["samples"] == (updates + 2) * (batch * (2 * width + 36) + 160)
    per_step = width + 13 + 210 / found["options"]["chunk"]
    assert 0.93 < sent["transitions"] / found["environment_steps"] / per_step < 1.05
