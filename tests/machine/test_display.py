"""A bar where a terminal looks on, lines elsewhere, nothing from other ranks."""

import io

import pytest
from rich.console import Console

from hpcdl.machine import display as display_module
from hpcdl.machine.display import Display
from hpcdl.runs.agreement import Step
from hpcdl.runs.folder import Folder
from hpcdl.runs.metrics import Metrics
from hpcdl.runs.progress import Progress


def shown(monkeypatch, terminal, mode="auto", rank=0):
    out = io.StringIO()
    monkeypatch.setattr(display_module, "console", lambda: Console(file=out, width=100, force_terminal=terminal))
    display = Display(mode, rank)
    display.start(0, 10)
    display.update(5, 10, 0.5, 1.25, "test accuracy 50.00%", 1234.0)
    if display.mode == "lines":
        display.line("epoch 1")
    display.stop()
    return out.getvalue(), display.mode


def test_a_bar_on_a_terminal_lines_elsewhere_and_others_are_silent(monkeypatch):
    text, mode = shown(monkeypatch, True)
    assert mode == "bar" and "loss 1.2500" in text and "1,234 ex/s" in text
    assert shown(monkeypatch, False) == ("epoch 1\n", "lines")
    assert shown(monkeypatch, True, rank=1) == shown(monkeypatch, True, mode="none") == ("", "none")


def test_the_launchers_output_decides(launch):
    program = "from hpcdl.machine.display import terminal; print(terminal())"
    assert launch(1, "-c", program, check=0).stdout.split() == ["None"]  # its output is a pipe


@pytest.mark.parametrize("terminal", [True, False])
def test_each_evaluation_leaves_a_line_and_the_bar_ends_with_the_last_one(monkeypatch, terminal):
    out = io.StringIO()
    monkeypatch.setattr(display_module, "console", lambda: Console(file=out, width=100, force_terminal=terminal))
    metrics = Metrics(Display("auto", 0))
    metrics.open(Folder(None, 0), 2, lambda step: 0.1)
    metrics.display.start(0, 4)
    for step, accuracy in ((2, 0.5), (4, 0.75)):
        progress = Progress(step, scores={"test_accuracy": accuracy}, train_loss=0.25, seconds=0.1)
        metrics.record(step - 1, [Step(4.0, 8.0, 0.1), Step(2.0, 8.0, 0.1)], progress, 4, 1234.0)
        metrics.evaluated(progress.scores, progress, 4, 1234.0, {})
    metrics.display.stop()
    lines = out.getvalue().splitlines()
    for text in ("epoch 1  step 2/4  loss 0.2500  test accuracy 50.00%", "step 4/4  loss 0.2500  test accuracy 75.00%"):
        assert sum(text in line for line in lines) == 1
    bars = [line for line in lines if "ex/s" in line]
    assert bool(bars) == terminal
    assert not terminal or ("epoch 2.0" in bars[-1] and "test accuracy 75.00%" in bars[-1])
