"""How long trials take is learned from those that have ended, and the longest are handed out first."""

import heapq
import math
from statistics import NormalDist

import numpy as np
import pytest
from searching import results

from hpcdl.search.controller import Controller
from hpcdl.search.duration_model import LEAST, DurationModel
from hpcdl.search.journal import Journal
from hpcdl.search.methods import make_method
from hpcdl.search.space import Space
from hpcdl.search.tasks import Result

SPACE = Space.read(["epochs=int:1..64:log", "model=small|large", "width=1.0..2.0 if model=large", "lr=log:0.001..0.5"])


def seconds_of(values):
    """What a training costs: it follows from three of the options."""
    return values["epochs"] * (1 if values["model"] == "small" else 5 * values["width"])


def drawn(trials):
    return [SPACE.values(np.random.default_rng(i).random(4)) for i in range(trials)]


def test_lengths_that_follow_from_options_are_learned():
    lengths, points = DurationModel(SPACE), drawn(200)
    assert lengths.expected(points).tolist() == [0] * 200
    for each in points[:100]:
        lengths.add(each, seconds_of(each))
    expected = lengths.expected(points[100:])
    real = np.log([seconds_of(each) for each in points[100:]])
    assert np.corrcoef(expected, real)[0, 1] > 0.99


def test_a_few_trials_are_not_enough_to_know():
    lengths, points = DurationModel(SPACE), drawn(10)
    for each in points[: LEAST - 1]:
        lengths.add(each, seconds_of(each))
    assert not lengths.expected(points).any()
    lengths.add(points[LEAST], 0.0)  # no length
    assert not lengths.expected(points).any()
    lengths.add(points[LEAST], 3.0)
    assert lengths.expected(points).any()


def simulated(method, groups, seconds_of, seeds=1):
    """All jobs of a search by groups that take so long; when the last has ended, and the journal's events."""
    journal = Journal.open(None, {}, False, False)
    controller, free, running = Controller(method, seeds, False, journal), list(range(groups)), []
    now = 0.0
    while not controller.over:
        while free and (job := controller.next(free[0])) is not None:
            heapq.heappush(running, (now + seconds_of(job.task.values), free.pop(0), job))
        now, group, job = heapq.heappop(running)
        controller.ended(job, Result(score=1.0, seconds=seconds_of(job.task.values)))
        free.append(group)
    return now, journal.events


def by_hand(lengths, groups):
    free = [0.0] * groups
    for each in lengths:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def beyond_the_best(spread, seeds):
    """By how much a search ends later than in the best order, for each seed; and so the trials as they come.
    64 of log-normal lengths, which follow from an option, on 8 groups."""
    space, late, listed = Space.read(["x=0.0..1.0", "y=a|b"]), [], []

    def seconds_of(values):
        return math.exp(spread * NormalDist().inv_cdf(values["x"]))

    def method(seed):
        return make_method("random", space, 64, seed, least=1, most=0, eta=3, points=5)

    for seed in range(seeds):
        ended, events = simulated(method(seed), 8, seconds_of)
        begun = [event for event in events if event["event"] == "begin"]
        assert sorted(event["trial"] for event in begun) == list(range(64))
        best = by_hand(sorted((seconds_of(event["values"]) for event in begun), reverse=True), 8)
        late.append(ended / best - 1)
        listed.append(by_hand([seconds_of(task.values) for task in iter(method(seed).ask, None)], 8) / best - 1)
    return late, listed


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.25, 1.0])
def test_the_end_is_near_that_of_the_best_schedule(spread):
    late, listed = beyond_the_best(spread, 20)
    assert np.median(late) < 0.05 and np.median(late) < np.median(listed) / 2


@pytest.mark.parametrize("method", ["random", "grid", "asha"])
def test_a_search_that_goes_on_finds_its_jobs_again(method):
    how = {"least": 1, "most": 9, "eta": 3, "points": 2}
    _, events = simulated(make_method(method, SPACE, 20, 1, **how), 3, seconds_of, seeds=2)
    for cut in range(len(events) + 1):
        journal = Journal.open(None, {}, False, False)
        journal.events.extend(events[:cut])
        controller = Controller(make_method(method, SPACE, 20, 1, **how), 2, False, journal)
        done = {(each["trial"], each["rung"], each["seed"]) for each in events[:cut] if each["event"] == "end"}
        begun = {(each["trial"], each["rung"], each["seed"]) for each in events[:cut] if each["event"] == "begin"}
        assert set(controller.interrupted) == begun - done and len(results(controller)) == len(done)


if __name__ == "__main__":  # the table of docs/search.md
    for spread in (0.25, 0.5, 0.75, 1.0):
        late, listed = beyond_the_best(spread, 30)
        print(f"spread {spread}: {np.median(late):.1%} beyond the best order; as they come {np.median(listed):.1%}")
