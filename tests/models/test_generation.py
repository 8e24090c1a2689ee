"""Generation with cached keys and values has the outputs of generation without a cache, also when the window moves."""

import numpy as np
import pytest

from hpcdl.models import generation, make_model
from hpcdl.models.generation import first_seen
from hpcdl.models.layered import FlatWeights
from hpcdl.random import Random


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 64])
def test_the_window_never_grows_beyond_the_positions_nor_below_their_half(length):
    seen = [known - first_seen(known, length) for known in range(1, 5 * length + 3)]
    assert seen[:length] == list(range(1, length + 1))
    assert all(max(1, length // 2) <= each <= length for each in seen[length:])
    for known in range(1, 5 * length + 2):
        moved = first_seen(known + 1, length) - first_seen(known, length)
        assert moved >= 0 and (moved == 0 or seen[known - 1] == length)  # it moves when it is full, and only then


def plain_outputs(model, parameters):
    """Return the function of the outputs after the last token; it computes the whole window for each token."""

    def outputs(tokens):
        seen = tokens[first_seen(len(tokens), model.features) :]
        x = np.zeros((1, model.features), model.dtype)
        x[0, : len(seen)] = seen  # attention is causal: the padding has no effect
        z, _ = model.forward(FlatWeights(model, parameters), x, range(len(model.layers) - 1))
        return z[len(seen) - 1].copy()

    return outputs


@pytest.mark.parametrize("dtype, near", [("float64", 1e-12), ("float32", 2e-5)])
@pytest.mark.parametrize(
    ("length", "context", "model"),
    [
        (8, 8, "gpt:head=tied"),
        (5, 9, "gpt:head=own"),
        (1, 4, "gpt:head=tied"),
        (8, 8, "gpt:norm=rms"),
        (5, 9, "gpt:positions=rotary"),
        (8, 8, "gpt:feed-forward=swiglu"),
        (5, 9, "gpt:kv-heads=2"),
        (8, 8, "gpt:biases=no"),
        (8, 9, "llama:kv-heads=2,units=8"),
        (8, 9, "gpt:positions=rotary,latent=6"),
        (5, 9, "llama:latent=6,query-latent=5,rope-width=4,head-width=3,units=8,experts=2,shared=1,dense=1"),
    ],
)
def test_kept_is_plain(length, context, model, dtype, near):
    model = make_model(f"{model},layers=2,width=16,heads=4,context={context}", (length,), 30, dtype)
    parameters = 3 * model.initialize(Random(1))
    tokens, plain = np.random.default_rng(0).integers(0, 30, 3 * length + 7).tolist(), plain_outputs(model, parameters)
    kept, late = (generation.cached_outputs(model, parameters) for _ in range(2))
    for known in range(1, len(tokens) + 1):
        wanted = plain(tokens[:known])
        np.testing.assert_allclose(kept(tokens[:known]), wanted, rtol=0, atol=near)
        if known >= 2 * length:  # a prompt of many tokens comes at once
            np.testing.assert_allclose(late(tokens[:known]), wanted, rtol=0, atol=near)
    np.testing.assert_allclose(kept(tokens[:2]), plain(tokens[:2]), rtol=0, atol=near)  # another prompt


def test_keys_and_values_are_those_of_kv_heads():
    """With 2 heads of keys for 8 of queries the cache is a fourth."""
    sizes = []
    for heads in (0, 2):
        model = make_model(f"gpt:layers=1,width=32,heads=8,context=8,kv-heads={heads}", (8,), 20)
        layer = generation.cached_layer(model.layers[1])
        sizes.append(layer.keys.size + layer.values.size)
    assert sizes == [2 * 32 * 8, 2 * 8 * 8]


def test_latents_are_cached_alone():
    """A token has latent + rope-width numbers in the cache: of DeepSeek-V3 576, 1/57 of its 2 x 128 x 128 of heads."""
    model = make_model("llama:layers=1,width=32,heads=8,context=8,latent=12,rope-width=4", (8,), 20)
    layer = generation.cached_layer(model.layers[1])
    assert layer.cache.size == (12 + 4) * 8
    assert sum(each.size for each in vars(layer).values() if isinstance(each, np.ndarray)) == layer.cache.size + 8


def test_a_token_costs_one_row_and_a_full_window_half_of_it():
    model = make_model("gpt:layers=1,width=8,heads=2,context=8", (8,), 20, "float64")
    parameters, rows = model.initialize(Random(0)), []
    matmul = model.layers[-2].matmul
    model.layers[-2].matmul = lambda a, b, out: (rows.append(len(a)), matmul(a, b, out=out))[1]  # the head
    model.generate(parameters, [1, 2, 3], 20, np.random.default_rng(0))
    assert rows == [3, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 4, 1, 1, 1, 1, 4, 1, 1, 1]
