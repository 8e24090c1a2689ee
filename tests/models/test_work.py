"""The counted operations of a layer are those that it performs: every product and every kernel."""

import collections

import numpy as np
import pytest

from hpcdl.data.batch import Batch
from hpcdl.errors import UsageError
from hpcdl.models import attention, feed_forward, group, latent_attention, losses, make_model, transformer
from hpcdl.models.layers import ACTIVATIONS
from hpcdl.models.normalization import NORMALIZATIONS
from hpcdl.models.work import AttentionCall, KernelCall, Product, flops, moved, operations
from hpcdl.random import Random

ROWS = 3
MODELS = dict.fromkeys(["mlp:7,5", "mlp:6,activation=tanh", "mlp:6,activation=gelu", "softmax"], ((4,), 3, {}))
MODELS |= {"linear": ((4,), 0, {})}
SMALL = "layers=1,width=8,heads=4,context=5"
SETTINGS = ["norm=rms", "positions=rotary", "feed-forward=swiglu,units=6", "kv-heads=2", "biases=no", "units=6"]
LATENT = "latent=3,query-latent=2,rope-width=4,head-width=5"
TEXTS = [
    f"gpt:{SMALL}",
    f"llama:{SMALL},units=6,latent=3",
    f"llama:{SMALL},units=6,{LATENT}",
    *(f"gpt:{SMALL},{each}" for each in SETTINGS),
    f"llama:{SMALL},units=6",
]
MODELS |= dict.fromkeys(TEXTS, ((5,), 11, {"text": True}))


@pytest.fixture
def done(monkeypatch):
    """Return (list of products and kernels called since, with sizes; a function that makes a layer list its own)."""
    found = []

    def watched(name, kernel):
        def call(first, *rest):
            main = rest[-1] if name in ("embed", "squared") else first
            main = rest[0] if name == "embed_backward" else main
            rows, columns = main.shape if main.ndim == 2 else (main.size, 1)
            columns = rest[1] if name == "rotate" else columns
            found.append(KernelCall(name, rows * columns if columns == 1 else rows, columns))
            return kernel(first, *rest)

        call.__name__ = name
        return staticmethod(call)

    places = {
        transformer.activation: ["add_bias", "add_bias_residual", "add_rows"],
        attention.rotary: ["rotate"],
        feed_forward.swiglu: ["swiglu", "swiglu_backward"],
        transformer.embedding: ["embed", "embed_backward", "add_positions", "add_positions_backward"],
        transformer: ["add_into"],
        latent_attention: ["add_into"],
        losses: ["scale"],
    }
    for module, names in places.items():
        for name in names:
            monkeypatch.setattr(module, name, watched(name, getattr(module, name)).__func__)

    def watched_attention(name, kernel):
        def call(qkv, *rest):
            length, size = (each for each in rest if isinstance(each, int))
            heads = rest[-1].shape[1] if name == "causal_attention" else rest[2].shape[1]
            kv_heads = (qkv.shape[1] // size - heads) // 2
            found.append(AttentionCall(name, len(qkv), length, heads, kv_heads, size))
            return kernel(qkv, *rest)

        return call

    for name in ("causal_attention", "causal_attention_backward"):
        kernel = getattr(group.attention, name)
        monkeypatch.setattr(group.attention, name, watched_attention(name, kernel))
    for kind in NORMALIZATIONS.values():
        for name in ("kernel", "backward_kernel"):
            kernel = getattr(kind, name)
            monkeypatch.setattr(kind, name, watched(kernel.__name__, kernel))
    for kind in ACTIVATIONS.values():
        for name in ("add_bias", "slope"):
            kernel = getattr(kind, name)
            monkeypatch.setattr(kind, name, watched(kernel.__name__, kernel))
    for kind, name in ((losses.SoftmaxCrossEntropy, "softmax_cross_entropy"), (losses.Squared, "squared")):
        monkeypatch.setattr(kind, "kernel", watched(name, kind.kernel))

    def watch(layer):
        if hasattr(layer, "matmul"):
            product = layer.matmul

            def matmul(a, b, out):
                of_weight = bool(adding)
                found.append(Product(a.shape[-2], a.shape[-1], b.shape[-1], int(np.prod(a.shape[:-2])), of_weight))
                return product(a, b, out=out)

            layer.matmul = matmul
            add, adding = layer.add_product, []

            def add_product(a, b, into):
                adding.append(True)
                add(a, b, into)
                adding.pop()
                found.append(KernelCall("add_into", into.size, apart=True))  # numpy's, after the product

            layer.add_product = add_product

    return found, watch


def made(spec):
    features, classes, more = MODELS[spec]
    model = make_model(spec, features, classes, **more)
    random = np.random.default_rng(0)
    x = random.integers(0, max(2, classes), (ROWS, *features)).astype(np.float32)
    y = np.zeros(ROWS, np.int64 if classes else np.float32)
    return model, Batch(x, y, ROWS, 0, 0, np.arange(ROWS))


@pytest.mark.parametrize("spec", MODELS)
def test_products_and_kernels(spec, done):
    found, watch = done
    model, batch = made(spec)
    for layer in model.layers:
        watch(layer)
    parameters = model.initialize(Random(0))
    model.loss_and_gradient(parameters, batch, np.zeros_like(parameters))
    said = [each for layer in model.layers for part in operations(layer, ROWS) for each in part]
    assert collections.Counter(found) == collections.Counter(said) and len(said) >= 4


def test_flops_and_bytes_of_a_dense_layer():
    layer = made("mlp:7,5")[0].layers[1]
    forward, backward = operations(layer, 10)
    assert flops(forward) == 2 * 10 * 7 * 5 + 2 * 10 * 5
    assert moved(forward, 4) == 4 * (10 * 7 + 7 * 5 + 10 * 5 + 2 * 10 * 5)
    assert flops(backward) == 2 * 2 * 10 * 7 * 5 + 3 * 10 * 5 + 7 * 5
    assert moved(backward, 8) == 2 * moved(backward, 4)


def test_the_first_layer_has_no_gradient_by_its_input():
    model, _ = made("mlp:7,5")
    assert sum(isinstance(each, Product) for each in operations(model.layers[0], 2)[1]) == 1


def test_flops_of_attention():
    """Two products a score forward, five backward, and only of keys that are not in the future."""
    forward, backward = (AttentionCall(f"causal_attention{end}", 10, 5, 3, 3, 4) for end in ("", "_backward"))
    scores = 3 * 2 * (1 + 2 + 3 + 4 + 5)
    assert (forward.products(), backward.products()) == (2 * 2 * 4 * scores, 5 * 2 * 4 * scores)


def test_bytes_of_grouped_attention():
    """q and a have 6 heads, k and v 2; backward also moves their gradients."""
    forward, backward = (AttentionCall(f"causal_attention{end}", 10, 5, 6, 2, 4) for end in ("", "_backward"))
    assert forward.moved(4) == 4 * 10 * (2 * 6 * 4 + 2 * 2 * 4 + 6)
    assert backward.moved(4) == 4 * 10 * (4 * 6 * 4 + 4 * 2 * 4 + 6)


def test_what_is_not_counted():
    with pytest.raises(UsageError, match="a layer of type Hinge are not counted; take a model softmax"):
        operations(make_model("svm", (3,), 2).layers[-1], 2)
