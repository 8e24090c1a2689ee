"""Where the tensors of a module lie in flat vectors: its parameters in one, their gradients in another.

    module      conv.weight (8, 1, 3, 3)   conv.bias (8,)   head.weight (10, 1352)   head.bias (10,)
    vector      |<------- layer conv ------------------->|<-------------- layer head ------------->|

The order and the names are those of `named_parameters`, and so the keys of `state_dict`. A tensor that two modules
share is there once, under its first name; one that is frozen (requires_grad False) is not: nothing trains it.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.models.layout import Layout
from hpcdl.models.layout import Tensor as Place

TYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
LAZY = nn.parameter.UninitializedTensorMixin


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name, each once."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def prepare(module: nn.Module, dtype: np.dtype) -> None:
    """Let a module be of the run's type: in float64, what is of float32 is widened. Raises UsageError for any other."""
    for name, each in [*module.named_parameters(), *module.named_buffers()]:
        kind = "parameter" if isinstance(each, nn.Parameter) else "buffer"
        if isinstance(each, LAZY):
            raise UsageError(f"{kind} {name} gets its shape from the first batch; call the module once before")
        if each.device.type != "cpu":
            raise UsageError(f"{kind} {name} is on {each.device}; make the module on the CPU, --device moves it")
    wanted = TYPES[dtype]
    for name, parameter in trained(module).items():
        if parameter.dtype not in (torch.float32, wanted):
            raise UsageError(
                f"parameter {name} is of {parameter.dtype}, and the run is of {wanted}: convert the module"
            )
    if wanted is torch.float64:
        module.to(wanted)


def layout_of(module: nn.Module, dtype: np.dtype) -> Layout:
    """Where each parameter lies; a layer is a child of the module. Raises UsageError where there is none to train."""
    places, offset = [], 0
    for name, parameter in trained(module).items():
        layer = name.partition(".")[0] if "." in name else "module"
        places.append(Place(name, tuple(parameter.shape), offset, layer))
        offset += parameter.numel()
    if not places:
        raise UsageError("the module has no parameters to train")
    return Layout(places, dtype)


def as_tensor(array: Array) -> Tensor:
    """The array as a tensor, which shares its memory; a tensor of one that is locked must not be written."""
    if not CPU.holds(array):
        return torch.from_dlpack(array)  # type: ignore[no-any-return]
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def as_array(tensor: Tensor, device: Device = CPU) -> Array:
    """The tensor as an array of its device, which shares its memory; a single number as an array of one."""
    tensor = tensor.detach()
    tensor = tensor.view(1) if tensor.ndim == 0 else tensor
    return tensor.numpy() if device is CPU else device.xp.from_dlpack(tensor)


def place_of(device: Device) -> torch.device:
    """PyTorch's name of a device."""
    return torch.device("cpu") if device is CPU else torch.device("cuda", device.index)  # type: ignore[union-attr]


class Bound:
    """A module whose parameters and gradients are views of flat vectors, whichever they are at the moment.

    The vectors are kept until others take their place: what begins at the address of one of them is then the same
    memory, though the array may be another one.
    """

    def __init__(self, module: nn.Module, layout: Layout):
        self.names = list(layout.tensors)
        self.parameters = list(trained(module).values())
        self.slices = [tensor.slice for tensor in layout.tensors.values()]
        self.shapes = [tensor.shape for tensor in layout.tensors.values()]
        self.vectors: list[Array | None] = [None, None]  # of the parameters, and of the gradient
        self.views: list[list[Tensor]] = [[], []]
        self.starts: list[int] = []  # the address of each parameter
        self.hooks: list[Any] = []
        self.on_ready: Callable[[slice], None] | None = None
        self.done: set[int] = set()  # of which parameters the gradient is final

    def bind(self, vector: Array, gradient: Array | None = None) -> None:
        """Let the parameters be views of `vector`, and their gradients of `gradient`; None: as they were."""
        if self._is_new(0, vector):
            self.views[0] = self._views(vector)
            for each, view in zip(self.parameters, self.views[0], strict=True):
                each.data = view
            self.starts = [each.data_ptr() for each in self.parameters]
        if gradient is not None and self._is_new(1, gradient):
            self.views[1] = self._views(gradient)
            for each, view in zip(self.parameters, self.views[1], strict=True):
                each.grad = view

    def _is_new(self, which: int, vector: Array) -> bool:
        before = self.vectors[which]
        if before is vector:
            return False
        self.vectors[which] = vector
        return before is None or address(before) != address(vector) or CPU.holds(before) != CPU.holds(vector)

    def _views(self, vector: Array) -> list[Tensor]:
        whole = as_tensor(vector)
        return [whole[part].view(shape) for part, shape in zip(self.slices, self.shapes, strict=True)]

    def check(self) -> None:
        """Raise UsageError where a parameter is no longer where it was put: the module has replaced it."""
        for number, each in enumerate(self.parameters):
            if each.data_ptr() != self.starts[number] or each.shape != self.shapes[number]:
                raise UsageError(f"the module replaces its parameter {self.names[number]} while it computes")

    def release(self) -> None:
        """Give the parameters memory of their own, with the values that they have, and neither gradient nor hook."""
        self.tell(None)
        for each in self.parameters:
            each.data, each.grad = each.data.clone(), None
        self.forget()

    def forget(self) -> None:
        """Something else has moved the parameters, and their gradients."""
        self.vectors, self.views, self.starts = [None, None], [[], []], []

    # -- gradients as they become final ------------------------------------------------------------------------------

    def tell(self, on_ready: Callable[[slice], None] | None) -> None:
        """From now on call on_ready(slice) as soon as a gradient is final; None: do not."""
        self.on_ready = on_ready
        if on_ready is not None and not self.hooks:
            self.hooks = [
                each.register_post_accumulate_grad_hook(self._hook(number))
                for number, each in enumerate(self.parameters)
            ]
        elif on_ready is None and self.hooks:
            for each in self.hooks:
                each.remove()
            self.hooks = []

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        part, name = self.slices[number], self.names[number]

        def ready(_: Tensor) -> None:
            if number in self.done:
                raise UsageError(
                    f"the gradient of {name} is added to a second time after it was final, as checkpointing with "
                    "use_reentrant=True does: take use_reentrant=False, or leave out --overlap"
                )
            self.done.add(number)
            assert self.on_ready is not None
            self.on_ready(part)

        return ready

    def tell_the_rest(self, on_ready: Callable[[slice], None]) -> None:
        """The gradients that nothing was added to are final, too; a step is over."""
        for number in reversed(range(len(self.slices))):
            if number not in self.done:
                on_ready(self.slices[number])
        self.done.clear()


def address(vector: Array) -> int:
    """Where a vector begins."""
    if CPU.holds(vector):
        return int(vector.__array_interface__["data"][0])
    return int(vector.__cuda_array_interface__["data"][0])  # type: ignore[attr-defined]
