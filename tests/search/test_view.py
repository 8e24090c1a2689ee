"""hpcdl/search/view.py: what a search shows while it goes on, on wide and narrow terminals and through a pipe."""

import io
import threading

import pytest
from fuzz import cases
from hypothesis import given
from hypothesis import strategies as st
from made_search import LONG, ODD, ODD_SETTINGS, events_of, settings_of
from rich.console import Console

from hpcdl.search.groups import Event
from hpcdl.search.search_log_reader import Trials
from hpcdl.search.tasks import Result, SearchJob, SearchTask
from hpcdl.search.view import View, beside_training, epochs_planned, pieces_planned, remaining


def shown(events, mode="lines", width=80, height=24, past=1, **how):
    """A view that was told these events, of which the first are past, and what it has printed."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=mode == "bar", color_system=None)
    events = list(events)
    view = View(mode, past=events[:past], console=console, now=lambda: LONG + 60, **how)
    view.start()
    for event in events[past:]:
        view.watch(event)
    return view, out


def plain(view, width=80, height=24):
    """The live table as text."""
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(view.table())
    return out.getvalue()


def test_a_line_for_each_trial_that_has_ended(tmp_path):
    _, out = shown(events_of(trials=6, failing=(1,)))
    lines = out.getvalue().splitlines()
    assert len(lines) == 6 and [line.split("]")[0] for line in lines] == [f"[{n}/6" for n in range(1, 7)]
    assert "[2/6] trial 1: failed: its loss is not finite (step 17), lr=0." in out.getvalue()
    assert lines[0].startswith("[1/6] trial 0: validation accuracy ") and "%, lr=" in lines[0]
    _, out = shown(events_of(trials=6), past=8)  # what an earlier job has done is no news
    assert len(out.getvalue().splitlines()) == 3


def test_of_several_seeds_one_line_and_of_rungs_each(tmp_path):
    _, out = shown(events_of(trials=3, seeds=2, rungs=2, method="asha"))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and all(" ± " in line for line in lines)
    assert lines[0].startswith("[1] trial 0, 1 epoch: ") and ", 3 epochs: " in lines[3]


def test_nothing_where_nothing_is_wanted():
    view, out = shown(events_of(), mode="none")
    view.end()
    assert out.getvalue() == ""


@pytest.mark.parametrize("width, height", [(80, 24), (40, 10), (20, 4)])
def test_the_live_table(width, height):
    events = list(events_of(trials=12, failing=(3,)))
    view, _ = shown(events[:-4], mode="bar", width=width, height=height)  # the last two have not ended
    lines = plain(view, width, height).splitlines()
    assert max(map(len, lines)) <= width and len(lines) <= max(height, 9)
    assert width < 40 or any(" 9" in line and "%" in line and "lr=0" in line for line in lines)  # not only its values
    said = " ".join(plain(view, 200).split())
    assert "random, validation accuracy: 9 of 12 trials ended, 1 failed" in said and "left, until" not in said
    view.watch(events[-4])
    said = " ".join(plain(view, 200).split())
    assert ", 1 running; " in said and " left, until " in said and "running: trial 10 (" in said
    view.close()


def test_rows_are_the_best_ones_first():
    view, _ = shown(events_of(trials=27, rungs=3, method="asha"))
    rows = [line.split() for line in plain(view, 120, 40).splitlines() if "lr=" in line]
    assert [row[2] for row in rows] == ["9"] * 3 + ["3"] * 6 + ["1"]
    assert [float(row[1][:-1]) for row in rows[:3]] == sorted((float(row[1][:-1]) for row in rows[:3]), reverse=True)


def test_values_stand_there_as_they_are():
    evil = "[red]mlp[/red] :smile: \x1b[2J" + 30 * "512,"
    settings = settings_of(objective="[bold]x", method="[link]")
    events = [{"event": "search", "version": 1, "settings": settings}]
    events += [{"event": "begin", "trial": 0, "rung": 0, "seed": 0, "values": {"[m]": evil}}]
    end = {"event": "end", "trial": 0, "rung": 0, "seed": 0, "score": 0.5}
    for failed in (None, evil):
        view, out = shown([*events, end | {"failed": failed}])
        view.end()
        assert "[red]mlp[/red] :smile: \\x1b[2J" in out.getvalue() and "\x1b" not in out.getvalue()
        assert "[link], [bold]x: " in plain(view, 300) and "\x1b" not in plain(view, 300)
    for width in (80, 40):
        view, out = shown([*events, end | {"failed": None}], width=width)
        view.end()
        table = [line for line in out.getvalue().splitlines() if not line.startswith(("[1", "the best", "to train"))]
        assert max(map(len, table)) <= width
        assert "".join("".join(table).split()).count("512,") == (30 if width == 80 else 0)  # broken, or cut off
        assert out.getvalue().count("512,") >= 60


def test_what_is_said_at_the_end(tmp_path):
    view, out = shown(events_of(trials=30, failing=(1, 2)), folder=tmp_path / "a b")
    before = len(out.getvalue())
    view.end()
    said = out.getvalue()[before:]
    assert said.index("2 trials failed: its loss is not finite (step 17)") < said.index("the best is trial ")
    folder = f"{tmp_path}/a b"
    for each in (
        f"to train it longer: mpiexec -n 2 hpcdl train-allreduce --config '{folder}/best.yaml' --epochs 18 --out ",
        "differences between trials explained by each option alone: lr ",
        "one seed per trial: the best of many scores is partly chance",
        f"all of it: {folder} (hpcdl report {folder} makes a page with pictures)",
    ):
        assert each in said, each
    view, out = shown(events_of(trials=3, seeds=2))
    view.end()
    assert "one seed" not in out.getvalue() and "all of it" not in out.getvalue()
    view, out = shown(events_of(trials=2, failing=(0, 1)))
    view.end()
    assert "no trial has a score" in out.getvalue()


def test_events_of_groups_are_taken_as_well():
    def event(kind, score=None, stopped=False, rung=0):
        result = Result(score, None, stopped, 4.0, {"steps": 7}) if kind in ("end", "stop") else None
        return Event(kind, 1, SearchJob(SearchTask(3, {"lr": 0.5}, rung, 2.0 + rung)), result)

    view, out = shown([{"event": "search", "version": 1, "settings": settings_of()}])
    view.watch(event("begin"))
    assert [*view.trials.running] == [(3, 0, 0)]
    view.watch(event("end", 0.75))
    row = view.trials.row(3)
    assert (row.score, row.seconds, row.steps, row.amount, row.values) == (0.75, 4.0, 7, 2.0, {"lr": 0.5})
    view.watch(event("begin", rung=1))
    view.watch(event("stop", stopped=True, rung=1))
    assert not view.trials.running and view.trials.row(3).status == "begun" and view.trials.row(3).score == 0.75
    assert out.getvalue().count("\n") == 1


def test_what_is_left_by_hand():
    """24 trials on 4 groups, 6 ended after 10 s each, 4 at work for 5 s: (14 * 10 + 4 * 5) / 4 = 40 s."""
    found = Trials(settings_of())
    found.take({"event": "leg", "groups": 4, "time": 0.0})
    assert remaining(found, 0.0) is None
    for trial in range(10):
        key = {"trial": trial, "rung": 0, "seed": 0}
        found.take({"event": "begin", **key, "time": 15.0 if trial > 5 else 0.0})
        if trial < 6:
            found.take({"event": "end", **key, "score": 1.0, "failed": None, "seconds": 10.0, "time": 15.0})
    assert remaining(found, 20.0) == pytest.approx(40)
    for odd in ({"trials": 0}, {"trials": None}, {"method": "pbt:interval=x"}, {"method": "hyperband", "eta": 1}):
        found.settings = settings_of() | odd
        assert remaining(found, 20.0) is None


def test_rungs_that_are_planned():
    """Of 27 trials 9 and 3 go on: 1 epoch, 2 more, 6 more; with 8 at most 7 more, as the last rung is the whole."""
    assert pieces_planned(Trials(settings_of(method="asha", trials=27))) == [(27, 1), (9, 2), (3, 3)]
    assert pieces_planned(Trials(settings_of(method="asha", trials=27, most=8.0))) == [(27, 1), (9, 7)]
    for odd in ({"least": 0}, {"eta": 1}, {"least": "x"}, {"eta": None}):
        assert pieces_planned(Trials(settings_of(method="asha") | odd)) is None


def test_epochs_that_are_planned():
    """Hyperband's table: 81 + 27 x 2 + 9 x 6 + 3 x 18 + 54 = 297, 34 x 3 + 11 x 6 + 3 x 18 + 54 = 276, and so on; a
    population trains all of its members whole."""
    assert epochs_planned("hyperband", 0.0, 1.0, 81.0, 3.0) == (297 + 276 + 279 + 324 + 405, 0.0)
    assert epochs_planned("pbt", 6.0, 1.0, 5.0, 3.0) == (30, 1.0)
    assert epochs_planned("pbt:population=4,interval=2", 0.0, 1.0, 6.0, 3.0) == (24, 2.0)
    assert epochs_planned("random", 6.0, 1.0, 5.0, 3.0) is None
    found = Trials(settings_of(method="pbt", trials=6, least=1.0, most=5.0))
    found.take({"event": "leg", "groups": 2, "time": 0.0})
    for trial in range(6):
        found.take({"event": "begin", "trial": trial, "rung": 0, "seed": 0, "amount": 1.0, "time": 0.0})
        if trial < 4:
            end = {"event": "end", "trial": trial, "rung": 0, "seed": 0, "score": 1.0, "failed": None}
            found.take(end | {"seconds": 10.0, "time": 10.0})
    assert remaining(found, 15.0) == pytest.approx((26 * 10 - 2 * 15) / 2)


def test_events_may_come_from_another_thread():
    events = list(events_of(trials=40))
    view, _ = shown(events[:1], mode="bar")
    threads = [threading.Thread(target=lambda: [*map(view.watch, events[1:])]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        view.watch({})
    for thread in threads:
        thread.join()
    view.close()
    assert len(view.trials.ended) == 40


NAMES = ["values", "amount", "parent", "group", "groups", "time", "score", "failed", "seconds", "more", "settings"]
SOUND = {"trial": st.integers(0, 3) | ODD, "rung": st.integers(0, 2) | ODD, "seed": st.integers(0, 1) | ODD}
KINDS = st.sampled_from(["search", "leg", "begin", "again", "end", "stop"]) | ODD
EVENT = st.fixed_dictionaries({"event": KINDS}, optional={name: ODD for name in NAMES} | SOUND)


@cases(80)
@given(st.lists(EVENT, max_size=12), ODD_SETTINGS)
def test_events_that_are_odd_do_no_harm(tmp_path_factory, events, settings):
    first = {"event": "search", "version": 1, "settings": settings_of() | settings}
    for mode in ("lines", "bar"):
        view, _ = shown([first, *events], mode=mode, width=40, folder=tmp_path_factory.getbasetemp())
        plain(view, 40)
        view.end()


def test_what_a_trial_takes_beside_its_training():
    trials = Trials()
    for event in events_of(trials=3, seeds=1, rungs=2, method="asha"):
        if event["event"] == "end":  # later pieces count the training of those before, too
            training = 1.0 if event["rung"] == 0 else 50.0
            event |= {"seconds": 1.0 + 0.1 * (1 + event["trial"]), "more": {"training_seconds": training}}
        trials.take(event)
    assert beside_training(trials) == pytest.approx(0.2)
    assert beside_training(Trials()) is None
