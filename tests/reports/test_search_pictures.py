"""hpcdl/reports/search_pictures.py and search_section.py: a search in a report, whatever its journal holds."""

import json
import math
import re
import warnings

import pytest
from fuzz import cases
from hypothesis import example, given
from hypothesis import strategies as st
from made_runs import write_run
from made_search import events_of, settings_of, trials_of, write_journal

from hpcdl.reports import search_pictures
from hpcdl.reports.figures import drawing, inline
from hpcdl.reports.report import make
from hpcdl.reports.search_pictures import pictures_of
from hpcdl.reports.search_section import searched
from hpcdl.search.search_log_reader import read

OPTIONS = [f"option-{number}" for number in range(1, 6)]


def page_of(folder, **how):
    made = make([str(folder)], folder / "report.html", **how)
    text = (folder / "report.html").read_text()
    return text, " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL).split()), made


def test_what_a_search_shows(tmp_path):
    write_journal(tmp_path / "search", trials=30, failing=(2, 3))
    write_run(tmp_path / "search" / "trials" / "0000" / "seed-0", traced=False)
    write_run(tmp_path / "other", traced=False)
    text, said, made = page_of(tmp_path)
    names = [each.name for each in pictures_of(read(tmp_path / "search"))]
    assert names == ["best-time", "best-trials", "parallel-coordinates", *OPTIONS]
    assert (made.searches, made.runs) == (1, 1) and "Report of 1 search and 1 run" in said
    assert text.count("<figure>") == made.pictures > len(names) + 8
    for each in (
        "train-allreduce --data digits --epochs 9",
        "validation_accuracy (larger is better)",
        "28 of 30 ended, 2 failed",
        "2 trials failed: its loss is not finite (step 17)",
        "The best 20 of 28 trials with a score. Each trial is a run, in a folder such as trials/",
        "4 of 2 ranks",
        "Score against momentum:beta",
        "The option was active in",
        "What each option explains",
        "before you report its score, or search with --seeds",
    ):
        assert each in said, each
    assert all(each.title and each.sentence for each in pictures_of(read(tmp_path / "search")))


def test_rungs_are_shown_where_there_are_some(tmp_path):
    write_journal(tmp_path, trials=27, rungs=3, method="asha", seeds=2)
    found = {each.name: each for each in pictures_of(read(tmp_path))}
    assert [*found] == ["best-time", "best-trials", "rungs", "parallel-coordinates", *OPTIONS]
    assert found["rungs"].legend[0].label == "3 trials trained to the end"
    assert [key.label for key in found["option-1"].legend][:2] == ["3 trials, trained longest", "24, trained less"]
    _, said, _ = page_of(tmp_path)
    assert "mean of 2 seeds" in said and "±" in said and "before you report" not in said
    order = re.findall(r"(\d+\.\d+)% ± \d+\.\d+% (9|3|1) ", said)
    assert [epochs for _, epochs in order] == ["9"] * 3 + ["3"] * 6 + ["1"] * 11  # the longest trained first


def test_the_best_so_far_never_falls():
    """The first points of both pictures, as they are drawn."""
    for maximize, expected in ((True, [10, 30, 30, 40, 40]), (False, [10, 10, 5, 5, 5])):
        scores = [10.0, 30.0, 5.0, 40.0]
        trials = trials_of([({"x": i}, score) for i, score in enumerate(scores)], maximize=maximize, objective="a")
        for picture, x in zip(pictures_of(trials), ([5, 15, 25, 35, 35], [1, 2, 3, 4, 4]), strict=False):
            lines = drawn(picture).lines
            assert [*lines[1].get_ydata()] == expected and [*lines[1].get_xdata()] == x
            assert [*lines[0].get_ydata()] == scores


def drawn(picture):
    from hpcdl.reports.figures import drawn

    with drawing():
        return drawn(picture, titled=True).axes[0]


def test_axes_are_as_the_space_has_them():
    points = [({"lr": 10.0**-i, "n": i, "model": "ab"[i % 2]}, 0.1 * i) for i in range(1, 5)]
    trials = trials_of(points, space=["lr=log:0.0001..0.1", "n=int:1..9", "model=a|b|c"])
    axes = {each.get_xlabel(): each for each in map(drawn, pictures_of(trials)[-3:])}
    assert axes["lr"].get_xscale() == "log" and axes["n"].get_xscale() == "linear"
    assert axes["n"].get_xlim()[1] > 9 and axes["lr"].get_xlim()[0] < 0.0001
    assert [each.get_text() for each in axes["model"].get_xticklabels()] == ["a", "b", "c"]
    best = [line for line in axes["n"].lines if line.get_color() == search_pictures.ORANGE]
    assert len(best) == 1 and [*best[0].get_xdata()] == [4]


