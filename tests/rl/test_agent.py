"""Acting and learning: how often an action is random, whose draws are whose, and the targets."""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.random import Random
from hpcdl.rl.agent import BLOCK, Epsilon, Explorer, Learner
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Sample


def test_epsilon_falls_linearly():
    epsilon = Epsilon.read("linear:first=0.9,last=0.1,steps=8")
    assert [epsilon(step) for step in (0, 4, 8, 100)] == pytest.approx([0.9, 0.5, 0.1, 0.1])
    assert [Epsilon.read("0.3")(step) for step in (0, 50)] == [0.3, 0.3]


@pytest.mark.parametrize("text", ["2", "-0.1", "nan", "cosine", "linear:steps=0", "linear:last=1.5", "linear:to=0"])
def test_epsilons_that_are_none(text):
    with pytest.raises(UsageError):
        Epsilon.read(text)


def test_draws_do_not_depend_on_how_copies_are_divided():
    whole, part = Explorer(Random(3), 0, 5, 4), Explorer(Random(3), 2, 2, 4)
    for step in (0, 1, BLOCK - 1, BLOCK, 2):  # also back: a run is gone on with anywhere
        for all_of_them, some in zip(whole.draw(step), part.draw(step), strict=True):
            np.testing.assert_array_equal(all_of_them[2:4], some)
    chances = np.array([whole.draw(step)[0] for step in range(BLOCK)])
    assert len(np.unique(chances)) == chances.size


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("targeted", [True, False])
def test_targets(double, targeted):
    network = QNetwork((2,), 3, "mlp:4,dueling", "float64")
    w, target = (network.initialize(Random(seed)) for seed in (0, 1))
    random = np.random.default_rng(0)
    after, returns = random.standard_normal((50, 2)), random.standard_normal(50)
    discounts = np.where(random.random(50) < 0.3, 0, 0.9)
    nothing = np.zeros(50)
    sample = Sample(nothing, nothing, after, nothing, returns, discounts, after, nothing)
    found = Learner(network, target if targeted else None, double).targets(w, sample)
    valued = network.values(target if targeted else w, after)
    chosen = network.values(w, after) if double else valued
    expected = [r + d * v[c.argmax()] for r, d, v, c in zip(returns, discounts, valued, chosen, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    if double and targeted:
        assert (chosen.argmax(axis=1) != valued.argmax(axis=1)).any()
