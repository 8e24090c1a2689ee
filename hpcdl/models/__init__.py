"""Models: they compute losses and gradients into flat vectors, independent of MPI.

    spec                                        model                                        data
    linear                                      x w + b, half the squared error              regression
    logistic                                    logistic regression                          2 classes
    svm                                         support vector machine, linear               2 classes
    softmax                                     softmax regression                           2 classes or more
    mlp  mlp:256,128  mlp:64,activation=tanh    multi-layer perceptron (128 relu units)      2 classes or more,
                      mlp:64,activation=gelu                                                 or regression
    gpt  gpt:layers=4,width=128,heads=4,         transformer (these are what it has      text
         context=64,head=tied                    by itself), head: tied or own

All except gpt also accept sparse data (hpcdl/csr.py).

A user's model works under any strategy if it has the members `layout`, `initialize`, `loss_and_gradient` and `predict`
of hpcdl.models.layered.Layered; with `evaluate` it is scored in one forward pass. A model on a GPU has a member
`device`, and gets its batches there; one for sparse batches has `sparse = True`. The spec package.module:Class names
its class, package.module:Class,width=3 with arguments (hpcdl/plugins.py); arguments named features, classes, outputs,
dtype, device and loss are supplied. torch:package.module:function names a function that returns a PyTorch module
(hpcdl/torch/module_factory.py).
"""

import contextlib
import importlib
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError, parse_integer, parse_spec, refuse_beyond, unknown
from hpcdl.kernels.device import CPU, Device
from hpcdl.memory import available
from hpcdl.models.gpt import GPT
from hpcdl.models.layered import Layered
from hpcdl.models.layers import ACTIVATIONS
from hpcdl.models.layout import Layout
from hpcdl.models.linear import LinearRegression
from hpcdl.models.logistic import LogisticRegression
from hpcdl.models.mlp import MLP, Regression
from hpcdl.models.model import abilities_of
from hpcdl.models.svm import SVM
from hpcdl.plugins import call_plugin, is_plugin, load_plugin, of_torch

SETTINGS: dict[str, dict[str, Any]] = {"linear": {}, "logistic": {}, "svm": {}, "softmax": {}}
SETTINGS["mlp"] = {"activation": "relu"}
SETTINGS["gpt"] = {"layers": 4, "width": 128, "heads": 4, "context": 64, "head": "tied"}
DTYPES = ("float32", "float64")
HALF = "bfloat16"  # compute type of PyTorch modules with float32 parameters
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
) -> Any:
    """Return the model `spec` for examples of shape `features` with `classes` classes (0: regression).

    device: where it computes, and where its parameters, gradients and batches lie (hpcdl.kernels.device). outputs:
    shape of a row's values in a regression. loss: of a regression, squared or huber:delta=1. text: the examples are
    tokens. sparse: they are sparse rows. Raises UsageError for an unknown name or setting, a width that is not
    positive, a type other than float32 and float64 (and bfloat16, of torch:...), and a model that does not fit the
    data.
    """
    kind = str(dtype)
    with contextlib.suppress(TypeError):
        kind = np.dtype(dtype).name
    if kind == HALF and not of_torch(spec):
        raise UsageError(f"--dtype {HALF} is for a module of PyTorch's (--model torch:...); take float32 or float64")
    if kind not in (*DTYPES, HALF):
        raise unknown("dtype", kind, DTYPES)
    if of_torch(spec):
        offered = {"features": features, "classes": classes, "outputs": outputs, "dtype": kind, "device": device}
        if sparse or text:
            raise UsageError(f"--model {spec}: a module takes dense rows of numbers, and the data are others")
        # Imported by name: the room is above this one, and PyTorch is imported only on demand.
        model = importlib.import_module("hpcdl.torch.module_factory").make_torch_model(spec, offered)
    elif is_plugin(spec) and spec.partition(":")[0] not in SETTINGS:
        offered = {"features": features, "classes": classes, "outputs": outputs, "dtype": kind, "device": device}
        model = user_model(spec, offered | {"loss": loss}, kind)
        if sparse and not abilities_of(model).sparse:
            told = "a model that takes batches with data, indices and indptr says so by a member sparse = True"
            raise UsageError(f"--model {spec}: the data are sparse, and {told}; or make them dense")
    else:
        if sparse and spec.partition(":")[0] == "gpt":
            raise UsageError("model 'gpt' reads sequences of tokens, and the data are sparse rows; take softmax or mlp")
        model = built_in_model(spec, features, classes, kind, device, outputs, loss, text)
    with contextlib.suppress(AttributeError):  # a user's class may not allow the attribute
        model.spec = spec
    return model


