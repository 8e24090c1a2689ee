"""Models: they compute losses and gradients into flat vectors, independent of MPI.

    spec                                        model                                        data
    linear                                      x w + b, half the squared error              regression
    logistic                                    logistic regression                          2 classes
    svm                                         support vector machine, linear               2 classes
    softmax                                     softmax regression                           2 classes or more
    mlp  mlp:256,128  mlp:64,activation=tanh    multi-layer perceptron (128 relu units)      2 classes or more,
                      mlp:64,activation=gelu                                                 or regression
    gpt  gpt:layers=4,width=128,heads=4,         transformer (these are the defaults),   text
         context=64,head=tied                    head: tied or own; gpt.py has more settings
    llama  llama:layers=4,width=128,heads=4,     gpt with RMSNorm, rotary positions,     text
           kv-heads=2,context=64,units=512       SwiGLU, grouped queries, no biases
    gpt:experts=8,top=2  llama:experts=8        the same with mixtures of experts            text
    llama:latent=64                             the same with latent attention               text

All except gpt and llama also accept sparse data (hpcdl/csr.py). A user's model works under any strategy that needs no
layers and no linear form, if it has the members `layout`, `initialize`, `loss_and_gradient` and `predict` of
models/layered.py. With `evaluate` it is scored in one forward pass. A model on a GPU has a member `device`, on which
its batches lie; a model for sparse batches has `sparse = True`. Its spec is package.module:Class, or
package.module:Class,width=3 with arguments (hpcdl/plugins.py); arguments named features, classes, outputs, dtype,
device, loss and class_weights (of the losses in training, by class; None: all 1) are supplied.
torch:package.module:function names a function that returns a PyTorch module (hpcdl/torch/module_factory.py)."""

import contextlib
import importlib
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, parse_integer, parse_spec, refuse_beyond, unknown
from hpcdl.kernels.device import CPU, Device
from hpcdl.memory import available
from hpcdl.models.gpt import GPT, choice
from hpcdl.models.layered import Layered
from hpcdl.models.layers import ACTIVATIONS
from hpcdl.models.layout import Layout
from hpcdl.models.losses import Hinge, Logistic, SoftmaxCrossEntropy, regression_loss
from hpcdl.models.mlp import MLP
from hpcdl.models.model import abilities_of
from hpcdl.plugins import call_plugin, is_plugin, load_plugin, of_torch, takes

__all__ = ["make_model"]

SETTINGS: dict[str, dict[str, Any]] = {"linear": {}, "logistic": {}, "svm": {}, "softmax": {}}
SETTINGS["mlp"] = {"activation": "relu"}
SETTINGS["gpt"] = {"layers": 4, "width": 128, "heads": 4, "context": 64, "head": "tied"}
SETTINGS["gpt"] |= {"kv-heads": 0, "norm": "layer", "positions": "learned", "rope-base": 10_000.0}
SETTINGS["gpt"] |= {"feed-forward": "gelu", "units": 0, "biases": "yes"}
SETTINGS["gpt"] |= {"experts": 0, "top": 2, "capacity": "none", "balance": 0.01, "z": 0.001}
SETTINGS["gpt"] |= {"shared": 0, "dense": 0, "dense-units": 0}
SETTINGS["gpt"] |= {"latent": 0, "query-latent": 0, "rope-width": 0, "head-width": 0}
SETTINGS["llama"] = SETTINGS["gpt"] | {"kv-heads": 2, "norm": "rms", "positions": "rotary", "rope-base": 500_000.0}
SETTINGS["llama"] |= {"feed-forward": "swiglu", "biases": "no", "head": "own"}
TRANSFORMERS = ("gpt", "llama")  # models of sequences of tokens
DTYPES = ("float32", "float64")
HALF = "bfloat16"  # a PyTorch module computes in this type, with float32 parameters
MEMBERS = ("initialize", "loss_and_gradient", "predict")  # required members, beside the layout
LAYER = 10_000  # approximate bytes of a layer object, for any width


