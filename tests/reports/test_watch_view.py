"""hpcdl/reports/watch_view.py: the lines and curves of `hpcdl watch`, on wide and narrow terminals."""

import io
import os

import pytest
from made_search import write_journal
from rich.console import Console
from written_runs import lines_of

from hpcdl.reports import watch_view, watching
from hpcdl.reports.watch_view import curve, facts, news, view
from hpcdl.reports.watching import Watching

STARTED = {"program": "train-allreduce", "ranks": 2, "model": "mlp", "data": "digits", "batch_size": 32, "steps": 100}
STARTED |= {"first_step": 0, "steps_per_epoch": 2, "started": 1000.0, "time_limit": 0.0, "ends": None, "job": "77"}


@pytest.fixture
def watched(write_run, monkeypatch, tmp_path):
    """A function: write a run whose files are of second 2000, and look at it so many seconds later."""
    monkeypatch.setattr(watching, "is_held", lambda folder: True)

    def look(lines=None, later=0.0, name="a", end="", **files):
        folder = write_run(name, lines, end, **files)
        for path in folder.rglob("*"):
            os.utime(path, (2000.0, 2000.0))
        found = Watching([str(folder)], lambda: 2000.0 + later)
        found.look()
        return found, found.run

    return look


def test_all_that_is_known(watched):
    ends = {"ends": 2012.0, "time_limit": 1100.0}
    found = facts(*watched(lines_of(50), end='{"b\n', started=STARTED | ends))
    assert found[:4] == [
        "a: train-allreduce, mlp on digits, 2 ranks, job 77",
        "step 50 of 100 (50%), epoch 25.00 of 50",
        "loss 0.02  test loss 0.04167  test accuracy 97.92%",
        "128 examples/s lately, 128 in the mean",
    ]
    assert found[4].startswith("12 s left, until ")
    assert found[5] == "Slurm ends it in 12 s, at step 98 or so: too early"
    assert found[6] == "--time-limit ends it in 2 min, 88 s to spare"
    assert found[7].endswith("metrics.jsonl cannot be read") and found[7].startswith("1 line of ")


def test_of_a_search_how_far_it_is_and_its_best(write_run, tmp_path):
    folder = write_journal(tmp_path / "found", trials=9, failing=(2,))
    write_run("found/trials/0004/seed-0", lines_of(8), started=STARTED)
    watching = Watching([str(folder)])
    watching.look()
    said = facts(watching, watching.run)
    assert "seed-0: " in said[0]
    at = said.index("found: 8 of 9 trials ended, 1 failed")
    assert len(said[at + 1 :]) == 5 and all(line.startswith("  trial ") and "%, lr=" in line for line in said[at + 1 :])
    assert news(watching, watching.run).endswith("found: 8 of 9 trials ended, 1 failed")


def test_little_that_is_known(watched):
    found, run = watched([])
    (found.folders, run.options) = (["a"], {})
    assert facts(found, run) == ["a", "step 0", "goes on"]
    found = facts(*watched([{"step": 3, "round": 3, "train_loss": None, "seconds": 0.5}], started={}))
    assert found[1:4] == ["round 3", "6 rounds/s lately, 6 in the mean", "goes on"]


@pytest.mark.parametrize(
    "state, later, said",
    [
        (("going", ""), 200, "no news for 3 min"),
        (("going", ""), 5, "left, until"),
        (("dead", ""), 200, "seems dead: no process writes to it, and it has not ended; there is no checkpoint"),
        (("stopped", "signal"), 0, "stopped: signal; there is no checkpoint"),
        (("ended", "patience"), 900, "ended: patience"),
        (("gone", ""), 0, "the run's files are gone"),
    ],
)
def test_how_a_run_stands(watched, state, later, said, monkeypatch):
    found, run = watched(later=later, started=STARTED)
    monkeypatch.setattr(run, "state", lambda: state)
    assert any(said in line for line in facts(found, run)) and said in news(found, run)
    assert ("left" in news(found, run)) == (state[0] == "going")
    (run.folder / "checkpoint.h5").write_text("")
    resumable = state[0] in ("dead", "stopped")
    assert (f"go on with --resume {run.folder}" in "\n".join(facts(found, run))) == resumable


def test_one_line_of_news(watched):
    line = news(*watched(started=STARTED))
    assert line.startswith("a: step 8 of 100 (8%), epoch 4.00 of 50  loss 0.125  test loss 0.25  test accuracy 87.50%")
    assert "  128 examples/s  23 s left, until " in line and "\n" not in line


def shown(found, width, height=24, encoding="utf-8"):
    """What a terminal of this size shows."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None, markup=False)
    console.print(view(*found, console))
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_curves_fit_into_the_terminal(watched, width):
    pytest.importorskip("plotext")
    found = watched(lines_of(3000, loss=lambda step: 1e4 / step), started=STARTED)
    lines = shown(found, width)
    assert all(len(line) <= width for line in lines) and len(lines) <= 24
    text = "\n".join(lines)
    assert "loss, by step" in text and "test accuracy, by step" in text and "3,000" in text
    beside = any("loss, by" in line and "accuracy, by" in line for line in lines)
    assert beside == (width == 120)
    low = shown(found, width, height=12)
    assert "loss, by step" in "\n".join(low) and all(len(line) <= width for line in low)


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1e9, -1e300), (2e9, 1e300)], [(5, 0.0)] * 3])
def test_odd_curves(points):
    pytest.importorskip("plotext")
    for width in (20, 40):
        lines = curve("test_loss", points, width, 8).plain.splitlines()
        assert all(len(line) <= width for line in lines) and "test loss" in "".join(lines)


def test_without_curves(watched, monkeypatch):
    assert shown(watched(), 80, encoding="ascii")[-1] == "curves need a UTF-8 terminal, not ascii"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = shown(watched(), 80)
    assert lines[-1] == "curves need plotext: pip install 'hpcdl[report]'" and len(lines) == 6
    assert watch_view.can_draw(Console(file=io.StringIO())) == lines[-1]


def test_what_a_run_says_is_no_markup(watched):
    found = watched(started=STARTED | {"program": "[red]x\x1b[31m\n", "job": "[/]"}, name="[b]a")
    assert shown(found, 80)[0] == "[b]a: [red]x\\x1b[31m\\n, mlp on digits, 2 ranks, job [/]"
