"""The multi-layer perceptron against PyTorch, and softmax regression as one without hidden layers."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.models import make_model
from hpcdl.random import Random


def test_softmax_regression_has_one_layer(make_batch, reference):
    model = make_model("softmax", (4, 3), 5, "float64")
    assert [tensor.shape for tensor in model.layout.tensors.values()] == [(12, 5), (5,)]
    batch = make_batch(10, 12, 5, "float64")
    parameters, gradient = model.initialize(Random(0)), np.zeros(model.size)
    loss = model.loss_and_gradient(parameters, batch, gradient)
    assert loss == pytest.approx(
        reference.loss_and_gradient("softmax", "none", model.layout.views(parameters), batch.x, batch.y)[0], rel=1e-12
    )


def test_default_is_one_hidden_layer_of_128_relu_units():
    model = make_model("mlp", (8, 8), 10)
    assert [tensor.shape for tensor in model.layout.tensors.values()] == [(64, 128), (128,), (128, 10), (10,)]
    assert model.layers[0].activation.__name__ == "Relu"
    assert model.dtype == "float32" and model.size == 64 * 128 + 128 + 128 * 10 + 10


def test_learns_what_a_linear_model_cannot():
    """Exclusive or, by plain gradient descent; softmax regression stays at log 2 for each example."""
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], "float64")
    batch = SimpleNamespace(x=x, y=np.array([0, 1, 1, 0]))
    losses = {}
    for spec in ("softmax", "mlp:16"):
        model = make_model(spec, (2,), 2, "float64")
        parameters = model.initialize(Random(0))
        for _ in range(500):
            gradient = np.zeros(model.size)
            losses[spec] = model.loss_and_gradient(parameters, batch, gradient) / 4
            parameters -= 0.5 * gradient / 4
    assert losses["softmax"] == pytest.approx(np.log(2), rel=1e-3)
    assert losses["mlp:16"] < 0.05


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_against_torch(activation, make_batch):
    torch = pytest.importorskip("torch")
    model = make_model(f"mlp:6,4,activation={activation}", (5,), 3, "float64")
    parameters, gradient = model.initialize(Random(0)), np.zeros(model.size)
    batch = make_batch(11, 5, 3, "float64")
    loss = model.loss_and_gradient(parameters, batch, gradient)
    tensors = {name: torch.tensor(view, requires_grad=True) for name, view in model.layout.views(parameters).items()}
    y = torch.tensor(batch.x)
    functions = {"relu": torch.relu, "tanh": torch.tanh, "gelu": torch.nn.GELU(approximate="tanh")}
    for i in (1, 2, 3):
        y = y @ tensors[f"dense{i}.weight"] + tensors[f"dense{i}.bias"]
        y = functions[activation](y) if i < 3 else y
    total = torch.nn.functional.cross_entropy(y, torch.tensor(batch.y), reduction="sum")
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-12)
    for name, view in model.layout.views(gradient).items():
        np.testing.assert_allclose(view, tensors[name].grad.numpy(), rtol=1e-10, atol=1e-12)
