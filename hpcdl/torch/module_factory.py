"""--model torch:package.module:function,width=32: a function that makes a module from the shapes of the data.

Its arguments are its settings and, if it has such parameters, features (shape of an example), classes (0: regression),
outputs, dtype and class_weights. It returns the module, or (module, loss). The setting buffers=local goes to the model
(model.py)."""

import inspect
from typing import Any

from torch import nn

from hpcdl.errors import UsageError
from hpcdl.models import HALF
from hpcdl.plugins import TORCH, call_plugin, load_plugin
from hpcdl.torch.model import TorchModel


def make_torch_model(spec: str, offered: dict[str, Any]) -> TorchModel:
    """Return the model torch:package.module:function,... for the data described by `offered`. Raises UsageError."""
    option = f"--model {spec}"
    function, settings = load_plugin(spec.removeprefix(TORCH), option)
    parameters = inspect.signature(function).parameters if callable(function) else {}
    model_settings = {name: settings.pop(name) for name in ("buffers",) if name in settings and name not in parameters}
    arguments = {name: offered[name] for name in ("features", "classes", "outputs", "dtype", "class_weights")}
    arguments["dtype"] = "float32" if arguments["dtype"] == HALF else arguments["dtype"]  # of its parameters

    def make() -> tuple[nn.Module, Any]:
        result = call_plugin(function, settings, arguments, option)
        module, loss = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(module, nn.Module):
            raise UsageError(f"{option}: the function returns a {type(module).__name__}, not a torch.nn.Module")
        return module, loss

    module, loss = make()
    try:
        shape = {name: offered[name] for name in ("features", "classes", "outputs", "dtype", "device")}
        weights = None if "class_weights" in parameters else offered["class_weights"]  # else it has weighted its loss
        return TorchModel(module, loss, make=lambda: make()[0], class_weights=weights, **shape, **model_settings)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
