"""PyTorch modules as models, under every strategy; the only room that imports PyTorch (`pip install 'hpcdl[torch]'`).

A spec torch:... or a user's program imports it; the import registers the backend `hpcdl` of torch.distributed."""

import importlib
from typing import TYPE_CHECKING, Any

from hpcdl.errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise UsageError(f"this needs PyTorch, which cannot be imported ({error}): pip install 'hpcdl[torch]'") from None

from hpcdl.torch.dataset import from_dataset
from hpcdl.torch.launch_variables import set_variables
from hpcdl.torch.model import TorchModel
from hpcdl.torch.registration import register
from hpcdl.torch.sequence import attention, positions

if TYPE_CHECKING:
    from hpcdl.torch.groups import traffic, write_trace
    from hpcdl.torch.hook import CompressState, compress_hook

__all__ = [
    "CompressState",
    "TorchModel",
    "attention",
    "compress_hook",
    "from_dataset",
    "positions",
    "traffic",
    "write_trace",
]
LATER = {"CompressState": "hook", "compress_hook": "hook", "traffic": "groups", "write_trace": "groups"}  # start MPI

register()
set_variables()


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
