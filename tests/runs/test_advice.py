"""A run whose features no rate fits says so before it begins, and again where its loss is no number any more."""

import re

import h5py
import numpy as np
import pytest
from in_process import ends


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A data file with features from 1e-2 to 1e3."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    with h5py.File("a.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/x"] = random.standard_normal((200, 4)) * [0.01, 1, 30, 1000]
            file[f"{part}/y"] = random.standard_normal(200)
    return ["--data", "a.h5", "--model", "linear", "--progress", "none", "--out", "a"]


SAID = r"the features have scales from 0\.00\d+ to [\d.]+e\+0[23]: add --standardize"


def test_at_the_start_and_at_the_end(table, caplog):
    status, said = ends("train_allreduce", table)
    assert re.search(SAID, caplog.text) and status == 1
    assert re.search(rf"loss of step \d+ is not finite.*; {SAID}; a smaller --lr", said)
    caplog.clear()
    assert ends("train_allreduce", [*table, "--force", "--standardize"]) == (0, "")
    assert "scales" not in caplog.text
