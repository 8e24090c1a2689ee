"""Rules of torch.optim on flat vectors: PyTorch's own numbers, ours where we have the rule, slices as the whole."""

import copy

import numpy as np
import pytest
import torch

from hpcdl.errors import UsageError
from hpcdl.optim import make_optimizer, vectors_of

SIZE, STEPS = 23, 12
OURS = {
    "torch:SGD": "sgd",
    "torch:SGD,momentum=0.9": "momentum:beta=0.9",
    "torch:SGD,momentum=0.9,nesterov=True": "nesterov:beta=0.9",
    "torch:Adam,betas=(0.8,0.95)": "adam:beta1=0.8,beta2=0.95",
    "torch:AdamW": "adamw",
    "torch:Adagrad": "adagrad",
}
OTHERS = (
    "torch:Adadelta",
    "torch:Adamax",
    "torch:AdamW,amsgrad=True,fused=False",
    "torch:ASGD,t0=3",
    "torch:NAdam",
    "torch:RAdam",
    "torch:RMSprop,momentum=0.9,centered=True",
    "torch:Rprop",
    "torch:SGD,momentum=0.9,dampening=0.5",
    "torch:Adagrad,initial_accumulator_value=0.5",
)


def rate(step):
    return 0.1 / (1 + step / 10)


def gradients(dtype="float64"):
    return np.random.default_rng(0).standard_normal((STEPS, SIZE)).astype(dtype)


def start(dtype="float64"):
    return np.random.default_rng(1).standard_normal(SIZE).astype(dtype)


def run(spec, dtype="float64", made=None, **options):
    """The parameters after each step."""
    optimizer, w, path = made or make_optimizer(spec, SIZE, dtype, rate, **options), start(dtype), []
    for g in gradients(dtype):
        before = g.copy()
        optimizer.update(w, g, scale=0.25)
        assert np.array_equal(g, before)
        path.append(w.copy())
    return np.array(path)


def plain(spec, decay):
    """What a program of PyTorch's has."""
    name, _, rest = spec.removeprefix("torch:").partition(",")
    settings = eval(f"dict({rest})")
    w = torch.nn.Parameter(torch.from_numpy(start()))
    more = {"weight_decay": decay} if decay else {"weight_decay": 0.0} if name == "AdamW" else {}
    rule = getattr(torch.optim, name)([w], **settings, **more)
    for step, g in enumerate(gradients()):
        rule.param_groups[0]["lr"], w.grad = rate(step), torch.from_numpy(0.25 * g)
        rule.step()
        yield w.detach().numpy().copy()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("spec", "ours"), OURS.items())
def test_it_is_ours(spec, ours, decay):
    np.testing.assert_allclose(run(spec, weight_decay=decay), run(ours, weight_decay=decay), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("spec", [*OURS, *OTHERS])
def test_it_is_pytorchs(spec, decay):
    if spec == "torch:Rprop" and decay:
        return  # PyTorch's has none
    np.testing.assert_allclose(run(spec, weight_decay=decay), [*plain(spec, decay)], rtol=1e-12, atol=1e-12)


def test_one_without_weight_decay_has_it_in_the_gradient():
    assert not np.array_equal(run("torch:Rprop", weight_decay=0.1), run("torch:Rprop"))


@pytest.mark.parametrize("spec", [*OURS, *OTHERS])
def test_slices_move_as_they_do_within_the_whole_and_the_state_can_be_saved(spec):
    wanted = run(spec, "float32")
    optimizer, w = make_optimizer(spec, SIZE, "float32", rate), start("float32")
    assert tuple(optimizer.state) == vectors_of(spec)
    parts, at = [], [slice(0, 9), slice(9, 9), slice(9, SIZE)]
    for g in gradients("float32")[:5]:
        optimizer.update(w, g, scale=0.25)
    saved = {name: vector.copy() for name, vector in optimizer.state.items()}
    for part in at:
        parts.append(optimizer.of_size(part.stop - part.start))
        parts[-1].step = 5
        for name, vector in saved.items():
            parts[-1].state[name][:] = vector[part]
    for g in gradients("float32")[5:]:
        for part, rule in zip(at, parts, strict=True):
            rule.update(w[part], g[part].copy(), scale=0.25)
    np.testing.assert_allclose(w, wanted[-1], rtol=1e-6, atol=1e-6)
    views = [optimizer.over(part) for part in at]  # of one state, as shards have it
    w = wanted[4].copy()
    for g in gradients("float32")[5:]:
        for part, rule in zip(at, views, strict=True):
            rule.update(w[part], g[part], scale=0.25)
    np.testing.assert_allclose(w, wanted[-1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", ["torch:SGD,momentum=0.9,dampening=0.5", "torch:NAdam", "torch:Rprop"])
def test_forgotten_it_begins_anew(spec):
    """As a client of federated learning does in each round; a copy shares nothing."""
    optimizer = make_optimizer(spec, SIZE, "float64", rate)
    other = copy.copy(optimizer).of_size(SIZE)
    first = run(spec, made=optimizer)
    optimizer.step = 0
    optimizer.reset()
    assert np.array_equal(run(spec, made=optimizer), first)
    assert np.array_equal(run(spec, made=other), first)


def test_clipping_and_the_mean_of_the_iterates_are_ours():
    options = {"clip_norm": 0.3, "average_from": 2}
    ours, theirs = (make_optimizer(spec, SIZE, "float64", rate, **options) for spec in ("sgd", "torch:SGD"))
    np.testing.assert_allclose(run("", made=theirs), run("", made=ours), rtol=1e-12)
    np.testing.assert_allclose(theirs.state["average"], ours.state["average"], rtol=1e-12)


def test_a_fused_loop_is_taken_where_there_is_one():
    for spec, fused in (("torch:AdamW", True), ("torch:AdamW,fused=False", False), ("torch:RMSprop", None)):
        optimizer = make_optimizer(spec, SIZE, "float32", rate)
        optimizer.update(start("float32"), gradients("float32")[0])
        assert optimizer.bound[2][2].param_groups[0].get("fused") is fused


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("torch:LBFGS", "LBFGS computes the loss several times in a step"),
        ("torch:Muon", "Muon needs matrices"),
        ("torch:Adafactor", "rows and columns"),
        ("torch:SparseAdam", "sparse gradients"),
        ("torch:AdamV", "unknown optimizer of torch.optim 'AdamV' (did you mean 'Adam'?)"),
        ("torch:Optimizer", "unknown optimizer of torch.optim"),
        ("torch:", "unknown optimizer of torch.optim"),
        ("torch:AdamW,lr=0.1", "leave out lr, and set it by --lr and --schedule"),
        ("torch:AdamW,weight_decay=0.1", "leave out weight_decay, and set it by --weight-decay"),
        ("torch:AdamW,beta=0.1", "AdamW has no setting 'beta'; its settings: amsgrad, betas, eps, fused"),
        ("torch:SGD,maximize=True", "SGD has no setting 'maximize'"),
        ("torch:AdamW,betas=3", "optimizer 'torch:AdamW,betas=3': "),
        ("torch:AdamW,betas=(2,3)", "Invalid beta parameter at index 0: 2"),
        ("torch:AdamW,0.9", "a setting is written NAME=VALUE, not '0.9'"),
    ],
)
def test_bad_input_is_one_line(spec, words):
    with pytest.raises(UsageError) as refused:
        make_optimizer(spec, SIZE, "float32", rate)
    assert words in str(refused.value) and "\n" not in str(refused.value)
