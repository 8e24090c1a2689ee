"""PyTorch's modules as models, under every strategy; nothing else of hpcdl imports PyTorch.

    model.py      a module as a model: its parameters and gradients are views of flat vectors
    tensors.py    which tensors of a module lie where in them
    stages.py     a module that is a chain, as layers (layers.py): ranks can share it
    making.py     --model torch:package.module:function
    optimizer.py  --optimizer torch:AdamW
    dataset.py    a Dataset as a data set; workers.py: in processes of their own
    state.py      a state_dict, written and read
    backend.py    the backend `hpcdl` of torch.distributed, which this import registers

It is imported where it is asked for, by the spec or by a program of one's own, and needs `pip install 'hpcdl[torch]'`.
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
