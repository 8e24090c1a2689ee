"""Every model: its gradient against finite differences and a plain reference; the properties that strategies need."""

import itertools
import tracemalloc
from types import SimpleNamespace

import numpy as np
import plain_models as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.random import Random

FEATURES = 5
DEEPSEEK = "latent=3,query-latent=2,head-width=3,units=2,experts=2,shared=2,dense=1,dense-units=3,balance=0,z=0"
CASES = {  # spec -> (classes, the reference's loss, its activation)
    "linear": (0, "squared", "none"),
    "mlp:5": (0, "squared", "relu"),
    "mlp:3,activation=tanh": (0, "squared", "tanh"),
    "logistic": (2, "logistic", "none"),
    "svm": (2, "hinge", "none"),
    "softmax": (3, "softmax", "none"),
    "mlp:4": (3, "softmax", "relu"),
    "mlp:7,4,6": (4, "softmax", "relu"),
    "mlp:4,3,activation=tanh": (2, "softmax", "tanh"),
    "mlp:4,3,activation=gelu": (2, "softmax", "gelu"),
    "gpt:layers=1,width=4,heads=2,context=5,norm=rms": (3, "gpt", None),
    "gpt:layers=1,width=4,heads=1,context=5,positions=rotary,rope-base=9": (3, "gpt", None),
    "gpt:layers=1,width=4,heads=2,context=5,feed-forward=swiglu,units=3": (3, "gpt", None),
    "gpt:layers=1,width=6,heads=6,kv-heads=2,context=5,units=3": (3, "gpt", None),
    "gpt:layers=1,width=4,heads=2,context=5,biases=no": (3, "gpt", None),
    "llama:layers=2,width=8,heads=4,kv-heads=2,context=5,units=3,rope-base=9": (3, "gpt", None),
    "gpt:layers=1,width=4,heads=2,context=5,units=3,experts=3,capacity=0.8,balance=0,z=0": (3, "gpt", None),
    "llama:layers=1,width=4,heads=2,context=5,units=3,experts=3,top=1,balance=0,z=0": (3, "gpt", None),
    "gpt:layers=1,width=5,heads=2,context=5,units=3,positions=rotary,rope-base=9,latent=3": (3, "gpt", None),
    f"llama:layers=2,width=4,heads=2,context=5,rope-base=9,{DEEPSEEK}": (3, "gpt", None),
    "gpt:layers=1,width=6,heads=2,context=7": (4, "gpt", None),
    "gpt:layers=2,width=4,heads=1,context=5,head=own": (3, "gpt", None),
}
DENSE = [spec for spec in CASES if CASES[spec][1] != "gpt"]  # test_gpt.py has a reference for the others
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}


@pytest.fixture(params=CASES)
def spec(request):
    return request.param


def batch_for(spec, rows, dtype, seed=0):
    """Return a batch for the model `spec`."""
    classes, kind, _ = CASES[spec]
    return reference.make_batch(rows, FEATURES, classes, dtype, seed, tokens=kind == "gpt")


def build(spec, dtype, seed=0):
    """Return the model and a parameter vector whose biases are not zero."""
    model = make_model(spec, (FEATURES,), CASES[spec][0], dtype)
    parameters = model.initialize(Random(seed))
    parameters += 0.1 * np.random.default_rng(seed).standard_normal(model.size).astype(dtype)
    return model, parameters


def gradient_of(model, parameters, batch):
    gradient = np.zeros_like(parameters)
    loss = model.loss_and_gradient(parameters, batch, gradient)
    return loss, gradient


def part(batch, rows):
    return SimpleNamespace(x=batch.x[rows], y=batch.y[rows])


def test_gradient_against_central_differences(spec):
    model, parameters = build(spec, "float64")
    batch = batch_for(spec, 6, "float64")
    _, gradient = gradient_of(model, parameters, batch)
    numeric, h = np.empty_like(gradient), 1e-5
    for i in range(model.size):
        losses = []
        for sign in (1, -1):
            moved = parameters.copy()
            moved[i] += sign * h
            losses.append(gradient_of(model, moved, batch)[0])
        numeric[i] = (losses[0] - losses[1]) / (2 * h)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("spec", DENSE)
