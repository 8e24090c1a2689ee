"""Mixtures of experts against their formula in plain numpy: outputs, gradients, choices, drops, settings, matrices."""

import numpy as np
import plain_models as reference
import pytest

from hpcdl.errors import UsageError
from hpcdl.models import make_model, work
from hpcdl.models.feed_forward import FEED_FORWARDS
from hpcdl.models.group import IdentityGroup
from hpcdl.models.layered import FlatWeights
from hpcdl.models.mixture import Experts, MixtureOfExperts, counted_choices
from hpcdl.models.normalization import NORMALIZATIONS
from hpcdl.models.pool import Pool
from hpcdl.models.transformer import Architecture
from hpcdl.parallel.context import check_context
from hpcdl.random import Random

LENGTH, WIDTH, UNITS, ROWS = 6, 8, 5, 3
SMALL = f"layers=2,width=8,heads=4,kv-heads=2,context={LENGTH},units=6"
ALONE = IdentityGroup()


def made(kind="swiglu", **settings):
    """Return a mixture of RMS-normalized tokens, and its tensors, of which none is zero or small."""
    experts = Experts(**{"count": 4, "top": 2} | settings)
    architecture = Architecture(LENGTH, WIDTH, 1, 1, UNITS, LENGTH, 2, NORMALIZATIONS["rms"], 0.0, False)
    layer = MixtureOfExperts("mlp", Pool("float64"), architecture, experts, FEED_FORWARDS[kind])
    random = np.random.default_rng(3)
    return layer, [random.standard_normal(shape) for shape in layer.shapes.values()]


def tokens(seed=0, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows * LENGTH, WIDTH))


def expert(kind, n, up, down):
    """Return the output of one expert for the tokens n."""
    if kind == "gelu":
        return reference.gelu(n @ up)[0] @ down
    gate, value = n @ up[:, 0], n @ up[:, 1]
    return (gate / (1 + np.exp(-gate)) * value) @ down


def plain(kind, experts, w, x):
    """Return (y, the two further terms of the objective, summed over sequences), token by token."""
    gain, router, up, down, *shared = w
    n = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * gain
    z = n @ router
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    y, objective = x + (expert(kind, n, *shared) if shared else 0), 0.0
    for start in range(0, len(x), LENGTH):
        used, wished = np.zeros(experts.count, int), np.zeros(experts.count)
        for t in range(start, start + LENGTH):
            best = sorted(range(experts.count), key=lambda e: (-z[t, e], e))[: experts.top]
            of_all = p[t, best].sum() if experts.top > 1 else 1.0
            for e in best:
                wished[e] += 1
                if used[e] < (experts.room(LENGTH)):
                    used[e] += 1
                    y[t] += p[t, e] / of_all * expert(kind, n[t : t + 1], up[e], down[e])[0]
        share, own = wished / (LENGTH * experts.top), slice(start, start + LENGTH)
        objective += experts.balance * experts.count * (share * p[own].mean(axis=0)).sum()
        objective += experts.z * (np.log(np.exp(z[own]).sum(axis=1)) ** 2).mean()
    return y, objective


CASES = [
    ("gelu", {}),
    ("swiglu", {"balance": 0.7, "z": 0.3}),
    ("swiglu", {"top": 3, "capacity": 0.5, "balance": 0.7}),
    ("gelu", {"top": 1, "capacity": 1.0, "z": 0.3}),
    ("gelu", {"count": 1, "top": 1}),
    ("swiglu", {"top": 4}),
    ("swiglu", {"shared": 2, "capacity": 0.5}),
    ("gelu", {"shared": 1, "z": 0.3}),
]


@pytest.mark.parametrize("kind, settings", CASES, ids=str)
def test_output_and_gradient_against_the_formula(kind, settings):
    """The gradient is that of <y, d> and the further terms, by central differences of the formula."""
    layer, w = made(kind, **settings)
    x, d = tokens(), tokens(1)
    y, saved = layer.forward(w, x, ALONE)
    np.testing.assert_allclose(y, plain(kind, layer.experts, w, x)[0], rtol=1e-12, atol=1e-12)
    g = [np.zeros_like(each) for each in w]
    dx = layer.backward(w, saved, d.copy(), g, ALONE)

    def value():
        out, objective = plain(kind, layer.experts, w, x)
        return (out * d).sum() + objective

    random, h = np.random.default_rng(5), 1e-5
    for array, gradient in [*zip(w, g, strict=True), (x, dx)]:
        flat, found = array.reshape(-1), gradient.reshape(-1)
        for i in random.permutation(flat.size)[:25]:
            old, values = flat[i], []
            for sign in (1, -1):
                flat[i] = old + sign * h
                values.append(value())
            flat[i] = old
            assert found[i] == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-6, abs=1e-7)
    assert sum(map(len, layer.pool.free.values())) == len(layer.pool.bases) - 1  # all but dx is given back


