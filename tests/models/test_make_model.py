"""Model specs: what they make, and one clear line for each that is wrong."""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.feed_forward import FEED_FORWARDS


@pytest.mark.parametrize(
    ("spec", "classes", "widths"),
    [
        ("linear", 0, [1]),
        ("mlp:9", 0, [9, 1]),
        ("logistic", 2, [1]),
        ("softmax", 2, [2]),
        ("softmax", 10, [10]),
        ("mlp", 10, [128, 10]),
        ("mlp:", 10, [128, 10]),
        ("mlp:256,128", 10, [256, 128, 10]),
        ("mlp:activation=tanh", 3, [128, 3]),
        ("mlp:9,activation=tanh", 3, [9, 3]),
        ("mlp:9,9", 3, [9, 9, 3]),
    ],
)
def test_widths(spec, classes, widths):
    model = make_model(spec, (2, 3), classes)
    biases = [tensor.shape[0] for tensor in model.layout.tensors.values() if len(tensor.shape) == 1]
    assert biases == widths


@pytest.mark.parametrize("dtype", ["float32", "float64", np.float32, np.dtype("float64")])
def test_dtypes(dtype):
    assert make_model("softmax", (3,), 2, dtype).dtype == np.dtype(dtype)


def test_settings_of_a_gpt():
    """By default 4 blocks of width 128 with 4 heads, room for 64 tokens, and one table for tokens and head."""
    tensors = make_model("gpt", (9,), 50).layout.tensors
    assert tensors["embedding.token"].shape == (50, 128) and tensors["embedding.position"].shape == (64, 128)
    assert sum(name.endswith("qkv.weight") for name in tensors) == 4 and "head.weight" not in tensors
    model = make_model("gpt:layers=1,width=12,heads=3,context=10,head=own", (9,), 50)
    assert model.layout.tensors["head.weight"].shape == (50, 12) and model.layers[1].heads == 3
    assert model.layout.tensors["embedding.position"].shape == (10, 12) and model.features == 9


def test_settings_of_a_llama():
    """It is a gpt with these settings; swiglu's units are 8/3 of the width, rounded up to a multiple of 256."""
    small = "layers=1,width=12,heads=6,kv-heads=3"
    told = "norm=rms,positions=rotary,rope-base=500000,feed-forward=swiglu,biases=no,head=own"
    tensors = make_model(f"llama:{small}", (9,), 50).layout.describe()
    assert tensors == make_model(f"gpt:{small},{told}", (9,), 50).layout.describe()
    assert {tensor["name"]: tensor["shape"] for tensor in tensors} == {
        "embedding.token": [50, 12],
        "block1.attention.norm.gain": [12],
        "block1.attention.qkv.weight": [12, 4, 6],  # 6 heads of q as 2 rows of 3, then k and v
        "block1.attention.out.weight": [2, 6, 12],
        "block1.mlp.norm.gain": [12],
        "block1.mlp.up.weight": [12, 2, 256],
        "block1.mlp.down.weight": [256, 12],
        "norm.gain": [12],
        "head.weight": [50, 12],
    }
    assert make_model("llama", (9,), 50).layers[1].kv_heads == 2
    for width, units in ((384, 1024), (385, 1280), (4096, 11008)):  # Llama's of 7 * 10^9 parameters has 11008
        assert FEED_FORWARDS["swiglu"].default_units(width) == units


def test_biases_and_norms_of_each_setting():
    """A setting adds and takes away its own tensors alone."""
    names = {}
    for settings in ("norm=layer", "norm=rms", "positions=rotary", "biases=no"):
        names[settings] = set(make_model(f"gpt:layers=1,width=8,heads=2,{settings}", (9,), 50).layout.tensors)
    whole = names.pop("norm=layer")
    assert {settings: sorted(whole - each) for settings, each in names.items()} == {
        "norm=rms": ["block1.attention.norm.bias", "block1.mlp.norm.bias", "norm.bias"],
        "positions=rotary": ["embedding.position"],
        "biases=no": [f"block1.{end}.bias" for end in ("attention.out", "attention.qkv", "mlp.down", "mlp.up")],
    }


