"""Meta arrays have numpy's shapes, and a model on them takes from its pool what it takes with real arrays."""

import numpy as np
import pytest

from hpcdl.data.batch import Batch
from hpcdl.kernels.device import CPU
from hpcdl.memory import Memory
from hpcdl.models import make_model
from hpcdl.models.meta_arrays import META, MetaArray, matmul
from hpcdl.random import Random

DENSE = ["softmax", "mlp:7,5", "mlp:7,activation=gelu"]
TEXTS = ["gpt:width=8,heads=2,context=6", "gpt:width=8,heads=2,context=6,biases=no"]
TEXTS += ["llama:width=16,heads=4,context=6,units=5", "llama:width=16,heads=4,context=6,biases=yes"]
TEXTS += [f"{kind}:width=16,heads=4,context=6,units=5,experts=4,capacity=0.7" for kind in ("gpt", "llama")]


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.reshape(-1, 6),
        lambda a: a.reshape((4, 2, 3)),
        lambda a: a.transpose(2, 0, 1),
        lambda a: a.T,
        lambda a: a.swapaxes(0, 2),
        lambda a: a[1:],
        lambda a: a[0],
        lambda a: a[:, :-1],
        lambda a: a[1, 2],
        lambda a: a[..., None] if a is None else a[np.array([0, 1, 1])],
        lambda a: a.reshape(-1)[5:9],
        lambda a: list(a)[1],
        lambda a: a.copy(),
    ],
)
def test_views_have_numpys_shapes(view):
    real, outline = np.zeros((2, 3, 4), np.float32), MetaArray((2, 3, 4), np.float32)
    found, wanted = view(outline), view(real)
    assert len(found) == len(wanted)
    for name in ("shape", "dtype", "size", "nbytes", "ndim"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_views_know_the_whole_and_products_their_shapes():
    whole = MetaArray((6, 4), "float64")
    assert whole[2:].reshape(-1).base is whole and whole.copy().base is not whole
    assert matmul(whole, MetaArray((4, 3), "float64"), MetaArray((6, 3), "float64")).shape == (6, 3)
    with pytest.raises(ValueError, match="product"):
        matmul(whole, MetaArray((3, 4), "float64"), MetaArray((6, 4), "float64"))
    with pytest.raises(ValueError, match="shape"):
        whole.reshape(5, 5)


@pytest.mark.parametrize("spec", [*DENSE, *TEXTS])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_model_takes_from_its_pool_what_it_takes_with_real_arrays(spec, rows):
    text, peaks = spec in TEXTS, []
    for device in (CPU, META):
        model = make_model(spec, (6,), 3, device=device, text=text)
        model.pool.memory = memory = Memory()
        x, y = device.zeros((rows, 6), model.dtype), device.zeros((rows,), np.int64)
        w = model.initialize(Random(0)) if device is CPU else device.zeros(model.size, model.dtype)
        model.loss_and_gradient(w, Batch(x, y, rows, 0, 0, np.arange(rows)), device.zeros(model.size, model.dtype))
        peaks.append(memory.peak["activations"])
        assert memory.now["activations"] == 0
    assert peaks[0] == peaks[1] > 0


def test_the_largest_model_is_gone_through():
    model = make_model("gpt:layers=96,width=12288,heads=96,context=2048", (2048,), 50257, device=META, text=True)
    model.pool.memory = memory = Memory()
    w, x = MetaArray(model.size, "float32"), MetaArray((1, 2048), "float32")
    model.loss_and_gradient(w, Batch(x, MetaArray(1, np.int64), 1, 0, 0, np.arange(1)), w)
    assert model.size == 174_604_259_328 and 200e9 < memory.peak["activations"] < 250e9