def for_data(spec: str, data: Any, dtype: DTypeLike, device: Device = CPU, loss: str = "squared") -> Any:
    """Return the model `spec` for a data set (`features`, `classes`, `outputs`, `vocabulary`, `sparse`)."""
    shape: dict[str, Any] = {"outputs": data.outputs, "text": data.vocabulary is not None, "sparse": data.sparse}
    return make_model(spec, data.features, data.classes, dtype, device, loss=loss, **shape)


def built_in_model(
    spec: str,
    features: tuple[int, ...],
    classes: int,
    dtype: str,
    device: Device,
    outputs: tuple[int, ...],
    loss: str,
    text: bool,
) -> Layered:
    """Return a built-in model; for the parameters see `make_model`."""
    name, hidden, settings = parse_model(spec)
    size = math.prod(features)
    if text and name != "gpt":
        raise UsageError(f"model {name!r} takes quantities, and the data are a text, whose tokens are names; take gpt")
    if classes == 0:
        if name == "linear":
            return LinearRegression(size, dtype, device, outputs, loss)
        if name == "mlp":
            return Regression(size, dtype, hidden, device=device, outputs=outputs, loss=loss, **settings)
        raise UsageError(f"model {name!r} is a classifier, the data has no classes (regression); use linear or mlp")
    if loss != "squared":
        raise UsageError(
            f"loss {loss!r} is for regression; the data has {classes} classes, whose loss is cross-entropy"
        )
    if name == "linear":
        raise UsageError(f"model 'linear' is for regression, the data has {classes} classes; use softmax or mlp")
    if name in ("logistic", "svm"):
        if classes != 2:
            raise UsageError(f"model {name!r} is for 2 classes, the data has {classes}; use softmax or mlp")
        return (LogisticRegression if name == "logistic" else SVM)(size, dtype, device)
    if classes < 2:
        raise UsageError(f"model {name!r} needs data with at least 2 classes, not {classes}")
    if name == "gpt":
        if len(features) != 1:
            shape = " x ".join(map(str, features))
            raise UsageError(f"model 'gpt' reads sequences of tokens, not examples of {shape}; try --data text")
        head = settings.pop("head")
        if head not in ("tied", "own"):
            raise unknown("head of a gpt", head, ("tied", "own"))
        return GPT(size, classes, dtype, **settings, tied=head == "tied", device=device)
    return MLP(size, classes, dtype, hidden, **settings, device=device)


def user_model(spec: str, offered: dict[str, Any], dtype: str) -> Any:
    """Return a user's model: an instance of the class `spec`, made with the arguments of `offered` that it accepts.

    Raises UsageError, also for a class without a model's members, which is not called.
    """
    told = f"--model {spec}"
    found, settings = load_plugin(spec, told)
    if not isinstance(found, type):
        raise UsageError(f"{told}: a model is a class, and that is {'a function' if callable(found) else 'none'}")
    if missing := [name for name in MEMBERS if not callable(getattr(found, name, None))]:
        raise UsageError(f"{told}: the class has no {', '.join(missing)}; a model has layout, {', '.join(MEMBERS)}")
    model = call_plugin(skip_empty_batches(found), settings, offered, told)
    if not isinstance(getattr(model, "layout", None), Layout):
        raise UsageError(f"{told}: its member layout should be a hpcdl.models.layout.Layout")
    if model.layout.dtype != np.dtype(dtype):
        raise UsageError(f"{told}: its layout is of {model.layout.dtype}; let it take dtype, or add --dtype")
    return model


def skip_empty_batches(found: type) -> type:
    """Return the class with empty batches skipped, which ranks get of small batches: their gradient is zero."""

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
    """Return name, widths of the hidden layers (`mlp` only, 128 by default), and settings of a spec."""
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
