"""The multi-layer perceptron against PyTorch, and softmax regression as one without hidden layers."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.errors import UsageError
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


@pytest.mark.parametrize("outputs", [(), (1,), (3,)])
@pytest.mark.parametrize("loss", ["squared", "huber:delta=0.3"])
@pytest.mark.parametrize("spec", ["linear", "mlp:6,activation=tanh"])
def test_regression_with_several_outputs(spec, loss, outputs):
    """Loss, gradient and score from the definition; several outputs share the hidden layers."""
    random = np.random.default_rng(2)
    model = make_model(spec, (4,), 0, "float64", outputs=outputs, loss=loss)
    w = model.initialize(Random(1)) + 0.1 * random.standard_normal(model.size)
    batch = SimpleNamespace(x=random.standard_normal((7, 4)), y=random.standard_normal((7, *outputs)))
    z = model.predict(w, batch.x)
    assert z.shape == batch.y.shape

    def loss_at(w):
        e = abs(model.predict(w, batch.x) - batch.y)
        each = e**2 / 2 if loss == "squared" else np.where(e <= 0.3, e**2 / 2, 0.3 * (e - 0.15))
        return each.sum()

    gradient = np.zeros_like(w)
    assert model.loss_and_gradient(w, batch, gradient) == pytest.approx(loss_at(w), rel=1e-12)
    steps = 1e-6 * np.eye(len(w))
    numeric = [(loss_at(w + step) - loss_at(w - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-7)
    assert model.evaluate(w, batch) == pytest.approx((loss_at(w), ((z - batch.y) ** 2).sum()), rel=1e-12)
    with pytest.raises(UsageError, match="y is a float64 array of shape"):
        model.evaluate(w, SimpleNamespace(x=batch.x, y=np.zeros((7, 2))))


@pytest.mark.parametrize(
    ("spec", "classes", "how", "words"),
    [
        ("mlp", 0, {"loss": "hubert"}, r"unknown loss 'hubert' \(did you mean 'huber'\?\)"),
        ("mlp", 0, {"loss": "huber:delta=0"}, "delta must be a number greater than 0"),
        ("mlp", 0, {"loss": "huber:delta=nan"}, "delta must be a number greater than 0"),
        ("mlp", 3, {"loss": "huber"}, "loss 'huber' is for regression; the data has 3 classes"),
        ("mlp", 3, {"text": True}, "'mlp' takes quantities, and the data are a text, whose tokens are names; take gpt"),
        ("softmax", 3, {"text": True}, "take gpt"),
    ],
)
def test_what_makes_no_sense(spec, classes, how, words):
    with pytest.raises(UsageError, match=words):
        make_model(spec, (4,), classes, **how)
