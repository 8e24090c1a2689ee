"""hpcdl/search/controller.py: each job exactly once, whenever it is killed, and the method in the state that it had."""

import os
import random

import pytest
from searching import Rungs, ends, events, results

from hpcdl.errors import TrainingError, UsageError
from hpcdl.search.controller import Controller
from hpcdl.search.journal import NAME, Journal
from hpcdl.search.tasks import Result, SearchTask


def score(job):
    """As good as any: of trial 3's seed 1 there is none."""
    return None if job.key[::2] == (3, 1) else (job.task.values["x"] + job.task.rung + job.seed) % 1


def result(job):
    return Result(score(job), None if score(job) is not None else "no luck", seconds=1.0, more={"steps": 3})


def open_(folder, method, seeds=2, maximize=False):
    return Controller(method, seeds, maximize, Journal.open(folder, {}, resume=True))


def work(controller, groups=3, jobs=10**6, seed=0):
    """Let groups work in any order until so many jobs have ended, or all is over; returns how many have."""
    luck, running, done = random.Random(seed), [], 0
    while done < jobs:
        while len(running) < groups and (job := controller.next(len(running))) is not None:
            running.append(job)
        if not running:
            break
        job = running.pop(luck.randrange(len(running)))
        controller.ended(job, result(job))
        done += 1
    return done


@pytest.mark.parametrize("rungs", [1, 3])
def test_all_seeds_of_all_tasks_are_done_and_told(tmp_path, rungs):
    method = Rungs(8, rungs)
    controller = open_(tmp_path, method)
    assert not controller.over
    work(controller)
    assert controller.over and controller.next() is None
    found = ends(events(tmp_path / NAME))
    assert {trial for trial, _, _ in found} == set(range(8)) and all((t, r, 1 - s) in found for t, r, s in found)
    for trial, rung, loss in method.told:
        scores = [found[trial, rung, seed] for seed in range(2)]
        assert loss == (None if None in scores else sum(scores) / 2)
    assert (3, 0, None) in method.told and len(results(controller)) == len(found)
    assert not controller.running and sum(each.failed is not None for each in results(controller)) == 1


def test_larger_scores_are_smaller_losses(tmp_path):
    small, large = Rungs(4), Rungs(4)
    work(open_(None, small, maximize=False))
    work(open_(None, large, maximize=True))
    assert {(trial, loss) for trial, _, loss in large.told if loss} == {
        (trial, -loss) for trial, _, loss in small.told if loss
    }


@pytest.mark.long
@pytest.mark.parametrize("rungs", [1, 3])
def test_cut_at_any_byte_each_job_ends_exactly_once(tmp_path, monkeypatch, rungs):
    """What had ended is not done again, what had begun is begun again; and the method is told in the same order."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # thousands of them
    whole, folder = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    folder.mkdir()
    method = Rungs(4, rungs)
    first = open_(whole, method, seeds=1 if rungs > 1 else 2)
    work(first, seed=rungs)
    first.journal.close()
    data, all_ends = (whole / NAME).read_bytes(), ends(events(whole / NAME))
    lines = data.splitlines(keepends=True)
    for cut in range(len(data) + 1):
        (folder / NAME).write_bytes(data[:cut])
        controller = open_(folder, again := Rungs(4, rungs), first.seeds)
        before = ends(events(folder / NAME))
        kept = lines[: data[:cut].count(b"\n")]
        assert len(before) == len(results(controller)) == sum(b'"event": "end"' in line for line in kept)
        assert again.told == method.told[: len(again.told)]
        if data[:cut].endswith(b"\n") or cut % 41 == 0:
            done = work(controller, groups=2, seed=cut)
            after = ends(events(folder / NAME))
            assert controller.over and done == len(after) - len(before), "what had ended is not done again"
            assert {name: after[name] for name in before} == before
            assert rungs > 1 or after == all_ends
        controller.journal.close()


def test_interrupted_jobs_are_handed_out_first(tmp_path):
    controller = open_(tmp_path, Rungs(4))
    first, second = controller.next(), controller.next()
    controller.ended(second, Result(stopped=True))
    controller.journal.close()
    again = open_(tmp_path, Rungs(4))
    assert len(again.interrupted) == 2
    assert [again.next().key for _ in range(3)] == [first.key, second.key, (1, 0, 0)]
    assert [each["event"] for each in events(tmp_path / NAME)] == ["search", *["begin"] * 2, *["again"] * 2, "begin"]


def test_scores_that_are_none_have_failed(tmp_path):
    method = Rungs(3)
    controller = open_(tmp_path, method, seeds=1)
    for value in (float("nan"), None, 1.0):
        controller.ended(controller.next(), Result(value))
    assert [loss for _, _, loss in method.told] == [None, None, 1.0]
    failed = [each["failed"] for each in events(tmp_path / NAME) if each["event"] == "end"]
    assert failed == ["its score is nan", "it has returned no score", None]
    assert controller.outcomes[0, 0].failed == "its score is nan"


def test_the_best_are_found_at_the_longest(tmp_path):
    controller = open_(None, Rungs(4, 3), seeds=1)
    scores = {(0, 0): 0.1, (1, 0): 0.2, (2, 0): 0.3, (3, 0): 0.4, (0, 1): 0.9, (1, 1): 0.8, (1, 2): 0.7}
    while (job := controller.next()) is not None:
        controller.ended(job, Result(scores[job.key[:2]]))
    ranking = [(each.task.trial, each.task.rung, each.score) for each in controller.ranking()]
    assert ranking == [(1, 2, 0.7), (0, 1, 0.9), (2, 0, 0.3), (3, 0, 0.4)]


def test_another_method_is_refused(tmp_path):
    controller = open_(tmp_path, Rungs(4))
    work(controller, jobs=2)
    controller.journal.close()
    with pytest.raises(UsageError, match="the method would now begin trial 0 with"):
        open_(tmp_path, Rungs(4, seed=1))
    with pytest.raises(UsageError, match="the method would now begin none"):
        open_(tmp_path, Rungs(0))


@pytest.mark.parametrize("event", ["end", "again"])
def test_a_journal_that_cannot_be_is_refused(tmp_path, event):
    journal = Journal.open(tmp_path, {})
    journal.append(event=event, trial=0, rung=0, seed=0)
    journal.close()
    with pytest.raises(UsageError, match="out of order; begin anew"):
        open_(tmp_path, Rungs(4))


class Waits(Rungs):
    over = False


class Twice(Rungs):
    def ask(self):
        return SearchTask(0, {})


def test_a_method_that_waits_for_nobody_does_not_hang_the_search(tmp_path):
    controller = open_(None, Waits(1), seeds=1)
    with pytest.raises(TrainingError, match="no running trial"):
        work(controller)
    controller = open_(None, Twice(1), seeds=1)
    with pytest.raises(TrainingError, match="rung 0 of trial 0 twice"):
        work(controller)


def test_who_ends_what_nobody_has_begun_is_told(tmp_path):
    controller = open_(None, Rungs(1), seeds=1)
    job = controller.next()
    controller.ended(job, Result(1.0))
    with pytest.raises(TrainingError, match="had not begun"):
        controller.ended(job, Result(1.0))
