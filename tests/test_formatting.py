"""One rank, two ranks; 45 s, 12 min."""

import time

import numpy as np
import pytest
from in_process import ends

from hpcdl.formatting import clock, counted, duration, spent
from hpcdl.runs.folder import launch_line
from hpcdl.runs.summary import as_table
from hpcdl.scripts import prepare_data


@pytest.mark.parametrize(
    "number, noun, form, text",
    [
        (0, "step", "", "0 steps"),
        (1, "rank", "", "1 rank"),
        (2, "class", "", "2 classes"),
        (1.0, "epoch", "g", "1 epoch"),
        (0.5, "epoch", "g", "0.5 epochs"),
        (1438, "training row", ",", "1,438 training rows"),
        (3, "batch", "", "3 batches"),
        (2, "search", "", "2 searches"),
        (2, "epoch", "", "2 epochs"),
    ],
)
def test_the_noun_agrees_with_the_number_as_it_is_shown(number, noun, form, text):
    assert counted(number, noun, form) == text


def test_durations_and_times():
    said = [duration(seconds) for seconds in (-1, 0.4, 45, 99, 100, 3000, 7500, 48 * 3600 - 1, 76 * 3600)]
    assert said == ["0 s", "0 s", "45 s", "99 s", "2 min", "50 min", "2 h 05 min", "2 days 0 h", "3 days 4 h"]
    assert [spent(seconds) for seconds in (0.04, 9.94, 9.96, 100)] == ["0.0 s", "9.9 s", "10 s", "2 min"]
    noon = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
    assert clock(noon + 180, noon) == "12:03" and "23 Nov" in clock(noon + 86400, noon)


def test_what_programs_print_of_one(tmp_path, monkeypatch, capsys):
    np.savez(tmp_path / "a.npz", x=np.ones((5, 2)), y=[0, 1, 0, 1, 0], x_test=[[1, 2]], y_test=[1])
    prepare_data.main(["npz", str(tmp_path / "a.npz"), str(tmp_path / "a.h5")])
    assert " and 1 test row of 2 " in capsys.readouterr().out
    shown = []
    monkeypatch.setattr("hpcdl.runs.summary.as_table", lambda summary: shown.append(as_table(summary)))
    small = ["--data", str(tmp_path / "a.h5"), "--model", "softmax", "--batch-size", "1", "--epochs", "1"]
    assert ends("train_sequential", [*small, "--out", "none", "--progress", "lines"]) == (0, "")
    (table,) = shown
    assert table.title == "sequential on 1 rank"
    assert any(cell.endswith(" of 1 example, 1 epoch") for cell in table.columns[1]._cells)
    assert launch_line().startswith("1 rank: ")
