"""Buffers (such as batch norm's statistics) and frozen parameters of a module: its tensors that are not trained.

    key of state_dict            array, which shares memory with the module
    norm.running_mean            (8,)
    norm.num_batches_tracked     (1,): a single number is an array of one
    frozen.weight                (8, 4)

They are saved beside the parameters, except buffers that are not persistent and so not in `state_dict`."""

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
    """Context of a forward pass of `rows` rows. Raises UsageError if batch norm cannot normalize a single row."""
    try:
        yield
    except ValueError as error:
        if rows == 1 and any(isinstance(each, _BatchNorm) for module in modules for each in module.modules()):
            raise UsageError(
                "batch norm cannot normalize a single row, and a rank's share of the batch, or a micro-batch, has one "
                f"({reason(error)}); choose the batch size and the number of ranks so that no share has one row, also "
                "in the last batch of an epoch"
            ) from error
        raise


class ModuleBuffers:
    """The buffers and frozen parameters of a module, by name; changing: names of buffers, which forward may change."""

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
                raise UsageError(f"{name} is of {tensor.dtype}, which a checkpoint cannot hold; make it float32")
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
        """Return the arrays; copy values back from new tensors by which the module has replaced its buffers."""
        for name, owner, leaf, tensor in self.places:
            current = getattr(owner, leaf)
            if current is not tensor:
                if not isinstance(current, Tensor) or current.shape != tensor.shape:
                    raise UsageError(f"the module changes the shape of its buffer {name} while it computes")
                with torch.no_grad():
                    tensor.copy_(current)
                setattr(owner, leaf, tensor)
        return self.arrays