def test_losses_that_are_far_apart_have_a_logarithmic_axis():
    points = [({"x": i}, 10.0**i) for i in range(5)]
    for objective, scale in (("validation_loss", "log"), ("validation_accuracy", "linear")):
        assert drawn(pictures_of(trials_of(points, objective=objective))[0]).get_yscale() == scale


def test_names_that_are_long_stand_in_the_legend():
    points = [({"model": f"mlp:{'512,' * (i % 5)}{i}"}, 0.1 * i) for i in range(8)]
    picture = pictures_of(trials_of(points))[-1]
    assert [each.get_text() for each in drawn(picture).get_xticklabels()] == [*"12345678"]
    assert [key.label for key in picture.legend][2] == "1: mlp:0"


def test_what_users_wrote_is_no_markup(tmp_path):
    evil = "<script>alert(1)</script><b a=\"'&[red]$x^2$\x1b[2J"
    events = [{"event": "search", "version": 1, "settings": settings_of(program=evil, method=evil, objective=evil)}]
    events[0]["settings"]["space"] = [f"{evil}=0..1", f"m={evil}|x", evil]
    for trial in range(12):
        key = {"trial": trial, "rung": 0, "seed": 0, "time": 1.0 * trial}
        values = {evil: trial / 12, "m": evil if trial % 2 else "x", f"{evil}2": evil}
        failed = evil if trial == 5 else None
        events += [{"event": "begin", **key, "values": values}, {"event": "end", **key, "score": 0.5, "failed": failed}]
    write_journal(tmp_path, events)
    text, said, made = page_of(tmp_path, pictures=tmp_path / "pictures", kind="svg")
    assert "<script" not in text and "<b " not in text and "\x1b" not in text
    assert said.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 8 and "[red]" in said
    files = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert len(files) == made.pictures and files[0].startswith("search-1-best-")
    for path in (tmp_path / "pictures").iterdir():
        assert "<script" not in path.read_text()
    page_of(tmp_path, pictures=tmp_path / "pictures", kind="svg")  # its own files are replaced


@pytest.mark.parametrize("count", [0, 1, 2])
def test_searches_that_have_hardly_begun(tmp_path, count):
    events = [*events_of(trials=3)]
    write_journal(tmp_path, events[: 1 + 2 * count])
    _, said, made = page_of(tmp_path)
    assert made.searches == 1 and f"{max(0, count - 1) if count else 0} of 3 ended" in said
    (tmp_path / "journal.jsonl").write_bytes((tmp_path / "journal.jsonl").read_bytes() + b'{"event": "en')
    page_of(tmp_path)


def test_one_journal_that_cannot_be_read_is_told_of(tmp_path):
    folder = write_journal(tmp_path, trials=4)
    (folder / "journal.jsonl").write_bytes((folder / "journal.jsonl").read_bytes() + b"\xff\xfe\n")
    _, said, made = page_of(tmp_path)
    assert "1 of the lines of journal.jsonl cannot be read" in said and len(made.missing) == 1


NUMBER = st.floats(allow_nan=True) | st.integers(-9, 9) | st.sampled_from([1e308, -1e308, 5e-324, 10**300])
VALUES = st.dictionaries(st.sampled_from(["lr", "x", "m", "$y"]), NUMBER | st.text(max_size=4), max_size=4)
SPACES = st.lists(st.sampled_from(["lr=log:0.001..0.5", "x=-1e308..1e308", "m=a|b", "x=int:1..5", "$y=1..2"]))


@cases(20)
@example([({"lr": 0.0}, 0.0), ({"lr": "\u02ef"}, 0.0)], [], False)  # no font has it
@example([({"x": 1.0}, 1e308), ({"x": 2.0}, -1e308)], ["x=-1e308..1e308"], True)
@given(st.lists(st.tuples(VALUES, NUMBER), max_size=6), SPACES, st.booleans())
def test_values_and_scores_that_are_odd_do_no_harm(points, space, maximize):
    points = [(values, score) for values, score in points]
    trials = trials_of(points, space=space, maximize=maximize)
    with warnings.catch_warnings(action="error"), drawing():
        found = [inline(each, "x") for each in pictures_of(trials)]
    assert all("<svg" in each for each in found)
    assert not any(math.isnan(row.score) for row in trials.rows() if row.score is not None)
    assert "".join(searched(trials, "")) and json.dumps(space)
