"""Every optimizer against its textbook formula; scale, clipping, slices and checks of all (PyTorch: tests/pytorch)."""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.optim import make_optimizer

SIZE, STEPS, SCALE = 23, 100, 0.25


def rate(step):
    """Return the learning rate, another one for each step."""
    return 0.1 / (1 + step / 10)


def gradients(dtype="float64"):
    """Return a gradient for each step, of changing size and with some zeros."""
    random = np.random.default_rng(0)
    g = random.standard_normal((STEPS, SIZE)) * random.lognormal(size=(STEPS, 1))
    g[::7, ::3] = 0
    return g.astype(dtype)


def start(dtype="float64"):
    return np.random.default_rng(1).standard_normal(SIZE).astype(dtype)


def run(spec, dtype="float64", **options):
    """Return the parameters after each step."""
    optimizer, w, trace = make_optimizer(spec, SIZE, dtype, rate, **options), start(dtype), []
    for g in gradients(dtype):
        optimizer.update(w, g, scale=SCALE)
        trace.append(w.copy())
    assert optimizer.step == STEPS
    return np.array(trace)


# The textbook: each yields w after each step, from mean gradients, with the state as in the papers.


def sgd(w, mean, decay):
    for step, g in enumerate(mean):
        w = w - rate(step) * (g + decay * w)
        yield w


def momentum(w, mean, decay, beta=0.9):
    v = np.zeros_like(w)
    for step, g in enumerate(mean):
        v = beta * v + (g + decay * w)
        w = w - rate(step) * v
        yield w


def nesterov(w, mean, decay, beta=0.9):
    v = np.zeros_like(w)
    for step, g in enumerate(mean):
        d = g + decay * w
        v = beta * v + d
        w = w - rate(step) * (d + beta * v)
        yield w


def adam(w, mean, decay, beta1=0.9, beta2=0.999, eps=1e-8, decoupled=False):
    m, s = np.zeros_like(w), np.zeros_like(w)
    for step, g in enumerate(mean):
        if decoupled:
            w = w - rate(step) * decay * w
        else:
            g = g + decay * w
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * g * g
        m_hat, s_hat = m / (1 - beta1 ** (step + 1)), s / (1 - beta2 ** (step + 1))
        w = w - rate(step) * m_hat / (np.sqrt(s_hat) + eps)
        yield w


def adamw(w, mean, decay, **settings):
    return adam(w, mean, decay, decoupled=True, **settings)


def adagrad(w, mean, decay, eps=1e-10):
    s = np.zeros_like(w)
    for step, g in enumerate(mean):
        d = g + decay * w
        s = s + d * d
        w = w - rate(step) * d / (np.sqrt(s) + eps)
        yield w


TEXTBOOK = {rule.__name__: rule for rule in (sgd, momentum, nesterov, adam, adamw, adagrad)}
SPECS = {name: {} for name in TEXTBOOK}  # spec -> textbook settings
SPECS |= {"momentum:beta=0": {"beta": 0}, "momentum:beta=0.5": {"beta": 0.5}, "nesterov:beta=0.5": {"beta": 0.5}}
SPECS |= {"adam:beta1=0.8,beta2=0.95,eps=1e-3": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3}}
SPECS |= {"adamw:beta1=0": {"beta1": 0}, "adagrad:eps=1e-2": {"eps": 1e-2}}


@pytest.fixture(params=TEXTBOOK)
def name(request):
    return request.param


