"""hpcdl/search/search_log_reader.py: rows of trials from a journal, whatever it holds."""

import math

import pytest
from made_search import events_of, settings_of, write_journal

from hpcdl.errors import UsageError
from hpcdl.search.search_log_reader import Trials, best, is_search, read
from hpcdl.search.space import Parameter


def taken(*events, **settings):
    found = Trials(settings_of(**settings))
    for event in events:
        found.take(event)
    return found


def end(trial, score, rung=0, seed=0, failed=None, **more):
    return {"event": "end", "trial": trial, "rung": rung, "seed": seed, "score": score, "failed": failed} | more


def begin(trial, rung=0, amount=0.0, seed=0, values=None, **more):
    key = {"event": "begin", "trial": trial, "rung": rung, "seed": seed, "amount": amount}
    return key | {"values": values or {"lr": 0.1}} | more


def test_a_row_is_the_mean_over_the_seeds_of_its_last_piece(tmp_path):
    found = taken(
        begin(0, amount=1),
        end(0, 0.5, seconds=2, more={"steps": 10}),
        end(0, 0.7, seed=1, seconds=3, more={"steps": 10}),
        begin(0, rung=1, amount=3),
        end(0, 0.9, rung=1, seconds=4, more={"steps": 30}),
        seeds=2,
    )
    row = found.row(0)
    assert (row.score, row.loss, row.amount, row.rung, row.status) == (0.6, -0.6, 1, 0, "begun")
    assert row.spread == pytest.approx(math.sqrt(0.02)) and row.seconds == 9 and row.steps == 20
    found.take(end(0, 0.8, rung=1, seed=1))
    row = found.row(0)
    assert (row.score, row.amount, len(row.pieces), row.status) == (pytest.approx(0.85), 3, 2, "ended")
    assert [each.score for each in found.ended] == [0.6, pytest.approx(0.85)] and found.ended[-1].trials == 1


def test_an_end_counts_once():
    found = taken(begin(0), end(0, 0.5), end(0, 0.9), end(0, None, failed="x"), end(0, 0.9, seed=1))
    assert found.row(0).score == 0.5 and found.row(0).failed is None and len(found.ended) == 1


def test_a_trial_that_fails_once_has_failed():
    found = taken(begin(0), end(0, 0.9), begin(0, rung=1), end(0, None, rung=1, failed="no memory"))
    row = found.row(0)
    assert (row.status, row.failed, row.score, row.loss) == ("failed", "no memory", None, None)
    several = taken(begin(0), end(0, 0.9), end(0, None, seed=1, failed="no memory"), seeds=2).row(0)
    assert several.failed == "seed 1: no memory" and several.score is None
    assert taken(begin(1), end(1, math.nan)).row(1).failed == "its score is nan"
    assert taken(begin(1), end(1, None)).row(1).failed == "its score is None"


def test_the_best_have_come_furthest():
    events = [begin(0, amount=1), end(0, 0.9), begin(1, amount=3), end(1, 0.8), begin(2, amount=3), end(2, 0.85)]
    events += [begin(3, amount=0), end(3, 0.1), begin(4), end(4, None, failed="x"), begin(5)]
    assert [row.trial for row in best(taken(*events).rows())] == [3, 2, 1, 0]
    assert [row.trial for row in best(taken(*events, maximize=False).rows(), 2)] == [3, 1]


def test_what_is_at_work_and_what_was_interrupted():
    found = taken({"event": "leg", "groups": 2, "time": 5.0}, begin(0, group=1, time=6.0), begin(1, group=0))
    assert found.running == {(0, 0, 0): 6.0, (1, 0, 0): None}
    found.take({"event": "leg", "groups": 3, "time": 100.0})
    assert not found.running and found.groups == 3 and found.row(0).status == "begun"
    found.take({"event": "again", "trial": 0, "rung": 0, "seed": 0, "group": 2, "time": 101.0})
    assert [*found.running] == [(0, 0, 0)] and found.row(0).values == {"lr": 0.1}


def test_seconds_are_those_within_jobs():
    found = taken({"event": "leg", "time": 100.0}, begin(0, time=101.0), end(0, 0.5, time=110.0))
    assert found.ended[0].piece.at == 10
    for event in ({"event": "leg", "time": 500.0}, begin(1, time=501.0), end(1, 0.5, time=505.0)):
        found.take(event)
    assert found.ended[1].piece.at == 15 and found.seconds == 15
    assert taken(begin(0), end(0, 0.5)).seconds is None


def test_parameters_are_those_of_the_space_that_can_be_read():
    assert taken(space=["lr=log:0.001..0.5", "=1", "lr", 3, "a=x=1|y=2 if b=c"]).axes() == [
        Parameter("lr", "float", (), 0.001, 0.5, True),
        Parameter("a", "choice", ("x=1", "y=2"), condition=("b", "c")),
    ]


def test_parameters_that_only_values_tell_of():
    found = taken(begin(0, values={"a": 1, "b": "x", "lr": 0.5}), begin(1, values={"a": 3, "b": "y"}), space=None)
    assert [(axis.name, axis.kind) for axis in found.axes()] == [("a", "int"), ("b", "choice"), ("lr", "float")]
    assert (found.axes()[0].low, found.axes()[0].high, found.axes()[1].choices) == (1, 3, ("x", "y"))


def test_a_file_is_read_as_far_as_it_is_whole(tmp_path):
    folder = write_journal(tmp_path, trials=6, failing=(2,))
    path, rows = folder / "journal.jsonl", read(folder).rows()
    assert is_search(folder) and len(rows) == 6 and rows[2].status == "failed" and not read(folder).missing
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert read(folder).rows()[:5] == rows[:5] and read(folder).rows()[5].status == "begun"
    path.write_bytes(whole + b'\xff\n[3]\n{"event": "later", "trial": 1}\n')
    assert [row.score for row in read(folder).rows()] == [row.score for row in rows]
    assert read(folder).missing == ["2 of the lines of journal.jsonl cannot be read, and are left out"]
    path.write_bytes(whole.replace(b'"version": 1', b'"version": 7'))
    assert len(read(folder).rows()) == 6 and "has version 7, and this hpcdl reads version 1" in read(folder).missing[0]
    path.write_bytes(b"".join(whole.splitlines(True)[1:]))
    assert not is_search(folder) and len(read(folder).rows()) == 6 and "does not begin" in read(folder).missing[0]
    (tmp_path / "dir" / "journal.jsonl").mkdir(parents=True)
    for name in ("none", "dir"):
        with pytest.raises(UsageError, match=r"journal\.jsonl is missing"):
            read(tmp_path / name)


def test_rows_that_were_asked_for_before_follow_what_is_told():
    found, again = Trials(), Trials()
    for event in events_of(trials=5, seeds=2, rungs=2):
        found.take(event)
        again.take(event)
        found.rows()
    assert found.rows() == again.rows()