def test_loss_and_gradient_against_reference(spec, rows, dtype):
    _, kind, activation = CASES[spec]
    model, parameters = build(spec, dtype)
    batch = batch_for(spec, rows, dtype)
    loss, gradient = gradient_of(model, parameters, batch)
    tensors = {name: view.astype("float64") for name, view in model.layout.views(parameters).items()}
    wanted, by_name = reference.loss_and_gradient(kind, activation, tensors, batch.x.astype("float64"), batch.y)
    assert isinstance(loss, float)
    assert loss == pytest.approx(wanted, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])
    for name, view in model.layout.views(gradient).items():
        assert view.dtype == dtype
        np.testing.assert_allclose(view, by_name[name], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=name)


def test_zero_rows(spec):
    model, parameters = build(spec, "float32")
    empty = batch_for(spec, 0, "float32")
    gradient, slices = np.full(model.size, 7, "float32"), []
    assert model.loss_and_gradient(parameters, empty, gradient, slices.append) == 0
    assert (gradient == 7).all()
    assert len(slices) == len(model.layout.layer_slices)
    assert model.evaluate(parameters, empty) == (0, 0)
    assert len(model.predict(parameters, empty.x)) == 0


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 20), cuts=st.lists(st.integers(0, 20), max_size=4), data=st.data())
def test_parts_of_a_batch_add_up(rows, cuts, data):
    spec = data.draw(st.sampled_from(list(CASES)))
    model, parameters = build(spec, "float64")
    batch = batch_for(spec, rows, "float64", seed=rows)
    whole_loss, whole = gradient_of(model, parameters, batch)
    ends = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    gradient, loss, score = np.zeros_like(whole), 0, 0
    for start, stop in itertools.pairwise(ends):
        loss += model.loss_and_gradient(parameters, part(batch, slice(start, stop)), gradient)
        score += model.evaluate(parameters, part(batch, slice(start, stop)))[1]
    assert loss == pytest.approx(whole_loss, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(gradient, whole, rtol=1e-11, atol=1e-11)
    assert score == pytest.approx(model.evaluate(parameters, batch)[1], rel=1e-12)


def test_on_ready_gives_final_slices_last_layer_first(spec):
    model, parameters = build(spec, "float64")
    batch = batch_for(spec, 6, "float64")
    gradient, seen = np.ones(model.size), []
    model.loss_and_gradient(parameters, batch, gradient, lambda part: seen.append((part, gradient[part].copy())))
    covered = np.concatenate([np.arange(model.size)[part] for part, _ in reversed(seen)])
    np.testing.assert_array_equal(covered, np.arange(model.size))
    assert [part for part, _ in reversed(seen)] == [part for _, part in model.layout.layer_slices]
    for part, values in seen:
        np.testing.assert_array_equal(values, gradient[part])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_evaluate_and_predict_agree_with_the_loss(spec, dtype):
    classes, kind, _ = CASES[spec]
    model, parameters = build(spec, dtype)
    batch = batch_for(spec, 40, dtype)
    loss, _ = gradient_of(model, parameters, batch)
    total, score = model.evaluate(parameters, batch)
    prediction = model.predict(parameters, batch.x)
    assert total == loss and prediction.dtype == dtype
    assert prediction.shape == ((40, classes) if kind in ("softmax", "gpt") else (40,))
    if kind == "softmax":
        np.testing.assert_allclose(prediction.sum(axis=1), 1, rtol=1e-6)
        assert score == (prediction.argmax(axis=1) == batch.y).sum()
        assert -np.log(prediction[np.arange(40), batch.y]).sum() == pytest.approx(loss, rel=1e-5)
    elif kind == "gpt":  # of the last token; test_gpt.py looks at all of them
        np.testing.assert_allclose(prediction.sum(axis=1), 1, rtol=1e-6)
        assert 0 < score < 40
    elif kind == "hinge":  # it predicts classes
        z = batch.x @ parameters[:FEATURES] + parameters[FEATURES]
        np.testing.assert_array_equal(prediction, z > 0)
        assert score == (prediction == batch.y).sum() and loss > 0
    elif kind == "logistic":
        assert score == ((prediction > 0.5) == batch.y).sum()
        assert -np.log(np.where(batch.y, prediction, 1 - prediction)).sum() == pytest.approx(loss, rel=1e-5)
    else:
        assert score == pytest.approx(((prediction - batch.y) ** 2).sum(), rel=1e-5)
        assert total == score / 2


def test_a_prediction_is_not_overwritten_later(spec):
    model, parameters = build(spec, "float64")
    batch = batch_for(spec, 8, "float64")
    prediction = model.predict(parameters, batch.x)
    kept = prediction.copy()
    gradient_of(model, parameters, batch)
    model.predict(parameters, batch.x[::-1].copy())
    np.testing.assert_array_equal(prediction, kept)


@pytest.mark.parametrize(
    ("spec", "classes", "least"),
    [
        ("mlp:64,activation=gelu", 10, 37 * 10 * 8 + 16 * 2**10),  # the smallest activation; the weight has 100 KiB
        ("gpt:layers=2,width=32,heads=2,context=200", 40, 37 * 200 * 32 * 8),
        ("llama:layers=1,width=32,heads=4,context=200,units=64", 40, 37 * 200 * 32 * 8),
        ("gpt:layers=1,width=32,heads=4,context=200,units=64,experts=4,capacity=1", 40, 37 * 200 * 32 * 8),
    ],
)
def test_steady_state_allocates_nothing_big(spec, classes, least):
    model = make_model(spec, (200,), classes, "float64")
    parameters = model.initialize(Random(0))
    gradient = np.zeros_like(parameters)
    batches = [
        reference.make_batch(rows, 200, classes, "float64", tokens=not spec.startswith("mlp")) for rows in (64, 37)
    ]

    def step():
        for batch in batches:
            model.loss_and_gradient(parameters, batch, gradient)
            model.evaluate(parameters, batch)

    step()
    assert sum(map(len, model.pool.free.values())) == len(model.pool.bases)  # all is given back
    held = len(model.pool.bases)
    tracemalloc.start()
    try:
        step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(model.pool.bases) == held and peak < least


@pytest.mark.parametrize("spec", DENSE)
def test_nan_is_not_hidden(spec):
    classes = CASES[spec][0]
    model, parameters = build(spec, "float32")
    batch = batch_for(spec, 4, "float32")
    batch.x[2] = np.nan
    loss, gradient = gradient_of(model, parameters, batch)
    assert np.isnan(loss) and np.isnan(gradient).any()
    total, score = model.evaluate(parameters, batch)
    assert np.isnan(total)
    rest = part(batch, [0, 1, 3])
    assert np.isnan(score) if classes == 0 else score == model.evaluate(parameters, rest)[1]
    assert spec == "svm" or np.isnan(model.predict(parameters, batch.x)[2]).all()  # a class is a number


def test_initial_values_depend_on_seed_and_name_only():
    wide = make_model("mlp:8,3", (FEATURES,), 3, "float64")
    narrow = make_model("mlp:8", (FEATURES,), 4, "float32")
    a, b = wide.initialize(Random(5)), narrow.initialize(Random(5))
    first = wide.layout.view(a, "dense1.weight")
    np.testing.assert_array_equal(first.astype("float32"), narrow.layout.view(b, "dense1.weight"))
    assert (wide.layout.view(wide.initialize(Random(6)), "dense1.weight") != first).all()
    np.testing.assert_array_equal(wide.initialize(Random(5)), a)


def test_initial_spread():
    for spec, gains in (
        ("mlp:300,200", (2, 2, 1)),
        ("mlp:300,activation=tanh", (1, 1)),
        ("mlp:300,activation=gelu", (2, 1)),
        ("softmax", (1,)),
    ):
        model = make_model(spec, (20, 20), 100, "float64")
        views = model.layout.views(model.initialize(Random(0)))
        for i, gain in enumerate(gains, start=1):
            weight = views[f"dense{i}.weight"]
            assert weight.var() * len(weight) == pytest.approx(gain, rel=0.05)
            assert abs(weight.mean()) * len(weight) ** 0.5 < 0.05
            assert (views[f"dense{i}.bias"] == 0).all()


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("spec", ["linear", "logistic", "mlp:4", list(CASES)[-2]])
def test_arrays_that_do_not_fit(spec):
    model, parameters = build(spec, "float64")
    good = batch_for(spec, 6, "float64")
    gradient = np.zeros_like(parameters)
    batches = [
        (good.x[:, :4].copy(), good.y, r"x is a float64 array of shape \(6, 4\)"),
        (good.x.astype("float32"), good.y, "x is a float32 array"),
        (np.asfortranarray(good.x), good.y, "C-contiguous"),
        (good.x.reshape(6, FEATURES, 1), good.y, "x is a float64 array of shape"),
        (good.x, good.y[:5], r"y is a \w+ array of shape \(5,\)"),
        (good.x, good.y.astype("int32"), "y is a int32 array"),
        (good.x, good.y[:, None], r"y is a \w+ array of shape \(6, 1\)"),
        (good.x, np.repeat(good.y, 2)[::2], "wants a writable, C-contiguous"),
        (good.x, read_only(good.y), "wants a writable, C-contiguous"),
    ]
    for x, y, message in batches:
        batch = SimpleNamespace(x=x, y=y)
        with pytest.raises(UsageError, match=message):
            model.loss_and_gradient(parameters, batch, gradient)
        with pytest.raises(UsageError, match=message):
            model.evaluate(parameters, batch)
    with pytest.raises(UsageError, match="x is a float32 array"):
        model.predict(parameters, good.x.astype("float32"))
    strided = np.repeat(parameters, 2)[::2]
    message = f"wants a writable, contiguous float64 vector of {model.size} elements"
    for vector in (parameters[1:], parameters.astype("float32"), parameters.reshape(1, -1), strided):
        with pytest.raises(UsageError, match=message):
            model.loss_and_gradient(vector, good, gradient)
        with pytest.raises(UsageError, match=message):
            model.loss_and_gradient(parameters, good, vector)
    assert (gradient == 0).all()


@pytest.mark.parametrize(("spec", "largest"), [("logistic", 1), ("softmax", 2), (list(CASES)[-2], 3)])
def test_label_outside_of_the_classes(spec, largest):
    model, parameters = build(spec, "float64")
    batch = batch_for(spec, 6, "float64")
    for label in (-1, largest + 1):
        batch.y[3] = label
        with pytest.raises(UsageError, match=f"outside of the classes 0 to {largest}"):
            gradient_of(model, parameters, batch)
        with pytest.raises(UsageError, match=f"outside of the classes 0 to {largest}"):
            model.evaluate(parameters, batch)


def test_on_a_device_all_that_is_given_lies_there(spec, gpu):
    """Initial values have the same bits; an array on another device is refused, as a kernel would read other memory."""
    classes = CASES[spec][0]
    model = make_model(spec, (FEATURES,), classes, "float64", gpu)
    batch, here = batch_for(spec, 4, "float64"), make_model(spec, (FEATURES,), classes, "float64")
    parameters = model.initialize(Random(3))
    assert model.device is gpu and gpu.holds(parameters) and gpu.holds(model.pool.take(2, 3))
    assert np.array_equal(gpu.host(parameters), here.initialize(Random(3)))
    there = SimpleNamespace(x=gpu.array(batch.x), y=gpu.array(batch.y))
    gradient = gpu.zeros(model.size, "float64")
    for name, arguments in {
        "x": (parameters, SimpleNamespace(x=batch.x, y=there.y), gradient),
        "y": (parameters, SimpleNamespace(x=there.x, y=batch.y), gradient),
        "a vector": (parameters, there, gpu.host(gradient)),
    }.items():
        with pytest.raises(UsageError, match=rf"^{name} lies on cpu; this model computes on cuda:0 \(stand-in\)"):
            model.loss_and_gradient(*arguments)
    with pytest.raises(UsageError, match=r"a vector lies on cuda:0 .*; this model computes on cpu"):
        here.loss_and_gradient(gpu.host(parameters), batch, gradient)
