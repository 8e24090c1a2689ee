"""Methods by name: which there are, what is refused, and that each does the same again when told the same."""

import importlib.util
import random
import sys

import pytest

from hpcdl.errors import UsageError
from hpcdl.search.methods import make_method
from hpcdl.search.space import Space

LINES = ["lr=log:0.001..0.5", "optimizer=adam|momentum", "momentum:beta=0.8..0.99 if optimizer=momentum"]
SPACE = Space.read([*LINES, "batch-size=int:16..512:log"])
HAS_OPTUNA = importlib.util.find_spec("optuna") is not None
NAMES = ["grid", "random", "random:sobol", "asha", "hyperband", "pbt", "pbt:interval=2,population=5"]
OPTUNAS = ["tpe", "optuna:RandomSampler", "optuna:TPESampler,n_startup_trials=2,multivariate=True", "optuna:nsgaii"]


def make(text, trials=12, seed=0, space=SPACE, **more):
    settings = {"least": 1, "most": 9, "eta": 3, "points": 3} | more
    return make_method(text, space, trials, seed, **settings)


def interleaved(method, seed, failing):
    """Asks and tells in a random order, on as many workers as like; one event each: a task, or what it was told."""
    rng = random.Random(seed)
    events, out = [], []
    for _ in range(10_000):
        if not out and method.over:
            break
        task = method.ask() if rng.random() < 0.6 else None
        if task:
            out.append(task)
            events.append(task)
        elif out:
            done = out.pop(rng.randrange(len(out)))
            loss = None if rng.random() < failing else rng.random()
            events.append((done, loss))
            method.tell(done, loss)
    assert method.over and not out
    assert method.ask() is None
    return events


def replayed(method, events):
    """The same asks and tells, and whether the tasks are the same; what was asked for in vain need not be."""
    for event in events:
        if len(event) == 2:
            method.tell(*event)
        else:
            assert method.ask() == event
    assert method.over


@pytest.mark.parametrize("failing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("text", [*NAMES, *(OPTUNAS if HAS_OPTUNA else [])])
def test_the_same_asks_and_tells_give_the_same_tasks(text, failing):
    for seed in range(2):
        events = interleaved(make(text, seed=seed), seed, failing)
        replayed(make(text, seed=seed), events)
        tasks = [event for event in events if len(event) > 2]
        assert len({(task.trial, task.rung) for task in tasks}) == len(tasks)
        trials = sorted({task.trial for task in tasks})
        assert trials == list(range(len(trials)))
        for task in tasks:
            assert list(SPACE.in_order(task.values)) == list(task.values)
            assert SPACE.values(SPACE.unit(task.values)).keys() == task.values.keys()
            if text not in ("asha", "hyperband") and not text.startswith("pbt"):
                assert (task.rung, task.amount) == (0, 0.0)
            assert (task.parent is None) or text.startswith("pbt")


@pytest.mark.parametrize("text", [*NAMES[1:], *(OPTUNAS if HAS_OPTUNA else [])])
def test_another_seed_is_another_search(text):
    one, other = make(text, seed=0), make(text, seed=1)
    assert one.ask() != other.ask()


def test_numbers_of_trials():
    assert len([event for event in interleaved(make("pbt", 0), 0, 1.0) if len(event) > 2]) == 10
    for text in ("random", "asha", *(["tpe"] if HAS_OPTUNA else [])):
        with pytest.raises(UsageError, match=f"--method {text} needs --trials"):
            make(text, 0)


@pytest.mark.parametrize(
    "text, settings, said",
    [
        ("", {}, "unknown method ''"),
        ("grid:3", {}, "there is no method 'grid:3'; known: grid, random"),
        ("random:halton", {}, "there is no method 'random:halton'"),
        ("tpe:3", {}, "there is no method 'tpe:3'"),
        ("asha:3", {}, "--method asha has no settings"),
        ("pbt:eta=3", {}, "method 'pbt' has no setting 'eta'"),
        ("pbt:population=x", {}, "population should be of type int"),
        ("pbt:population=1", {}, "a population of 1 has"),
        ("pbt:interval=-1", {}, "the interval, -1 epochs"),
        ("pbt:interval=nan", {}, "the interval, nan epochs"),
        ("pbt:interval=10", {}, "the interval, 10 epochs, should be over 0 and at most 9"),
        ("asha", {"eta": 1}, "--eta should be 2 or more"),
        ("asha", {"most": 0}, "needs the epochs of a whole trial"),
        ("hyperband", {"most": float("inf")}, "needs the epochs of a whole trial"),
        ("asha", {"least": 0}, "the shortest piece of a trial, 0 epochs"),
        ("pbt", {"least": 10}, "the shortest piece of a trial, 10 epochs, should be over 0 and at most 9"),
        ("grid", {"points": 0}, "at least 1 point"),
        ("random", {"trials": -1}, "--trials should be 0 or more"),
    ],
)
def test_refusals(text, settings, said):
    with pytest.raises(UsageError) as raised:
        make(text, **settings)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["tpe", "optuna:RandomSampler"])
def test_without_optuna(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r'pip install "hpcdl\[search\]"'):
        make(text)
