"""Muon: Newton-Schulz against NumPy, the polar factor and PyTorch; matrices and the rest; what is refused."""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.layout import INPUTS_FIRST, OUTPUTS_FIRST, Layout, Tensor
from hpcdl.optim import make_optimizer, matrix_work, refuse_slices
from hpcdl.optim.muon import EPS, newton_schulz

STEPS, SCALE, RATE, DECAY = 6, 0.25, 0.03, 0.1
LAYOUT = Layout(
    [
        Tensor("embedding", (7, 4), 0, "a"),
        Tensor("one", (4, 6), 28, "b", INPUTS_FIRST),
        Tensor("bias", (6,), 52, "b"),
        Tensor("three", (6, 3, 5), 58, "c", INPUTS_FIRST),
        Tensor("filters", (9, 2, 3, 3), 148, "d", OUTPUTS_FIRST),
        Tensor("head", (4, 2), 310, "e"),
    ],
    "float64",
)


def quintic(u, steps=5):
    """X of the paper, written out for a matrix in any orientation."""
    x = u / max(np.sqrt((u * u).sum()), EPS)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon(w, means, scale="shape", beta=0.95, steps=5):
    """Yield W (outputs, inputs) after each step of the paper."""
    outputs, inputs = w.shape
    f = {"shape": max(1, outputs / inputs) ** 0.5, "rms": 0.2 * max(outputs, inputs) ** 0.5}[scale]
    v = np.zeros_like(w)
    for g in means:
        v = beta * v + (1 - beta) * g
        w = (1 - RATE * DECAY) * w - RATE * f * quintic((1 - beta) * g + beta * v, steps)
        yield w


def workspace(m, n, dtype="float64"):
    return np.full(2 * m * n + 2 * min(m, n) ** 2, np.nan, dtype)


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 40), (40, 3), (17, 16)], ids=str)
def test_newton_schulz(shape):
    u = 1e3 * np.random.default_rng(0).standard_normal(shape)
    for matrix in (u.copy(), np.asfortranarray(u), np.repeat(u, 2, axis=1)[:, ::2]):
        newton_schulz(matrix, workspace(*shape))
        np.testing.assert_allclose(matrix, quintic(u), rtol=1e-12, atol=1e-12)
    p, s, q = np.linalg.svd(matrix, full_matrices=False)
    polar, (left, _, right) = p @ q, np.linalg.svd(u, full_matrices=False)
    np.testing.assert_allclose(polar, left @ right, atol=1e-9)  # the singular vectors stay, and singular values
    assert s.min() > 0.6 and s.max() < 1.25  # come near to 1


def test_zeros_stay_and_nothing_is_hidden():
    for bad, expected in ((0.0, 0.0), (1e-9, 1e-9), (np.nan, np.nan), (np.inf, np.nan)):
        matrix = np.zeros((2, 3))
        matrix[1, 1] = bad
        with np.errstate(invalid="ignore"):
            newton_schulz(matrix, workspace(2, 3))
        assert (matrix[1, 1] != 0) == (bad != 0) and np.isnan(matrix[1, 1]) == np.isnan(expected)


