"""Stragglers strike whom and when they are told to, and change no number."""

from types import SimpleNamespace

import numpy as np
import pytest
from own_time import set_own_time

from hpcdl.errors import UsageError
from hpcdl.faults import straggler
from hpcdl.faults.straggler import parse, with_stragglers
from hpcdl.models.model import unwrapped
from hpcdl.runs import Options


def test_who_is_slow():
    workers = range(1, 4)
    assert parse("", 1, workers) == (1, 0)
    assert parse("2:3", 2, workers) == (3, 1)
    assert parse("2:3", 1, workers) == (1, 0)
    assert parse("random:0.1:4", 1, workers) == (4, 0.1)
    for wrong in ("4:2", "0:2", "-1:2", "1", "1:0.5", "random:2:3", "random:0.1", "x:2", "1:x"):
        with pytest.raises(UsageError):
            parse(wrong, 1, workers)


@pytest.fixture
def slept(monkeypatch):
    """A clock that only sleeping and computing move."""
    clock = SimpleNamespace(now=0.0, slept=[])

    def sleep(seconds):
        clock.slept.append(round(seconds, 9))
        clock.now += seconds

    set_own_time(monkeypatch, straggler, perf_counter=lambda: clock.now, sleep=sleep)
    return clock


class Model:
    layout = "the model's own"

    def __init__(self, clock):
        self.clock = clock

    def loss_and_gradient(self, parameters, batch, gradient, on_ready=None):
        self.clock.now += 0.010
        gradient += 1
        return 5.0


def test_how_long(slept):
    gradient = np.zeros(2)
    model = with_stragglers(Model(slept), Options(straggler="1:3"), 1, range(2))
    assert model.layout == "the model's own"
    assert model.loss_and_gradient(None, None, gradient) == 5.0 and (gradient == 1).all()
    assert slept.slept == [0.020]
    slept.slept.clear()
    with_stragglers(Model(slept), Options(pretend_compute=25), 0, range(2)).loss_and_gradient(None, None, gradient)
    with_stragglers(Model(slept), Options(pretend_compute=25, straggler="0:2"), 0, range(2)).loss_and_gradient(
        None, None, gradient
    )
    assert slept.slept == [0.015, 0.040]
    model = Model(slept)
    assert with_stragglers(model, Options(), 0, range(2)) is model
    assert unwrapped(with_stragglers(model, Options(pretend_compute=1), 0, range(2))) is model is unwrapped(model)


def test_random_ones_strike_as_often_as_they_should_and_again_the_same(slept):
    def strikes(rank):
        slept.slept.clear()
        model = with_stragglers(Model(slept), Options(straggler="random:0.25:4"), rank, range(2))
        for _ in range(400):
            model.loss_and_gradient(None, None, np.zeros(1))
        return [seconds > 0.001 for seconds in slept.slept]

    first = strikes(0)
    assert 70 < sum(first) < 130
    assert first == strikes(0) != strikes(1)


def test_what_is_done_between_the_layers_is_not_slowed_and_comes_as_late_as_they_are(slept):
    """A third of the time is the forward pass; telling that a slice is ready is not slowed."""

    class Layers(Model):
        def loss_and_gradient(self, parameters, batch, gradient, on_ready=None):
            for part in (slice(2, 4), slice(0, 2)):
                self.clock.now += 0.003
                on_ready(part)
            return 1.0

    told = []

    def on_ready(part):
        told.append(round(slept.now, 9))
        slept.now += 0.5

    with_stragglers(Layers(slept), Options(pretend_compute=30), 0, range(2)).loss_and_gradient(
        None, None, np.zeros(4), on_ready
    )
    assert told == [0.020, 0.530] and round(slept.now, 9) == 1.030
    told.clear()
    slept.now = 0.0
    options = Options(straggler="0:2")
    with_stragglers(Layers(slept), options, 0, range(2)).loss_and_gradient(None, None, np.zeros(4), on_ready)
    assert told == [0.006, 0.512] and round(slept.now, 9) == 1.012