def test_one_expert_is_the_plain_layer():
    for kind in ("gelu", "swiglu"):
        layer, w = made(kind, count=1, top=1)
        x, d = tokens(), tokens(1)
        y, saved = layer.forward(w, x, ALONE)
        dense, own = layer.network, [w[0], w[2][0], w[3][0]]
        wanted, kept = dense.forward(own, x, ALONE)
        np.testing.assert_allclose(y, wanted, rtol=1e-13, atol=1e-13)
        layer.experts = Experts(1, 1, 0, 0, 0)  # the further terms would reach dx
        g, dense_g = [np.zeros_like(each) for each in w], [np.zeros_like(each) for each in own]
        dx, wanted = layer.backward(w, saved, d.copy(), g, ALONE), dense.backward(own, kept, d.copy(), dense_g, ALONE)
        for a, b in [(dx, wanted), (g[0], dense_g[0]), (g[2][0], dense_g[1]), (g[3][0], dense_g[2])]:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
        assert not g[1].any()  # of one probability, which is 1


def test_equal_logits_of_all_experts_are_their_mean():
    layer, w = made("gelu", top=4)
    w[1][...] = 0
    x = tokens()
    n = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w[0]
    mean = sum(expert("gelu", n, w[2][e], w[3][e]) for e in range(4)) / 4
    np.testing.assert_allclose(layer.forward(w, x, ALONE)[0], x + mean, rtol=1e-12)


def test_a_tie_goes_to_the_lower_index_and_later_tokens_are_dropped():
    """With equal logits all tokens take experts 0 and 1; ceil(1 x 6 x 2 / 4) = 3 tokens of each sequence find room."""
    layer, w = made(capacity=1.0)
    w[1][...] = 0
    x = tokens()
    y, saved = layer.forward(w, x, ALONE)
    assert (saved[1].chosen == [0, 1]).all()
    changed = (y != x).any(axis=1).reshape(ROWS, LENGTH)
    assert (changed == (np.arange(LENGTH) < 3)).all()
    layer.backward(w, saved, tokens(1), [np.zeros_like(each) for each in w], ALONE)
    assert layer.counted.tolist() == [[18, 18, 0, 0], [9, 9, 0, 0]]


def test_dropless_is_a_capacity_for_all():
    bits = []
    for capacity in (0.0, 2.0):  # 2.0: of 4 experts with 2 choices, ceil(2 x 6 x 2 / 4) = 6 tokens, the whole sequence
        layer, w = made(capacity=capacity)
        bits.append(layer.forward(w, tokens(), ALONE)[0])
    assert np.array_equal(*bits)


def test_sequences_one_by_one_are_the_batch_to_the_bit():
    layer, w = made(capacity=0.8)
    x = tokens()
    whole = layer.forward(w, x, ALONE)[0].copy()
    parts = [layer.forward(w, x[k : k + LENGTH].copy(), ALONE)[0].copy() for k in range(0, len(x), LENGTH)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-13, atol=1e-13)


