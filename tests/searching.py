"""A method for tests, which asks for so many trials, and trials of several rungs; and what a journal tells."""

import collections
import json

import numpy as np

from hpcdl.search.tasks import SearchTask


class Rungs:
    """Trials with x drawn from the seed; the best half of each `wave` goes on, to the last rung.
    It waits where it must be told before it knows more, as methods with rungs do. rungs 1: it never waits."""

    planned = False

    def __init__(self, trials, rungs=1, wave=4, seed=0):
        self.random, self.left, self.rungs, self.wave = np.random.default_rng(seed), trials, rungs, wave
        self.asked, self.open, self.ready, self.losses = 0, 0, collections.deque(), collections.defaultdict(dict)
        self.told = []

    def ask(self):
        if self.ready:
            self.open += 1
            return self.ready.popleft()
        if self.left == 0 or (self.rungs > 1 and self.asked % self.wave == 0 and self.open):
            return None
        self.left, self.asked, self.open = self.left - 1, self.asked + 1, self.open + 1
        return SearchTask(self.asked - 1, {"x": float(self.random.random()), "kind": "a"}, 0, self.amount(0))

    def amount(self, rung):
        return float(2**rung) if self.rungs > 1 else 0.0

    def tell(self, task, loss):
        self.open -= 1
        self.told.append((task.trial, task.rung, loss))
        if task.rung + 1 == self.rungs:
            return
        found = self.losses[task.rung]
        found[task.trial] = float("inf") if loss is None else loss
        if len(found) == max(1, self.wave >> task.rung):  # the wave is whole
            best = sorted(found, key=lambda trial: (found[trial], trial))[: max(1, len(found) // 2)]
            for trial in best:
                self.ready.append(SearchTask(trial, {"x": 0.5, "kind": "a"}, task.rung + 1, self.amount(task.rung + 1)))
            found.clear()

    @property
    def over(self):
        return self.left == 0 and self.open == 0 and not self.ready


def one_after_another(method, loss):
    """All tasks of a method, each told before the next one is asked for."""
    found = []
    while task := method.ask():
        found.append(task)
        method.tell(task, loss(task))
    assert method.over
    return found


def results(controller):
    """Those of all jobs that have ended."""
    return [result for by_seed in controller.results.values() for result in by_seed.values()]


def key(event):
    return event["trial"], event["rung"], event["seed"]


def events(path):
    """The lines of a journal, each of which is whole, and what must be true of any: what ends has begun, once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    begun, ended = set(), set()
    for event in found:
        if event["event"] == "begin":
            assert key(event) not in begun, "begun twice"
            begun.add(key(event))
        elif event["event"] == "again":
            assert key(event) in begun - ended, "again what was not under way"
        elif event["event"] == "end":
            assert key(event) in begun - ended, "ended twice, or without a begin"
            ended.add(key(event))
    return found


def ends(found):
    """Of each job the score with which it has ended."""
    return {key(event): event["score"] for event in found if event["event"] == "end"}
