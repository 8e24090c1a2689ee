"""What a module holds beside what is trained: buffers, as batch norm's statistics, and frozen parameters.

    key of state_dict            array, which shares memory with the module
    norm.running_mean            (8,)
    norm.num_batches_tracked     (1,): a single number is an array of one
    frozen.weight                (8, 4)

Those and no others are saved beside the parameters; a buffer that is not persistent is no part of `state_dict` either.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcdl.errors import UsageError, reason
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.torch.tensors import as_array

WHOLE = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
HELD = (*WHOLE, torch.float16, torch.float32, torch.float64)  # the types that a checkpoint holds


@contextlib.contextmanager
def statistics_of(modules: Iterable[nn.Module], rows: int) -> Iterator[None]:
    """Run a forward of so many rows. UsageError where batch norm finds no variance, for they are but one."""
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
    """The buffers and the frozen parameters of a module, by their names. changing: the names of the buffers."""

    def __init__(self, module: nn.Module, device: Device = CPU):
        kept = module.state_dict().keys()
        found: dict[str, Tensor] = dict(module.named_buffers())
        self.changing = [name for name in found if name in kept]
        found |= {name: each for name, each in module.named_parameters() if not each.requires_grad}
        self.places: list[tuple[str, nn.Module, str, Tensor]] = []
        self.arrays: dict[str, Array] = {}
        for name, tensor in found.items():
            if name not in kept:
                continue
            if tensor.dtype not in HELD:
                raise UsageError(f"{name} is of {tensor.dtype}, which no checkpoint holds; make it a float32 tensor")
            above, _, leaf = name.rpartition(".")
            owner = module.get_submodule(above)
            if not tensor.is_contiguous() or tensor.is_inference():
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.contiguous()
                else:
                    tensor = tensor.contiguous().clone()
                    setattr(owner, leaf, tensor)
            self.places.append((name, owner, leaf, tensor))
            self.arrays[name] = as_array(tensor, device)

    def settle(self) -> dict[str, Array]:
        """The arrays; where the module has put another tensor in a buffer's place, its values go to the one known."""
        for name, owner, leaf, tensor in self.places:
            now = getattr(owner, leaf)
            if now is not tensor:
                if not isinstance(now, Tensor) or now.shape != tensor.shape:
                    raise UsageError(f"the module changes the shape of its buffer {name} while it computes")
                with torch.no_grad():
                    tensor.copy_(now)
                setattr(owner, leaf, tensor)
        return self.arrays
