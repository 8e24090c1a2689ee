"""GPT against its formula in numpy and against PyTorch; no influence of later tokens, generated tokens, errors.

Central differences, parts of a batch and the like: test_layered.py, where GPT is one of the models."""

import re

import numpy as np
import plain_models as reference
import pytest

from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.generation import first_seen
from hpcdl.models.layered import FlatWeights
from hpcdl.random import Random

LENGTH, VOCABULARY = 5, 7
SPEC = "gpt:layers=2,width=12,heads=3,context=8"
LLAMA, BASE = "llama:layers=2,width=16,heads=4,kv-heads=2,context=8,units=12,rope-base=30", 30.0
DEEPSEEK = (
    "llama:layers=2,width=12,heads=3,context=8,units=5,rope-base=30,latent=6,query-latent=7,rope-width=4,head-width=5"
    ",experts=4,shared=2,dense=1,dense-units=9,balance=0,z=0"
)
HEADS = ["tied", "own"]
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}


def build(head="tied", dtype="float64", spec=SPEC, length=LENGTH):
    """Return the model, and parameters of which no tensor is zero or small."""
    model = make_model(f"{spec},head={head}", (length,), VOCABULARY, dtype)
    parameters = model.initialize(Random(0))
    return model, parameters + 0.3 * np.random.default_rng(1).standard_normal(model.size).astype(dtype)


def text(rows, dtype="float64"):
    """Return a batch of tokens."""
    return reference.make_batch(rows, LENGTH, VOCABULARY, dtype, tokens=True)


def outputs(model, parameters, x):
    """Return the z of every token, (rows, length, vocabulary)."""
    z, kept = model.forward(FlatWeights(model, parameters), x, range(len(model.layers) - 1))
    z = z.reshape(len(x), -1, z.shape[1]).copy()
    model.release(kept)
    return z


def plain_outputs(model, parameters, tokens):
    """Return z by the formula, in float64."""
    tensors = {name: view.astype("float64") for name, view in model.layout.views(parameters).items()}
    if model.spec.startswith("llama"):
        return reference.llama_outputs(tensors, tokens, 4, 2, BASE)
    return reference.gpt_outputs(tensors, tokens, 3)


def wanted(model, parameters, batch):
    """Return z by the formula, the log-probability of each next token (both float64), and the next tokens."""
    z = plain_outputs(model, parameters, batch.x.astype(int))
    following = np.c_[batch.x[:, 1:], batch.y].astype(int)
    p = np.exp(z) / np.exp(z).sum(axis=2, keepdims=True)
    return z, np.log(np.take_along_axis(p, following[:, :, None], 2)[:, :, 0]), following


