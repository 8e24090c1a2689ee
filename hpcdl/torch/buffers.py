"""Buffers (such as batch norm's statistics) and frozen parameters of a module: what it holds beside trained ones.

    key of state_dict            array, which shares memory with the module
    norm.running_mean            (8,)
    norm.num_batches_tracked     (1,): a single number is an array of one
    frozen.weight                (8, 4)

These are saved beside the parameters; a buffer that is not persistent is not part of `state_dict` either.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcdl.errors import UsageError, reason
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.torch.tensors import as_array

INTEGERS = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
STORED = (*INTEGERS, torch.float16, torch.float32, torch.float64)  # types that a checkpoint can hold


@contextlib.contextmanager
def statistics_of(modules: Iterable[nn.Module], rows: int) -> Iterator[None]:
    """Context of a forward pass of so many rows. Raises UsageError if batch norm has no variance of one row."""
    try:
        yield
    except ValueError as error:
        if rows == 1 and any(isinstance(each, _BatchNorm) for module in modules for each in module.modules()):
            raise UsageError(
                "batch norm has no statistics of one row, which is a rank's share of a batch, or a micro-batch "
                f"({reason(error)}); choose the batch size and the ranks so that each share has two rows or more, also "
                "of an epoch's last batch, or none"
            ) from error
        raise


class ModuleBuffers:
    """The buffers and the frozen parameters of a module, by name. changing: names of the buffers."""

    def __init__(self, module: nn.Module, device: Device = CPU):
        persistent = module.state_dict().keys()
        tensors: dict[str, Tensor] = dict(module.named_buffers())
        self.changing = [name for name in tensors if name in persistent]
        tensors |= {name: each for name, each in module.named_parameters() if not each.requires_grad}
        self.places: list[tuple[str, nn.Module, str, Tensor]] = []
        self.arrays: dict[str, Array] = {}
        for name, tensor in tensors.items():
            if name not in persistent:
                continue
            if tensor.dtype not in STORED:
                raise UsageError(f"{name} is of {tensor.dtype}, which no checkpoint holds; make it a float32 tensor")
            parent, _, leaf = name.rpartition(".")
            owner = module.get_submodule(parent)
            if not tensor.is_contiguous() or tensor.is_inference():
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.contiguous()
                else:
                    tensor = tensor.contiguous().clone()
                    setattr(owner, leaf, tensor)
            self.places.append((name, owner, leaf, tensor))
            self.arrays[name] = as_array(tensor, device)

    def settle(self) -> dict[str, Array]:
        """Return the arrays; copies back and restores buffers that the module has replaced by new tensors."""
        for name, owner, leaf, tensor in self.places:
            current = getattr(owner, leaf)
            if current is not tensor:
                if not isinstance(current, Tensor) or current.shape != tensor.shape:
                    raise UsageError(f"the module changes the shape of its buffer {name} while it computes")
                with torch.no_grad():
                    tensor.copy_(current)
                setattr(owner, leaf, tensor)
        return self.arrays