@pytest.mark.parametrize(
    ("spec", "classes", "how", "message"),
    [
        ("gpt", 50, {"features": (8, 8)}, "'gpt' reads sequences of tokens, not examples of 8 x 8; try --data text"),
        ("gpt", 50, {"features": (65,)}, "sequences have 65 tokens, the model's context is 64; take gpt:context=65"),
        ("gpt:width=10", 50, {"features": (8,)}, "width 10 cannot be divided evenly among 4 heads"),
        ("gpt:layers=0", 50, {"features": (8,)}, "layers must be 1 or more, not 0"),
        ("gpt:width=0", 50, {"features": (8,)}, "width must be 1 or more, not 0"),
        ("gpt:heads=-1", 50, {"features": (8,)}, "heads must be 1 or more, not -1"),
        ("gpt:context=0", 50, {"features": (8,)}, "context must be 1 or more, not 0"),
        ("gpt:head=loose", 50, {"features": (8,)}, "unknown head of a gpt 'loose'.* known: own, tied"),
        ("llama:width=10", 50, {"features": (8,)}, "model llama: width 10 cannot be divided evenly among 4 heads"),
        ("llama", 50, {"features": (65,)}, "context is 64; take llama:context=65"),
        ("llama:heads=8,kv-heads=3", 50, {"features": (8,)}, "8 cannot .* among kv-heads 3; take 1, 2, 4, 8$"),
        ("llama:kv-heads=-1", 50, {"features": (8,)}, "kv-heads must be 1 or more, or 0 for the default, not -1"),
        ("gpt:units=-1", 50, {"features": (8,)}, "units must be 1 or more, or 0 for the default, not -1"),
        ("llama:width=12,heads=4", 50, {"features": (8,)}, "turn pairs, and heads have 3 elements each"),
        ("llama:rope-base=0", 50, {"features": (8,)}, "rope-base must be a finite number greater than 0"),
        ("llama:rope-base=nan", 50, {"features": (8,)}, "rope-base must be a finite number greater than 0"),
        ("gpt:norm=rmsnorm", 50, {"features": (8,)}, "unknown norm of a gpt 'rmsnorm'.* known: layer, rms"),
        ("gpt:positions=rope", 50, {"features": (8,)}, "unknown positions of a gpt 'rope'.* known: learned, rotary"),
        ("gpt:feed-forward=relu", 50, {"features": (8,)}, "unknown feed-forward of a gpt 'relu'.* gelu, swiglu"),
        ("gpt:biases=0", 50, {"features": (8,)}, "unknown biases of a gpt '0'.* known: no, yes"),
        (
            "gpt:latent=8",
            50,
            {"features": (8,)},
            "latent attention has rotary positions: add positions=rotary, or take",
        ),
        ("llama:latent=-8", 50, {"features": (8,)}, "latent must be 1 or more, or 0 for the default, not -8"),
        ("llama:latent=8,rope-width=3", 50, {"features": (8,)}, "rope-width is 3; take an even number"),
        ("llama:head-width=8", 50, {"features": (8,)}, "settings of latent attention: add latent=64"),
        ("llama", 3, {"sparse": True}, "'llama' reads sequences of tokens, and the data are sparse rows"),
        ("llama", 50, {"features": (8, 8)}, "'llama' reads sequences of tokens, not examples of 8 x 8"),
        ("gpt:depth=3", 50, {"features": (8,)}, "no setting 'depth'"),
        ("gpt:64", 50, {"features": (8,)}, "no setting '64'"),
        ("gpt:layers=x", 50, {"features": (8,)}, "x"),
        ("gpt", 0, {}, "'gpt' is a classifier, the data has no classes"),
        ("gpt", 1, {}, "'gpt' needs data with at least 2 classes, not 1"),
        (
            "mpl",
            10,
            {},
            r"unknown model 'mpl' \(did you mean 'mlp'\?\); known: gpt, linear, llama, logistic, mlp, softmax",
        ),
        ("", 10, {}, "unknown model ''"),
        ("mlp:0", 10, {}, "positive whole number, not '0'"),
        ("mlp:64,-3", 10, {}, "positive whole number, not '-3'"),
        ("mlp:1.5", 10, {}, "positive whole number, not '1.5'"),
        ("mlp:tanh", 10, {}, "positive whole number, not 'tanh'"),
        ("mlp:activation=tan", 10, {}, r"unknown activation 'tan' \(did you mean 'tanh'\?\)"),
        ("mlp:width=3", 10, {}, "no setting 'width'"),
        ("softmax:10", 10, {}, "no setting '10'"),
        ("linear", 10, {}, "'linear' is for regression, the data has 10 classes"),
        ("logistic", 3, {}, "'logistic' is for 2 classes, the data has 3"),
        ("logistic", 0, {}, "'logistic' is a classifier, the data has no classes"),
        ("softmax", 0, {}, "'softmax' is a classifier, the data has no classes"),
        ("softmax", 1, {}, "'softmax' needs data with at least 2 classes, not 1"),
        ("mlp:4", 1, {}, "'mlp' needs data with at least 2 classes, not 1"),
        ("mlp", 0, {"loss": "hubert"}, r"unknown loss 'hubert' \(did you mean 'huber'\?\)"),
        ("mlp", 0, {"loss": "huber:delta=0"}, "delta must be a finite number greater than 0"),
        ("mlp", 0, {"loss": "huber:delta=nan"}, "delta must be a finite number greater than 0"),
        ("mlp", 3, {"loss": "huber"}, "loss 'huber' is for regression; the data has 3 classes"),
        ("mlp", 3, {"text": True}, "'mlp' takes quantities, and the data are the tokens of a text; take gpt"),
        ("softmax", 3, {"text": True}, "take gpt"),
        ("gpt", 3, {"sparse": True}, "reads sequences of tokens, and the data are sparse rows; take softmax"),
    ],
)
def test_wrong_specs(spec, classes, how, message):
    with pytest.raises(UsageError, match=message) as caught:
        make_model(spec, **{"features": (3,), "classes": classes} | how)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "int64", "single precision", None.__class__])
def test_wrong_dtypes(dtype):
    with pytest.raises(UsageError, match=r"unknown dtype .* known: float32, float64"):
        make_model("softmax", (3,), 2, dtype)