@pytest.mark.parametrize("decay", [0.0, 0.03])
@pytest.mark.parametrize("spec", SPECS)
def test_against_the_textbook(spec, decay):
    name = spec.partition(":")[0]
    expected = np.array(list(TEXTBOOK[name](start(), SCALE * gradients(), decay, **SPECS[spec])))
    np.testing.assert_allclose(run(spec, weight_decay=decay), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_float32(name, decay):
    trace = run(name, "float32", weight_decay=decay)
    assert trace.dtype == "float32"
    np.testing.assert_allclose(trace, run(name, weight_decay=decay), rtol=1e-3, atol=1e-4)


def test_reset_begins_anew_but_for_the_schedule(name):
    later = make_optimizer(name, SIZE, "float64", lambda step: rate(step + 3))
    optimizer, w, expected = make_optimizer(name, SIZE, "float64", rate), start(), start()
    for g in gradients()[:3]:
        optimizer.update(w, g)
    optimizer.reset()
    w[:] = start()
    for g in gradients()[3:9]:
        optimizer.update(w, g)
        later.update(expected, g)
        np.testing.assert_array_equal(w, expected)


def test_clipping(name):
    """Clipping at a norm is the unclipped rule on gradients that were shortened to that norm."""
    clip = 0.5 * SCALE * np.median(np.linalg.norm(gradients(), axis=1))
    mean = SCALE * gradients()
    norms = np.linalg.norm(mean, axis=1, keepdims=True)
    assert (norms > clip).any() and (norms < clip).any()
    expected = np.array(list(TEXTBOOK[name](start(), mean * np.minimum(1, clip / norms), 0.01)))
    np.testing.assert_allclose(run(name, weight_decay=0.01, clip_norm=clip), expected, rtol=1e-11, atol=1e-11)


def test_clipping_above_every_norm_changes_no_bit(name):
    np.testing.assert_array_equal(run(name, clip_norm=1e9), run(name))


def test_the_same_rule_for_a_slice_has_all_settings_and_a_state_of_its_own(name):
    whole, w, parts = make_optimizer(name, SIZE, "float64", rate, 0.03, 0.5), start(), start()
    for g in gradients()[:3]:
        whole.update(w, g, scale=SCALE)  # the slices do not take over its state
    before = {key: vector.copy() for key, vector in whole.state.items()}
    cuts = [slice(0, 7), slice(7, 7), slice(7, SIZE)]
    slices = [whole.of_size(cut.stop - cut.start) for cut in cuts]
    fresh, w = make_optimizer(name, SIZE, "float64", rate, 0.03, 0.5), start()
    for g in gradients()[:9]:
        fresh.update(w, g, scale=SCALE)
        for cut, each in zip(cuts, slices, strict=True):
            each.update(parts[cut], g[cut], scale=SCALE, norm=np.linalg.norm(g))
    np.testing.assert_allclose(parts, w, rtol=1e-12)
    for key, vector in fresh.state.items():
        np.testing.assert_allclose(np.concatenate([each.state[key] for each in slices]), vector, rtol=1e-12)
        np.testing.assert_array_equal(whole.state[key], before[key])
    assert [each.step for each in slices] == [9] * 3 and whole.step == 3


def test_a_rate_that_is_given_takes_the_place_of_the_schedules(name):
    given, asked = start(), start()
    one = make_optimizer(name, SIZE, "float64", lambda step: pytest.fail("the schedule is not asked"))
    other = make_optimizer(name, SIZE, "float64", lambda step: [0.3, 0.0, 0.01][step])
    for step, g in enumerate(gradients()[:3]):
        one.update(given, g, SCALE, rate=[0.3, 0.0, 0.01][step])
        other.update(asked, g, SCALE)
        np.testing.assert_array_equal(given, asked)
    assert one.step == 3


def test_gradient_is_left_as_it_is(name):
    optimizer, w, g = make_optimizer(name, SIZE, "float64", rate, 0.1, 0.1), start(), gradients()[0]
    before = g.copy()
    optimizer.update(w, g, SCALE)
    np.testing.assert_array_equal(g, before)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_not_hidden(name, bad, clip):
    optimizer, w, g = make_optimizer(name, SIZE, "float32", rate, clip_norm=clip), start("float32"), np.ones(SIZE, "f4")
    g[5] = bad
    optimizer.update(w, g)
    assert not np.isfinite(w[5])


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("rmsprop", {}, r"unknown optimizer 'rmsprop'; known: .*; PyTorch's is torch:RMSprop"),
        ("adma", {}, r"unknown optimizer 'adma' \(did you mean 'adam'\?\)"),
        ("sgd:beta=0.9", {}, "'sgd' has no setting 'beta'"),
        ("momentum:beta1=0.9", {}, "'momentum' has no setting 'beta1'"),
        ("momentum:beta=high", {}, "beta should be of type float, not 'high'"),
        ("momentum:beta=1", {}, "beta is at least 0 and less than 1, not 1.0"),
        ("nesterov:beta=-0.1", {}, "beta is at least 0 and less than 1, not -0.1"),
        ("nesterov:beta=nan", {}, "beta is at least 0 and less than 1, not nan"),
        ("adam:beta1=1", {}, "beta1 is at least 0"),
        ("adamw:beta2=1.5", {}, "beta2 is at least 0"),
        ("adam:eps=0", {}, "eps is positive, not 0.0"),
        ("adagrad:eps=-1", {}, "Adagrad's eps is positive, not -1.0"),
        ("sgd", {"weight_decay": -1.0}, "weight decay is zero or positive, not -1.0"),
        ("sgd", {"weight_decay": float("nan")}, "weight decay is zero or positive, not nan"),
        ("adam", {"clip_norm": -1.0}, "norm to clip at is positive, or zero for no clipping, not -1.0"),
        ("adam", {"clip_norm": float("inf")}, "norm to clip at is positive"),
    ],
)
def test_wrong_settings(spec, options, message):
    with pytest.raises(UsageError, match=message):
        make_optimizer(spec, SIZE, "float32", rate, **options)


def test_arrays_that_do_not_fit(name):
    optimizer, good = make_optimizer(name, SIZE, "float32", rate), start("float32")
    before = good.copy()
    strided = np.ones(2 * SIZE, "float32")[::2]
    for bad in (np.ones(SIZE - 1, "float32"), np.ones(SIZE, "float64"), np.ones((1, SIZE), "float32"), strided):
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(UsageError, match=f"float32 vectors of {SIZE} elements, not a {bad.dtype} array"):
                optimizer.update(*pair)
    np.testing.assert_array_equal(good, before)
    assert optimizer.step == 0


def test_on_a_device_all_vectors_lie_there(name, gpu):
    optimizer = make_optimizer(name, 3, "float64", rate, device=gpu)
    assert all(gpu.holds(vector) for vector in optimizer.state.values())
    here, there = np.zeros(3), gpu.zeros(3, "float64")
    for arguments in ((here, there), (there, here)):
        with pytest.raises(UsageError, match=r"on cuda:0 \(stand-in\), not a float64 array of shape \(3,\) on cpu"):
            optimizer.update(*arguments)
    with pytest.raises(UsageError, match=r"on cpu, not a float64 array of shape \(3,\) on cuda:0"):
        make_optimizer(name, 3, "float64", rate).update(there, here)