@pytest.mark.parametrize("settings", [{}, {"scale": "rms"}, {"beta": 0.0, "steps": 2}], ids=str)
def test_matrices_by_the_paper_and_the_rest_by_adamw(settings):
    random = np.random.default_rng(1)
    start, gradients = random.standard_normal(LAYOUT.size), random.standard_normal((STEPS, LAYOUT.size))
    spec = "muon:" + ",".join(f"{key}={value}" for key, value in settings.items())
    how = LAYOUT.size, "float64", lambda step: RATE, DECAY
    optimizer, w = make_optimizer(spec, *how, weights=LAYOUT.hidden), start.copy()
    rest = make_optimizer("adamw:beta2=0.95", *how[:2], lambda step: RATE * optimizer.adam_rate, DECAY)
    assert optimizer.adam_rate == (1.0 if settings.get("scale") == "rms" else 0.015)
    others = start.copy()
    for g in gradients:
        optimizer.update(w, g, SCALE)
        rest.update(others, g, SCALE)
    for tensor in LAYOUT.tensors.values():
        found, before = tensor.view(w), tensor.view(start)
        if not tensor.hidden:
            assert np.array_equal(found, tensor.view(others))
            continue
        means = SCALE * gradients[:, tensor.slice].reshape(STEPS, *tensor.shape)
        if tensor.name == "filters":
            wanted = [*muon(before.reshape(9, 18), means.reshape(STEPS, 9, 18), **settings)][-1].reshape(tensor.shape)
        elif tensor.name == "three":
            parts = [[*muon(before[:, k].T, means[:, :, k].swapaxes(1, 2), **settings)][-1].T for k in range(3)]
            wanted = np.stack(parts, axis=1)
        else:
            wanted = [*muon(before.T, means.swapaxes(1, 2), **settings)][-1].T
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-10)
        assert not tensor.view(optimizer.state["second_moment"]).any()


def test_the_weights_of_models():
    """The rule is the layer's: hidden weights but no embedding, output layer, gain or bias."""
    text = {"text": True}
    gpt = make_model("gpt:layers=1,width=8,heads=2,context=4,head=own", (4,), 7, "float32", **text).layout
    names = ["block1.attention.qkv.weight", "block1.attention.out.weight", "block1.mlp.up.weight"]
    assert [tensor.name for tensor in gpt.hidden] == [*names, "block1.mlp.down.weight"]
    assert [tensor.matrix_shape for tensor in gpt.hidden] == [(3, 8, 8), (1, 8, 8), (1, 32, 8), (1, 8, 32)]
    mlp = make_model("mlp:5,4", (6,), 3, "float32").layout
    assert [tensor.name for tensor in mlp.hidden] == ["dense1.weight", "dense2.weight"]
    assert make_model("softmax", (6,), 3, "float32").layout.hidden == []


def test_forecast_of_memory_and_flops():
    """2 m n + 2 m^2 elements for a matrix, beside the largest tensor; 5 iterations of 2 (2 m^2 n + m^3) flops."""
    optimizer = make_optimizer("muon", LAYOUT.size, "float64", lambda step: RATE, weights=LAYOUT.hidden)
    flops = [2 * (2 * m * m * n + m**3) for m, n in ((4, 6), *3 * [(5, 6)], (9, 18))]
    assert matrix_work("muon:steps=2", LAYOUT.hidden) == (optimizer.workspace.size, 2 * sum(flops))
    assert optimizer.workspace.size == 9 * 18 + 2 * 9 * 18 + 2 * 9 * 9 and matrix_work("adamw", LAYOUT.hidden) == (0, 0)


@pytest.mark.parametrize(
    "settings, weights, words",
    [
        ("beta=1", LAYOUT.hidden, "Muon's beta is at least 0 and less than 1, not 1.0"),
        ("steps=0", LAYOUT.hidden, "Muon's steps are Newton-Schulz iterations, 1 to 100, not 0"),
        ("scale=jordan", LAYOUT.hidden, "unknown scale of muon 'jordan'; known: rms, shape"),
        ("adam_rate=-1", LAYOUT.hidden, "adam_rate is a positive factor, or 0 for that of the scale, not -1.0"),
        ("beta2=1", LAYOUT.hidden, "beta2 is at least 0 and less than 1"),
        ("", [], "muon updates the weights of hidden layers, and there are none here; take adamw"),
    ],
)
def test_what_is_refused(settings, weights, words):
    with pytest.raises(UsageError, match=words):
        make_optimizer(f"muon:{settings}", LAYOUT.size, "float64", lambda step: RATE, weights=weights)


def test_slices_are_refused():
    with pytest.raises(UsageError, match="--optimizer muon:steps=3 updates whole matrices, and a server has a slice; "):
        refuse_slices("muon:steps=3", "a server has a slice")
    refuse_slices("adamw", "a server has a slice")