def gradient_of(model, parameters, batch):
    gradient = np.zeros_like(parameters)
    return model.loss_and_gradient(parameters, batch, gradient), gradient


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head, spec", [(head, SPEC) for head in HEADS] + [("own", LLAMA)])
def test_outputs_loss_and_score_against_the_formula(head, spec, dtype):
    """The loss of a row is the mean over its tokens, and so is its score."""
    model, parameters = build(head, dtype, spec)
    for rows in (1, 6):
        batch = text(rows, dtype)
        z, log_p, following = wanted(model, parameters, batch)
        np.testing.assert_allclose(outputs(model, parameters, batch.x), z, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        loss, score = model.evaluate(parameters, batch)
        assert loss == pytest.approx(-log_p.mean(axis=1).sum(), rel=TOLERANCE[dtype])
        assert score == pytest.approx((z.argmax(axis=2) == following).mean(axis=1).sum(), rel=1e-12)
        last = np.exp(z[:, -1]) / np.exp(z[:, -1]).sum(axis=1, keepdims=True)
        prediction = model.predict(parameters, batch.x)
        assert prediction.dtype == dtype
        np.testing.assert_allclose(prediction, last, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head", HEADS)
def test_against_torch(head, dtype):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    model, parameters = build(head, dtype)
    batch = text(6, dtype)
    loss, gradient = gradient_of(model, parameters, batch)
    w = {name: torch.tensor(view, requires_grad=True) for name, view in model.layout.views(parameters).items()}
    tokens = torch.tensor(batch.x.astype(int))
    h = w["embedding.token"][tokens] + w["embedding.position"][:LENGTH]

    def norm(name):
        return functional.layer_norm(h, (12,), w[f"{name}.gain"], w[f"{name}.bias"])

    for i in (1, 2):
        block = f"block{i}.attention"
        qkv = norm(f"{block}.norm") @ w[f"{block}.qkv.weight"].flatten(1) + w[f"{block}.qkv.bias"].flatten()
        q, k, v = (each.unflatten(2, (3, 4)).transpose(1, 2) for each in qkv.split(12, dim=2))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + a @ w[f"{block}.out.weight"] + w[f"{block}.out.bias"]
        block = f"block{i}.mlp"
        u = functional.gelu(norm(f"{block}.norm") @ w[f"{block}.up.weight"] + w[f"{block}.up.bias"], approximate="tanh")
        h = h + u @ w[f"{block}.down.weight"] + w[f"{block}.down.bias"]
    z = norm("norm") @ w.get("head.weight", w["embedding.token"]).T
    following = torch.cat([tokens[:, 1:], torch.tensor(batch.y)[:, None]], dim=1)
    total = functional.cross_entropy(z.flatten(0, 1), following.flatten(), reduction="sum") / LENGTH
    total.backward()
    assert loss == pytest.approx(total.item(), rel=TOLERANCE[dtype])
    for name, view in model.layout.views(gradient).items():
        want = w[name].grad.numpy()
        atol = TOLERANCE[dtype] * abs(want).max()
        np.testing.assert_allclose(view, want, rtol=TOLERANCE[dtype], atol=atol, err_msg=name)


def in_torch(torch, model, parameters, batch):
    """Tensors of PyTorch: the parameters by name, the tokens, and the rotations of heads of 4 elements."""
    w = {name: torch.tensor(view, requires_grad=True) for name, view in model.layout.views(parameters).items()}
    angles = torch.outer(
        torch.arange(LENGTH, dtype=torch.float64), BASE ** -torch.tensor([0, 0.5], dtype=torch.float64)
    )
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64 if parameters.dtype == "float32" else None)
    return w, torch.tensor(batch.x.astype(int)), turn


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_llama_against_torch(dtype):
    """With PyTorch's RMSNorm, silu, and attention with fewer heads of keys; it counts the heads of a group in turn."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    model, parameters = build("own", dtype, LLAMA)
    batch = text(6, dtype)
    loss, gradient = gradient_of(model, parameters, batch)
    w, tokens, turn = in_torch(torch, model, parameters, batch)

    def norm(name):
        return functional.rms_norm(h, (16,), w[f"{name}.gain"], 1e-5)

    def turned(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(3, (2, 2)).contiguous()) * turn).flatten(3)

    h = w["embedding.token"][tokens]
    for i in (1, 2):
        block = f"block{i}.attention"
        qkv = norm(f"{block}.norm") @ w[f"{block}.qkv.weight"].flatten(1)
        q, k, v = (each.unflatten(2, (-1, 4)).transpose(1, 2) for each in qkv.split((16, 8, 8), dim=2))
        q, k = turned(q), turned(k)
        by_group = q.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)
        a = functional.scaled_dot_product_attention(by_group, k, v, is_causal=True, enable_gqa=True)
        a = a.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2).transpose(1, 2).flatten(2)
        h = h + a @ w[f"{block}.out.weight"].flatten(0, 1)
        block = f"block{i}.mlp"
        gate, up = (norm(f"{block}.norm") @ w[f"{block}.up.weight"].flatten(1)).chunk(2, dim=2)
        h = h + (functional.silu(gate) * up) @ w[f"{block}.down.weight"]
    z = norm("norm") @ w["head.weight"].T
    following = torch.cat([tokens[:, 1:], torch.tensor(batch.y)[:, None]], dim=1)
    total = functional.cross_entropy(z.flatten(0, 1), following.flatten(), reduction="sum") / LENGTH
    total.backward()
    assert loss == pytest.approx(total.item(), rel=TOLERANCE[dtype])
    for name, view in model.layout.views(gradient).items():
        want = w[name].grad.numpy()
        atol = TOLERANCE[dtype] * abs(want).max()
        np.testing.assert_allclose(view, want, rtol=TOLERANCE[dtype], atol=atol, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_deepseek_against_torch(dtype):
    """Latent attention, a block without experts, and one with shared and routed ones."""
    torch = pytest.importorskip("torch")
    functional, (heads, rope, head) = torch.nn.functional, (3, 4, 5)
    model, parameters = build("own", dtype, DEEPSEEK)
    batch = text(6, dtype)
    loss, gradient = gradient_of(model, parameters, batch)
    w, tokens, turn = in_torch(torch, model, parameters, batch)

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], w[f"{name}.gain"], 1e-5)

    def turned(x):  # (rows, tokens, heads, rope)
        pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())
        return torch.view_as_real(pairs * turn[:, None]).flatten(-2)

    def network(x, name, chosen=()):
        up, down = (w[f"{name}.{each}.weight"] for each in ("up", "down"))
        for e in chosen:
            up, down = up[e], down[e]
        gate, value = (x @ up[:, k] for k in range(2))
        return (functional.silu(gate) * value) @ down

    h = w["embedding.token"][tokens]
    for i in (1, 2):
        at = f"block{i}.attention"
        n = norm(h, f"{at}.norm")
        q = (norm(n @ w[f"{at}.q_down.weight"], f"{at}.q_norm") @ w[f"{at}.q_up.weight"]).unflatten(2, (heads, -1))
        c = norm(n @ w[f"{at}.kv_down.weight"], f"{at}.kv_norm")
        k, v = ((c @ w[f"{at}.kv_up.weight"][:, k]).unflatten(2, (heads, head)) for k in range(2))
        common = turned((n @ w[f"{at}.k_rope.weight"]).unsqueeze(2)).expand(-1, -1, heads, -1)
        q, k = torch.cat([q[..., rope:], turned(q[..., :rope])], 3), torch.cat([k, common], 3)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + a @ w[f"{at}.out.weight"]
        n = norm(h, f"block{i}.mlp.norm")
        if i == 1:
            h = h + network(n, "block1.mlp")
            continue
        gates, chosen = (n @ w["block2.mlp.router"]).softmax(-1).topk(2)
        gates = gates / gates.sum(-1, keepdim=True)
        h = h + network(n, "block2.mlp.shared")
        for e in range(4):
            h = h + (gates * (chosen == e)).sum(-1, keepdim=True) * network(n, "block2.mlp", [e])
    z = norm(h, "norm") @ w["head.weight"].T
    following = torch.cat([tokens[:, 1:], torch.tensor(batch.y)[:, None]], dim=1)
    total = functional.cross_entropy(z.flatten(0, 1), following.flatten(), reduction="sum") / LENGTH
    total.backward()
    assert loss == pytest.approx(total.item(), rel=TOLERANCE[dtype])
    for name, view in model.layout.views(gradient).items():
        want = w[name].grad.numpy()
        atol = TOLERANCE[dtype] * abs(want).max()
        np.testing.assert_allclose(view, want, rtol=TOLERANCE[dtype], atol=atol, err_msg=name)


@pytest.mark.parametrize("head, spec", [("tied", SPEC), ("own", LLAMA)])
def test_a_later_token_has_no_influence(head, spec):
    """Outputs before the token are equal to the bit; all from the token on differ."""
    model, parameters = build(head, spec=spec)
    batch = text(4)
    before = outputs(model, parameters, batch.x)
    for place in range(LENGTH):
        changed = batch.x.copy()
        changed[:, place] = (changed[:, place] + 1) % VOCABULARY
        after = outputs(model, parameters, changed)
        np.testing.assert_array_equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any(axis=2).all()


def test_scores_depend_on_differences_of_positions():
    """Rotated by positions p + 100, q and k of a sequence have the attention of those rotated by positions p."""
    model, _ = build("own", spec=LLAMA)
    layer, found = model.layers[1], []
    for first in (0, 100):
        layer.numbers = first + np.arange(LENGTH)
        z = model.pool.take(LENGTH, 32)
        z[...] = np.random.default_rng(0).standard_normal(z.shape)
        a, saved = layer.inner(z, None)
        found.append((z[:, :24].copy(), a.copy()))
        layer.give(a, *saved)
    (near, attention), (far, other) = found
    assert not np.allclose(near, far, atol=0.1)
    np.testing.assert_allclose(attention, other, rtol=1e-12, atol=1e-13)
    plain = np.random.default_rng(0).standard_normal((LENGTH, 32))[:, :24]
    np.testing.assert_allclose((near**2).reshape(LENGTH, 6, 4).sum(2), (plain**2).reshape(LENGTH, 6, 4).sum(2))
    np.testing.assert_array_equal(near[0], plain[0])  # position 0


def test_nan_is_not_hidden():
    model, parameters = build(dtype="float32")
    for name in ("embedding.token", "block1.attention.qkv.weight", "block2.mlp.down.bias", "norm.gain"):
        spoilt = parameters.copy()
        model.layout.view(spoilt, name).flat[-1] = np.nan
        batch = text(4, "float32")
        batch.x[:, 1] = VOCABULARY - 1
        loss, gradient = gradient_of(model, spoilt, batch)
        assert np.isnan(loss) and np.isnan(gradient).any(), name
        total, score = model.evaluate(spoilt, batch)
        assert np.isnan(total) and score < 4


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 1.5, np.nan, np.inf, -np.inf, 1e30])
def test_what_is_no_token(wrong, recwarn):
    model, parameters = build()
    batch = text(3)
    batch.x[1, 2] = wrong
    message = re.escape("the data hold a value that is no token number from 0 to 6; a gpt reads text")
    for call in (
        lambda: gradient_of(model, parameters, batch),
        lambda: model.evaluate(parameters, batch),
        lambda: model.predict(parameters, batch.x),
    ):
        with pytest.raises(UsageError, match=message):
            call()
    assert not recwarn.list


def test_initial_values_depend_on_seed_and_name_only():
    """Length, head and type change no value; more layers scale the values that feed the residual sums."""
    one = make_model("gpt:layers=1,width=8,heads=2,context=9", (5,), 6, "float64")
    other = make_model("gpt:layers=3,width=8,heads=4,context=9,head=own", (9,), 6, "float32")
    a, b = one.layout.views(one.initialize(Random(4))), other.layout.views(other.initialize(Random(4)))
    for name in a:
        scale = 3**-0.5 if name.endswith(("out.weight", "down.weight")) else 1
        np.testing.assert_allclose((scale * a[name]).astype("float32"), b[name], rtol=1e-6, err_msg=name)
    c = one.layout.views(one.initialize(Random(5)))
    drawn = [name for name in a if name.split(".")[-1] in ("weight", "token", "position")]
    assert len(drawn) == 6 and all((a[name] != c[name]).all() for name in drawn)
    assert not np.allclose(b["block1.mlp.up.weight"], b["block2.mlp.up.weight"])


SPREAD = "layers=2,width=64,heads=2,context=100,head=own"
LATENT = "latent=40,query-latent=50,rope-width=32"


@pytest.mark.parametrize(
    "spec", [f"gpt:{SPREAD}", f"llama:{SPREAD},kv-heads=1", f"llama:{SPREAD},biases=yes", f"llama:{SPREAD},{LATENT}"]
)
def test_initial_spread(spec):
    model = make_model(spec, (9,), 300, "float64")
    for name, view in model.layout.views(model.initialize(Random(0))).items():
        kind = name.split(".")[-1]
        if kind in ("bias", "gain"):
            assert (view == (kind == "gain")).all(), name
        else:
            expected = 0.02 / (2 if name.endswith((".out.weight", ".down.weight")) else 1)  # sqrt of 4 residual sums
            assert view.std() == pytest.approx(expected, rel=0.05) and abs(view.mean()) < 0.05 * expected, name


def test_memory_grows_with_the_context_not_with_its_square():
    """No buffer of a step, of a score and of a prediction has an element for each pair of tokens."""
    length = 600
    model = make_model(f"gpt:layers=1,width=4,heads=2,context={length}", (length,), 5)
    parameters = model.initialize(Random(0))
    batch = reference.make_batch(1, length, 5, "float32", tokens=True)
    gradient_of(model, parameters, batch)
    model.evaluate(parameters, batch)
    model.predict(parameters, batch.x)
    model.generate(parameters, [1] * length, 2, Random(0)("sample"))
    assert 0 < max(whole.size for whole in model.pool.bases.values()) <= 2 * length * 16  # 4 x width columns


def test_rows_that_are_scored_at_once():
    assert make_model("gpt:layers=1,width=4,heads=1,context=2000", (2000,), 9).rows_at_once == 2
    assert make_model("gpt:layers=1,width=4,heads=1,context=5000", (5000,), 9).rows_at_once == 1
    assert make_model("gpt:layers=1,width=4,heads=1", (1,), 9).rows_at_once == 4096


class Recorded:
    """A generator that records the probabilities of each draw, and draws the least likely token."""

    def __init__(self):
        self.asked = []

    def choice(self, count, p):
        self.asked.append(p)
        return int(p.argmin())


@pytest.mark.parametrize("head, spec", [(head, SPEC) for head in HEADS] + [("own", LLAMA)])
@pytest.mark.parametrize("temperature", [0.5, 1, 3])
def test_what_is_drawn_from(head, spec, temperature):
    """A token is drawn from the softmax of z / temperature for the tokens in the window (generation.py)."""
    model, parameters = build(head, spec=spec)
    random, tokens = Recorded(), [3, 1]
    tokens += model.generate(parameters, tokens, 8, random, temperature)
    assert len(tokens) == 10
    for i, p in enumerate(random.asked, start=2):
        z = plain_outputs(model, parameters, np.array([tokens[first_seen(i, LENGTH) : i]]))[0, -1] / temperature
        np.testing.assert_allclose(p, np.exp(z) / np.exp(z).sum(), rtol=1e-10)
        assert tokens[i] == z.argmin()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_generated_tokens(dtype, recwarn):
    model, parameters = build(dtype=dtype)

    def made(seed, temperature=1.0, prompt=(1, 2), count=30):
        return model.generate(parameters, prompt, count, Random(seed)("sample"), temperature)

    assert made(1) == made(1) != made(2)
    assert made(1, 0) == made(2, 0) != made(1)
    assert len(made(1)) == 30 and made(1, count=0) == []
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in made(1, 100.0))
    assert len(set(made(1, 1e9, count=200))) == VOCABULARY  # all alike
    assert made(1, 1e-9) == made(1, 1e-320) == made(1, 0)
    seen = [0, 6, 1, 2, 3, 4, 5][first_seen(7, LENGTH) :]
    assert made(3, prompt=[0, 6, 1, 2, 3, 4, 5], count=1) == made(3, prompt=seen, count=1)  # of the last five, some
    assert made(3, prompt=[]) == made(3, prompt=[0])
    assert sum(map(len, model.pool.free.values())) == len(model.pool.bases)  # all is given back
    with pytest.raises(UsageError, match="no token number from 0 to 6"):
        made(1, prompt=[VOCABULARY])
    model.layout.view(parameters, "norm.bias")[:] = np.nan
    for temperature in (0, 1):
        with pytest.raises(UsageError, match="outputs are not finite: its training diverged"):
            made(1, temperature)
    assert not recwarn.list
