"""A bar where a terminal looks on, lines elsewhere, nothing from other ranks."""

import io

from rich.console import Console

from hpcdl.runs import progress
from hpcdl.runs.progress import Display


def shown(monkeypatch, terminal, mode="auto", rank=0):
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda: Console(file=out, width=100, force_terminal=terminal))
    display = Display(mode, rank)
    display.start(0, 10)
    display.update(5, 10, 0.5, 1.25, "test accuracy 50.00%", 1234.0)
    if display.mode == "lines":
        display.line("epoch 1")
    display.stop()
    return out.getvalue(), display.mode


def test_a_bar_on_a_terminal(monkeypatch):
    text, mode = shown(monkeypatch, True)
    assert mode == "bar" and "loss 1.2500" in text and "1,234 ex/s" in text


def test_plain_lines_without_one(monkeypatch):
    text, mode = shown(monkeypatch, False)
    assert mode == "lines" and text == "epoch 1\n"


def test_other_ranks_and_none_are_silent(monkeypatch):
    assert shown(monkeypatch, True, rank=1) == ("", "none")
    assert shown(monkeypatch, True, mode="none") == ("", "none")


def test_the_launchers_output_decides(launch, tmp_path):
    program = tmp_path / "p.py"
    program.write_text("from hpcdl.runs.progress import terminal\nprint(terminal())\n")
    assert launch(1, program, check=0).stdout.split() == ["None"]  # its output is a pipe