def make_model(
    spec: str,
    features: tuple[int, ...],
    classes: int,
    dtype: DTypeLike = "float32",
    device: Device = CPU,
    *,
    outputs: tuple[int, ...] = (),
    loss: str = "squared",
    text: bool = False,
    sparse: bool = False,
    class_weights: np.ndarray | None = None,
) -> Any:
    """Return the model `spec` for examples of shape `features` with `classes` classes (0: regression).

    device: where the model computes, and parameters, gradients and batches lie. outputs: shape of the values that a
    regression predicts for a row. loss: of a regression, squared or huber:delta=1. text: True if examples are tokens.
    sparse: True if examples are sparse rows. class_weights (classes,): factors of the losses of rows in training, by
    their class; None: all 1. Raises UsageError for an unknown name or setting, a width that is not
    positive, a type except float32, float64 and (torch:... only) bfloat16, and a model that does not fit the data."""
    kind = str(dtype)
    with contextlib.suppress(TypeError):
        kind = np.dtype(dtype).name
    if kind == HALF and not of_torch(spec):
        raise UsageError(f"--dtype {HALF} is only for PyTorch modules (--model torch:...); take float32 or float64")
    if kind not in (*DTYPES, HALF):
        raise unknown("dtype", kind, DTYPES)
    offered: Any = {"features": features, "classes": classes, "outputs": outputs, "dtype": kind, "device": device}
    weighted = {"class_weights": class_weights}
    if of_torch(spec):
        if sparse or text:
            raise UsageError(f"--model {spec}: a PyTorch module takes dense rows of numbers, no sparse rows, no text")
        # Imported by name: the room is above this one, and PyTorch is imported only on demand.
        model = importlib.import_module("hpcdl.torch.module_factory").make_torch_model(spec, offered | weighted)
    elif is_plugin(spec) and spec.partition(":")[0] not in SETTINGS:
        model = user_model(spec, offered | weighted | {"loss": loss}, kind)
        if sparse and not abilities_of(model).sparse:
            told = "set sparse = True in the class if it takes batches with data, indices and indptr"
            raise UsageError(f"--model {spec} is not for sparse data; {told}, or make the data dense")
    else:
        if sparse and (name := spec.partition(":")[0]) in TRANSFORMERS:
            reads = f"model {name!r} reads sequences of tokens"
            raise UsageError(f"{reads}, and the data are sparse rows; take softmax or mlp")
        model = built_in_model(spec, loss, text, **offered)
        if class_weights is not None:
            model.layers[-1].class_weights = device.array(class_weights.astype(kind))
    with contextlib.suppress(AttributeError):  # a user's class may not allow the attribute
        model.spec = spec
    return model


def for_data(
    spec: str,
    data: Any,
    dtype: DTypeLike,
    device: Device = CPU,
    loss: str = "squared",
    class_weights: np.ndarray | None = None,
) -> Any:
    """Return the model `spec` for `data`, which has features, classes, outputs, vocabulary (None: no text), sparse."""
    shape: dict[str, Any] = {"outputs": data.outputs, "text": data.vocabulary is not None, "sparse": data.sparse}
    how: dict[str, Any] = {"loss": loss, "class_weights": class_weights}
    return make_model(spec, data.features, data.classes, dtype, device, **how, **shape)


def built_in_model(
    spec: str, loss: str, text: bool, features: tuple, classes: int, outputs: tuple, dtype: str, device: Device
) -> Layered:
    """Return a built-in model; for the parameters see `make_model`."""
    name, hidden, settings = parse_model(spec)
    size, activation = math.prod(features), settings.get("activation", "none")
    if text and name not in TRANSFORMERS:
        raise UsageError(f"model {name!r} takes quantities, and the data are the tokens of a text; take gpt")
    if classes == 0:
        if name in ("linear", "mlp"):
            widths = [size, *hidden, math.prod(outputs)]
            return MLP(widths, activation, lambda pool: regression_loss(loss, pool, outputs), dtype, device)
        raise UsageError(f"model {name!r} is a classifier, the data has no classes (regression); use linear or mlp")
    if loss != "squared":
        raise UsageError(f"loss {loss!r} is for regression; the data has {classes} classes: leave out --loss")
    if name == "linear":
        raise UsageError(f"model 'linear' is for regression, the data has {classes} classes; use softmax or mlp")
    if name in ("logistic", "svm"):
        if classes != 2:
            raise UsageError(f"model {name!r} is for 2 classes, the data has {classes}; use softmax or mlp")
        return MLP([size, 1], "none", Logistic if name == "logistic" else Hinge, dtype, device)
    if classes < 2:
        raise UsageError(f"model {name!r} needs data with at least 2 classes, not {classes}")
    if name in TRANSFORMERS:
        if len(features) != 1:
            shape = " x ".join(map(str, features))
            raise UsageError(f"model {name!r} reads sequences of tokens, not examples of {shape}; try --data text")
        tied = choice("head", settings.pop("head"), ("tied", "own")) == "tied"
        biases = choice("biases", settings.pop("biases"), ("yes", "no")) == "yes"
        more = {setting.replace("-", "_"): value for setting, value in settings.items()}
        return GPT(size, classes, dtype, **more, tied=tied, biases=biases, device=device, name=name)
    widths = [size, *hidden, classes]
    return MLP(widths, activation, lambda pool: SoftmaxCrossEntropy(pool, classes), dtype, device)


