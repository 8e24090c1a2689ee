"""PyTorch modules as models, under every strategy; the only room that imports PyTorch.

    model.py            a module as a model: its parameters and gradients are views of flat vectors
    tensors.py          the place of a module's tensors in them
    stages.py           a module that is a chain, as layers (layers.py) that ranks can share
    module_factory.py   --model torch:package.module:function
    optimizer.py        --optimizer torch:AdamW
    dataset.py          a Dataset as a data set; workers.py: its worker processes
    state.py            writes and reads a state_dict
    backend.py          the backend `hpcdl` of torch.distributed, which this import registers

It is imported only for a spec torch:... or by a user's program, and needs `pip install 'hpcdl[torch]'`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hpcdl.errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise UsageError(f"this needs PyTorch, which cannot be imported ({error}): pip install 'hpcdl[torch]'") from None

from hpcdl.torch.dataset import from_dataset
from hpcdl.torch.model import TorchModel
from hpcdl.torch.registration import register

if TYPE_CHECKING:
    from hpcdl.torch.groups import traffic, write_trace
    from hpcdl.torch.hook import CompressState, compress_hook

__all__ = ["CompressState", "TorchModel", "compress_hook", "from_dataset", "traffic", "write_trace"]
LATER = {"CompressState": "hook", "compress_hook": "hook", "traffic": "groups", "write_trace": "groups"}  # start MPI

register()


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