def test_products_left_for_later_are_the_same():
    """Zero-bubble pipelines compute them after backward has given its buffers back, and others have written there."""
    for kind in ("gelu", "swiglu"):
        layer, w = made(kind, shared=1)
        x, d, gradients = tokens(), tokens(1), []
        for products in (None, []):
            g = [np.zeros_like(each) for each in w]
            _, saved = layer.forward(w, x, ALONE)
            with layer.pool.leaving(products):
                layer.backward(w, saved, d.copy(), g, ALONE)
            for free in layer.pool.free.values():
                for buffer in free:
                    buffer[...] = np.nan
            for owner, a, b, into in products or []:
                owner.add_product(a, b, into)
            gradients.append(g)
        for one, other in zip(*gradients, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("kind, more", [("gpt", ""), ("llama", ""), ("llama", ",capacity=0.6,top=1,shared=2,dense=1")])
def test_generation_with_a_cache_is_a_forward_pass(kind, more):
    """Also the choices of earlier tokens, which take an expert's room, are those of the whole sequence."""
    model = make_model(f"{kind}:{SMALL},experts=4{more}", (LENGTH,), 9, "float64", text=True)
    w = model.initialize(Random(0))
    w += 0.5 * np.random.default_rng(2).standard_normal(model.size)
    told = model.generate(w, [3], LENGTH, np.random.default_rng(0), temperature=0)
    for n in range(1, LENGTH):
        x = np.zeros((1, LENGTH))
        x[0, :n] = [3, *told][:n]
        z, kept = model.forward(FlatWeights(model, w), x, range(len(model.layers) - 1))
        assert z.reshape(LENGTH, 9)[n - 1].argmax() == told[n - 1]
        model.release(kept)


def test_work_is_that_of_the_products():
    model = make_model(f"llama:{SMALL},experts=4,capacity=0.5", (LENGTH,), 9, "float64", text=True)
    layer, (dense,) = model.layers[2], [each for each in make_model(f"llama:{SMALL}", (LENGTH,), 9).layers[2:3]]
    forward, backward = work.operations(layer, ROWS)
    taken, t = ROWS * min(2 * LENGTH, 4 * 2), ROWS * LENGTH  # ceil(0.5 x 6 x 2 / 4) = 2 choices an expert
    grouped = sum(each.flops() for each in (*forward, *backward) if isinstance(each, work.GroupedProduct))
    assert grouped == 3 * 2 * taken * 3 * 8 * 6
    routers = sum(each.flops() for each in (*forward, *backward) if isinstance(each, work.Product))
    assert routers == 3 * 2 * t * 8 * 4 + 2 * taken * 6
    assert work.flops(work.operations(dense, ROWS)[0]) < 2 * work.flops(forward)
    assert work.moved(forward, 8) == 2 * work.moved(forward, 4) > 0
    shared = make_model(f"llama:{SMALL},experts=4,capacity=0.5,shared=2", (LENGTH,), 9, text=True).layers[2]
    more = [
        work.flops(each) - work.flops(part)
        for each, part in zip(work.operations(shared, ROWS), (forward, backward), strict=True)
    ]
    wider = make_model(f"llama:{SMALL}".replace("units=6", "units=12"), (LENGTH,), 9)
    plain_layer, norm = (work.operations(wider.layers[at], ROWS) for at in (2, -3))
    assert more == [work.flops(each) - work.flops(part) for each, part in zip(plain_layer, norm, strict=True)]


def test_matrices_of_experts_are_those_that_muon_updates():
    model = make_model(f"llama:{SMALL},experts=3,shared=2,dense=1,dense-units=7", (LENGTH,), 9, "float64", text=True)
    own = {tensor.name: tensor for tensor in model.layout.hidden if ".mlp." in tensor.name}
    matrices = ["up.weight", "down.weight"]
    assert [name.partition(".mlp.")[2] for name in own] == [*matrices * 2, *(f"shared.{each}" for each in matrices)]
    values = np.arange(model.size, dtype="float64")
    up, down = own["block2.mlp.up.weight"], own["block2.mlp.down.weight"]
    assert (up.matrix_shape, down.matrix_shape) == ((6, 6, 8), (3, 8, 6))
    shared = own["block2.mlp.shared.up.weight"]
    assert (shared.matrix_shape, own["block1.mlp.down.weight"].matrix_shape) == ((2, 12, 8), (1, 8, 7))
    for tensor, wanted in [
        (shared, [shared.view(values)[:, k].T for k in range(2)]),
        (up, [up.view(values)[e, :, k].T for e in range(3) for k in range(2)]),
        (down, [down.view(values)[e].T for e in range(3)]),
    ]:
        found = tensor.matrices(values[tensor.slice])
        assert len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize(
    "settings, told",
    [
        ("experts=2,top=3", "top 3 of 2 experts; take a top from 1 to 2"),
        ("experts=2,top=0", "take a top from 1 to 2"),
        ("experts=-1", "experts must be 1 or more"),
        ("experts=2,capacity=0", "capacity is none or a number greater than 0, as 1.25, not '0'"),
        ("experts=2,capacity=all", "not 'all'"),
        ("experts=2,balance=-1", "balance must be a finite number of at least 0, not -1"),
        ("experts=2,z=nan", "z must be a finite number"),
        ("experts=2,shared=-1", "shared must be 1 or more, or 0 for no shared experts, not -1"),
        ("experts=2,dense=4", "dense 4 of 4 blocks; take a number from 0 to 3"),
        ("dense=1", "shared, dense and dense-units are settings of a mixture: add experts=8"),
    ],
)
def test_settings_that_make_no_mixture(settings, told):
    with pytest.raises(UsageError, match=told):
        make_model(f"gpt:{settings}", (LENGTH,), 9, text=True)


def test_ranks_that_share_sequences_are_refused():
    model = make_model(f"llama:{SMALL},experts=3", (LENGTH,), 9, text=True)
    assert list(counted_choices(model)) == ["block1.mlp", "block2.mlp"]
    with pytest.raises(UsageError, match="cannot count the choices of experts"):
        check_context(model, 2, "ring")
