"""The network of action values: its gradient, the dueling head, pixels, and what is refused."""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.random import Random
from hpcdl.rl.q_network import QBatch, QNetwork

SPECS = ["mlp:8,6", "mlp:8,6,dueling", "mlp:6,dueling,activation=tanh"]


def batch_of(network, rows, seed=0):
    random = np.random.default_rng(seed)
    x, actions = random.standard_normal((rows, *network.shape)), random.integers(0, network.actions, rows)
    return QBatch(x, actions, 2 * random.standard_normal(rows), random.uniform(0.2, 1, rows), rows)


@pytest.mark.parametrize("loss", ["huber:delta=0.7", "squared"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_gradient_is_that_of_the_loss(spec, loss):
    network = QNetwork((3,), 4, spec, "float64", loss=loss)
    w, batch = network.initialize(Random(1)), batch_of(network, 7)
    gradient = np.full(network.size, 2.0)
    total = network.loss_and_gradient(w, batch, gradient)
    gradient -= 2  # it is added to what is there
    q = network.values(w, batch.x)[np.arange(7), batch.actions]
    np.testing.assert_allclose(batch.errors, np.abs(q - batch.targets), rtol=1e-13)
    delta = 0.7 if loss.startswith("huber") else np.inf
    size = batch.errors
    each = np.where(size <= delta, size**2 / 2, delta * (size - delta / 2) if delta < np.inf else 0)
    assert total == pytest.approx((batch.weights * each).sum(), rel=1e-12)
    scratch, h = np.zeros(network.size), 1e-6
    for i in np.random.default_rng(2).choice(network.size, 25, replace=False):
        step = np.eye(1, network.size, i)[0] * h
        up, down = (network.loss_and_gradient(w + side * step, batch, scratch) for side in (1, -1))
        assert gradient[i] == pytest.approx((up - down) / (2 * h), abs=1e-6)


def test_a_dueling_head_adds_value_and_advantage():
    network = QNetwork((3,), 4, "mlp:8,6,dueling", "float64")
    w = network.initialize(Random(1)) + 0.1
    x = np.random.default_rng(0).standard_normal((5, 3))
    t = network.layout.views(w)
    hidden = np.maximum(x @ t["dense1.weight"] + t["dense1.bias"], 0)
    hidden = np.maximum(hidden @ t["dense2.weight"] + t["dense2.bias"], 0)
    value = hidden[:, :6] @ t["dueling.value"] + t["dueling.value_bias"]
    advantage = hidden[:, 6:] @ t["dueling.advantage"] + t["dueling.advantage_bias"]
    assert hidden.shape == (5, 12)  # a stream of 6 units each
    wanted = value + advantage - advantage.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(network.values(w, x), wanted, rtol=1e-12)


def test_no_rows_and_many():
    network = QNetwork((3,), 2, "mlp:4,dueling", "float64")
    w, gradient = network.initialize(Random(0)), np.zeros(network.size)
    assert network.loss_and_gradient(w, batch_of(network, 0), gradient) == 0 and not gradient.any()
    assert network.values(w, np.zeros((0, 3))).shape == (0, 2)
    x = np.random.default_rng(0).standard_normal((2500, 3))
    np.testing.assert_allclose(network.values(w, x)[[0, 1024, 2499]], network.values(w, x[[0, 1024, 2499]]))


def test_pixels_are_seen_from_0_to_1():
    network = QNetwork((1, 2, 2), 2, "mlp:4", "float32")
    w, pixels = network.initialize(Random(0)), np.array([[[[0, 51], [102, 255]]]], np.uint8)
    expected = network.values(w, np.array([[[[0, 0.2], [0.4, 1]]]], np.float32))
    np.testing.assert_allclose(network.values(w, pixels), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("softmax", "mlp:128,128"),
        ("mlp:0,dueling", "positive whole number"),
        ("mlp:8,duelling", "duelling"),
        ("mlp:8,activation=nothing,dueling", "activation"),
        ("gpt:layers=2", "mlp:128,128"),
    ],
)
def test_other_models_are_refused(spec, said):
    with pytest.raises(UsageError, match=said):
        QNetwork((3,), 2, spec)


def test_a_module_of_pytorch():
    nn = pytest.importorskip("torch.nn")
    from hpcdl.rl.torch_values import TorchValues
    from hpcdl.torch.model import TorchModel

    ours = QNetwork((3,), 4, "mlp:8", "float64", loss="huber:delta=0.7")
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    theirs = TorchValues(TorchModel(module, features=(3,), classes=4, dtype="float64"), (3,), 4, 0.7)
    w = ours.initialize(Random(0)) + 0.1
    t = ours.layout.views(w)
    same = np.concatenate([each.ravel() for n in (1, 2) for each in (t[f"dense{n}.weight"].T, t[f"dense{n}.bias"])])
    one, other = batch_of(ours, 7), batch_of(ours, 7)
    mine, gradient = np.zeros(ours.size), np.zeros(ours.size)
    loss = ours.loss_and_gradient(w, one, mine)
    np.testing.assert_allclose(theirs.values(same, other.x), ours.values(w, one.x), rtol=1e-12)
    assert theirs.loss_and_gradient(same, other, gradient) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(other.errors, one.errors, rtol=1e-12)
    assert np.linalg.norm(gradient) == pytest.approx(np.linalg.norm(mine), rel=1e-12)
