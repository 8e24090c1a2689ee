"""Samplers of Optuna, through ask and tell."""

import math

import pytest
from searching import one_after_another

from hpcdl.errors import UsageError
from hpcdl.search.methods import make_method
from hpcdl.search.methods.random import RandomSearch
from hpcdl.search.space import Space

optuna = pytest.importorskip("optuna")

SPACE = Space.read(["momentum:beta=0.8..0.99 if optimizer=momentum", "optimizer=adam|momentum", "n=int:2..300:log"])


def make(text, trials, space=SPACE, seed=0):
    return make_method(text, space, trials, seed, least=1, most=1, eta=3, points=1)


def test_conditions_and_bounds():
    def loss(task):
        return abs(math.log(task.values["n"] / 30)) + (task.values["optimizer"] == "adam")

    tasks = one_after_another(make("tpe", 60), loss)
    assert [task.trial for task in tasks] == list(range(60))
    for task in tasks:
        values = task.values
        assert ("momentum:beta" in values) == (values["optimizer"] == "momentum")
        assert 0.8 <= values.get("momentum:beta", 0.9) <= 0.99
        assert type(values["n"]) is int and 2 <= values["n"] <= 300
    assert list(next(task for task in tasks if len(task.values) == 3).values) == SPACE.names


def test_tpe_learns_from_what_it_is_told():
    """Of 80 trials the mean loss of the last 20 is half that of random search's, at most."""
    space = Space.read(["x=-5..5", "y=log:0.001..10"])

    def loss(task):
        return (task.values["x"] - 2) ** 2 + (math.log10(task.values["y"]) + 1) ** 2

    methods = make("tpe", 80, space), RandomSearch(space, 80, 0)
    tpe, random = (sum(map(loss, one_after_another(method, loss)[-20:])) for method in methods)
    assert tpe < random / 2


def test_many_in_flight_are_not_all_the_same():
    method = make("tpe", 60)
    for _ in range(20):
        task = method.ask()
        method.tell(task, task.values["n"])
    asked = [method.ask() for _ in range(10)]
    assert len({repr(task.values) for task in asked}) == 10


def test_failures_are_no_losses():
    method = make("tpe", 30)
    one_after_another(method, lambda task: None if task.trial % 3 == 0 else 1.0)
    states = [trial.state.name for trial in method.study.trials]
    assert states == ["FAIL" if i % 3 == 0 else "COMPLETE" for i in range(30)]


def test_a_sampler_that_has_proposed_all():
    method = make("optuna:bruteforce", 100, Space.read(["a=x|y", "n=int:1..3"]))
    assert len({tuple(task.values.values()) for task in one_after_another(method, lambda task: 1.0)}) == 6


@pytest.mark.parametrize("name", ["tpe", "TPESampler"])
def test_names(name):
    assert isinstance(make(f"optuna:{name}", 3).study.sampler, optuna.samplers.TPESampler)


@pytest.mark.parametrize(
    "text, said",
    [
        ("optuna:TPSampler", "did you mean 'TPESampler'?"),
        ("optuna", "unknown sampler of Optuna ''"),
        ("optuna:GridSampler", "known: BruteForceSampler"),
        ("optuna:tpe,width=3", "there is no setting 'width'"),
        ("optuna:tpe,width", "a setting is written NAME=VALUE"),
        ("optuna:nsgaii,population_size=1", "population_size"),
        pytest.param(
            "optuna:BruteForceSampler",
            "does not work here: FloatDistribution.step",
            marks=pytest.mark.skipif(optuna.__version__ < "5", reason="older ones wait for the second trial"),
        ),
    ],
)
def test_what_is_refused_before_the_first_trial(text, said):
    with pytest.raises(UsageError) as raised:
        make(text, 3)
    assert said in str(raised.value) and "\n" not in str(raised.value)
