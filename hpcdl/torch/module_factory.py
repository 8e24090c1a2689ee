"""--model torch:package.module:function,width=32: a function that makes a module, from what the data are.

It takes of features (the shape of an example), classes (0: regression), outputs and dtype what it wants, by name, and
its settings; it returns the module, or (module, loss). buffers=local, among the settings, is the model's (model.py).
"""

import inspect
from typing import Any

from torch import nn

from hpcdl.errors import UsageError
from hpcdl.models import HALF
from hpcdl.plugins import TORCH, made, own
from hpcdl.torch.model import TorchModel


def make_torch_model(spec: str, offered: dict[str, Any]) -> TorchModel:
    """The model that torch:package.module:function,... names; offered: features, classes, outputs, dtype, device.

    Raises UsageError, one line.
    """
    told = f"--model {spec}"
    function, settings = own(spec.removeprefix(TORCH), told)
    takes = inspect.signature(function).parameters if callable(function) else {}
    beside = {name: settings.pop(name) for name in ("buffers",) if name in settings and name not in takes}
    known = {name: offered[name] for name in ("features", "classes", "outputs", "dtype")}
    known["dtype"] = "float32" if known["dtype"] == HALF else known["dtype"]  # of its parameters

    def make() -> tuple[nn.Module, Any]:
        found = made(function, settings, known, told)
        module, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(module, nn.Module):
            raise UsageError(f"{told}: it returns a {type(module).__name__}, and should return a torch.nn.Module")
        return module, loss

    module, loss = make()
    try:
        shape = {name: offered[name] for name in ("features", "classes", "outputs", "dtype", "device")}
        return TorchModel(module, loss, make=lambda: make()[0], **shape, **beside)
    except UsageError as error:
        raise UsageError(f"{told}: {error}") from None
