"""One rank, two ranks."""

import numpy as np
import pytest
from in_process import ends

from hpcdl.runs.folder import launch_line
from hpcdl.runs.summary import as_table
from hpcdl.scripts import prepare_data
from hpcdl.words import counted


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
    ],
)
def test_the_noun_agrees_with_the_number_as_it_is_shown(number, noun, form, text):
    assert counted(number, noun, form) == text


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
