"""--model torch:package.module:function,width=32: a function that makes a module from the shapes of the data.

Its arguments are its settings and, if it has such parameters, features (shape of an example), classes (0: regression),
outputs, dtype and class_weights. It returns the module, or (module, loss). The setting buffers=local goes to the model
(model.py)."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from hpcdl.errors import UsageError
from hpcdl.models import HALF
from hpcdl.models.part import require_layers
from hpcdl.plugins import TORCH, call_plugin, load_plugin
from hpcdl.torch.model import TorchModel
from hpcdl.torch.stages import stages_of

Maker: TypeAlias = Callable[[], tuple[nn.Module, Any]]  # returns (module, loss or None)


def make_torch_model(spec: str, offered: dict[str, Any]) -> TorchModel:
    """Return the model torch:package.module:function,... for the data described by `offered`. Raises UsageError."""
    make, settings = maker(spec, offered)
    module, loss = make()
    try:
        shape = {name: offered[name] for name in ("features", "classes", "outputs", "dtype", "device")}
        return TorchModel(module, loss, make=lambda: make()[0], **shape, **settings)
    except UsageError as error:
        raise UsageError(f"--model {spec}: {error}") from None


def require_chain(spec: str, offered: dict[str, Any]) -> None:
    """Raise UsageError if the module is no chain of layers. It is made without memory; one that cannot be, passes."""
    stages: Any = ()
    with contextlib.suppress(Exception), torch.device("meta"):
        stages = stages_of(maker(spec, offered)[0]()[0])
    if stages is None:
        require_layers(None)


def maker(spec: str, offered: dict[str, Any]) -> tuple[Maker, dict[str, Any]]:
    """Return the function that makes the module, and the settings that are the model's. Raises UsageError."""
    option = f"--model {spec}"
    function, settings = load_plugin(spec.removeprefix(TORCH), option)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    model_settings: dict[str, Any] = {
        name: settings.pop(name) for name in ("buffers",) if name in settings and name not in parameters
    }
    arguments = {name: offered[name] for name in ("features", "classes", "outputs", "dtype", "class_weights")}
    arguments["dtype"] = "float32" if arguments["dtype"] == HALF else arguments["dtype"]  # of its parameters

    def make() -> tuple[nn.Module, Any]:
        result = call_plugin(function, settings, arguments, option)
        module, loss = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(module, nn.Module):
            raise UsageError(f"{option}: the function returns a {type(module).__name__}, not a torch.nn.Module")
        return module, loss

    if "class_weights" not in parameters:  # else it has weighted its loss
        model_settings["class_weights"] = offered["class_weights"]
    return make, model_settings