def user_model(spec: str, offered: dict[str, Any], dtype: str) -> Any:
    """Return an instance of the user's class `spec`, made with the arguments of `offered` that the class accepts.
    Raises UsageError if it is no model of `dtype`; a class that lacks a model's members is not called at all."""
    told = f"--model {spec}"
    found, settings = load_plugin(spec, told)
    if not isinstance(found, type):
        raise UsageError(f"{told}: a model is a class, not an object of the type {type(found).__name__}")
    if missing := [name for name in MEMBERS if not callable(getattr(found, name, None))]:
        raise UsageError(f"{told}: the class has no {', '.join(missing)}; a model has layout, {', '.join(MEMBERS)}")
    if offered["class_weights"] is not None and not takes(found, "class_weights"):
        raise UsageError(f"--class-weight: {told} takes no argument class_weights; add one, and weigh the losses by it")
    model = call_plugin(skip_empty_batches(found), settings, offered, told)
    if not isinstance(getattr(model, "layout", None), Layout):
        raise UsageError(f"{told}: the model's member layout must be a hpcdl.models.layout.Layout")
    if model.layout.dtype != np.dtype(dtype):
        other = f"the model's layout has the dtype {model.layout.dtype}, the run {dtype}"
        raise UsageError(f"{told}: {other}; let the class take an argument dtype, or add --dtype")
    return model


def skip_empty_batches(found: type) -> type:
    """Return a subclass that skips empty batches (a rank's part of a small batch may be empty): gradient 0, loss 0."""

    def loss_and_gradient(self: Any, parameters: Any, batch: Any, gradient: Any, on_ready: Any = None) -> float:
        if len(batch.y):
            extra = () if on_ready is None else (on_ready,)
            return found.loss_and_gradient(self, parameters, batch, gradient, *extra)  # type: ignore[attr-defined]
        if on_ready is not None:
            on_ready(slice(0, len(gradient)))
        return 0.0

    same = {"__module__": found.__module__, "__qualname__": found.__qualname__, "__doc__": found.__doc__}
    return type(found)(found.__name__, (found,), same | {"loss_and_gradient": loss_and_gradient})


def parse_model(spec: str) -> tuple[str, tuple[int, ...], dict]:
    """Return (name, widths, settings) of a spec. widths: of mlp's hidden layers, by default (128,); else ()."""
    name, _, rest = spec.partition(":")
    items = [item for item in rest.split(",") if item]
    hidden = () if name != "mlp" else tuple(item for item in items if "=" not in item)
    rest = ",".join(item for item in items if item not in hidden)
    name, settings = parse_spec("model", f"{name}:{rest}", SETTINGS)
    for width in hidden:
        with contextlib.suppress(ValueError):
            if width.isdecimal() and parse_integer(width) > 0:
                continue
        raise UsageError(f"model {spec!r}: the width of a hidden layer is a positive whole number, not {width!r}")
    layers = len(hidden) + settings.get("layers", 0)
    refuse_beyond(f"model {spec!r}, by the number of its layers,", LAYER * layers, available())
    activation = settings.get("activation", "none")
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    return name, tuple(map(int, hidden)) or ((128,) if name == "mlp" else ()), settings
