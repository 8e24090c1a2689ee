"""A gradient in parts is the gradient; what goes on meanwhile gets its moments."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.data import Batch
from hpcdl.errors import AgreedError
from hpcdl.faults.straggler import with_stragglers
from hpcdl.models import make_model
from hpcdl.models.model import unwrapped
from hpcdl.random import Random
from hpcdl.runs import Accumulated, Options, Run
from hpcdl.runs.accumulated import NOTHING, accumulated, accumulation
from hpcdl.strategies import all_reduce


def batch(rows):
    random = np.random.default_rng(3)
    return Batch(random.standard_normal((rows, 4)), random.integers(0, 3, rows), rows, 0, 0, np.arange(rows))


@pytest.mark.parametrize("rows", [0, 1, 7, 12])
@pytest.mark.parametrize("parts", [2, 3, 9])
def test_the_sum_over_the_parts(rows, parts):
    model = make_model("mlp:5,4", (4,), 3, "float64")
    w = model.initialize(Random(0))
    whole, found, few = np.ones_like(w), np.ones_like(w), batch(rows)
    loss = model.loss_and_gradient(w, few, whole)
    ready, sizes = [], []

    class Counted:
        def __getattr__(self, name):
            return getattr(model, name)

        def loss_and_gradient(self, parameters, part, gradient, on_ready=None):
            sizes.append(len(part.y))
            return model.loss_and_gradient(parameters, part, gradient, on_ready)

    assert Accumulated(Counted(), parts).loss_and_gradient(w, few, found, ready.append) == pytest.approx(loss)
    assert np.allclose(found, whole, rtol=1e-12, atol=1e-13)
    assert len(sizes) == parts and sum(sizes) == rows and max(sizes) - min(sizes) <= 1
    final = [part for part in ready if part != NOTHING]
    assert sorted(i for part in final for i in range(part.start, part.stop)) == list(range(w.size))
    assert ready.index(final[0]) == len(ready) - len(final) == (parts - 1) * len(final)  # moments, then what is final


def test_without_anybody_to_tell(monkeypatch):
    model = make_model("softmax", (4,), 3, "float64")
    told = []
    monkeypatch.setattr(type(model), "loss_and_gradient", lambda *arguments: told.append(arguments[-1]) or 1.0)
    assert Accumulated(model, 3).loss_and_gradient(None, batch(5), None) == 3.0
    assert told == [None, None, None]


def test_what_wraps_a_model_comes_off():
    model = make_model("softmax", (4,), 3, "float64")
    assert accumulated(model, 1) is model and accumulation(model) == 1
    both = accumulated(with_stragglers(model, Options(pretend_compute=1), 0, range(1)), 4)
    assert accumulation(both) == 4 and both.layout is model.layout and unwrapped(both) is model


def test_a_model_that_does_not_accumulate_as_the_options_say_is_refused(world, data):
    comm, model = Communicator(world, "ring"), make_model("mlp:3", data.features, data.classes, "float64")
    options = Options(accumulate=4, model="mlp:3", dtype="float64", epochs=1, progress="none")
    words = r"accumulate=4 .*hpcdl\.runs\.Accumulated\(model, 4\)"
    with pytest.raises(AgreedError, match=words), Run(comm, options) as run:
        all_reduce.train(comm, model, data, run.make_optimizer(model, data), run)
    comm.free()
