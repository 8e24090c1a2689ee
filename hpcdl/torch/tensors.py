"""The place of a module's tensors in flat vectors: parameters in one, gradients in another.

    module      conv.weight (8, 1, 3, 3)   conv.bias (8,)   head.weight (10, 1352)   head.bias (10,)
    vector      |<------- layer conv ------------------->|<-------------- layer head ------------->|

Order and names are those of `named_parameters`, and so the keys of `state_dict`. A tensor shared by two modules occurs
once, under its first name; a frozen tensor (requires_grad False) does not occur."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.models.layout import OUTPUTS_FIRST, Layout
from hpcdl.models.layout import Tensor as Place

TYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
LAZY = nn.parameter.UninitializedTensorMixin


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that training changes, each once."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def prepare(module: nn.Module, dtype: np.dtype) -> None:
    """Widen a float32 module for a float64 run. UsageError for other types, lazy tensors, tensors off the CPU."""
    for name, each in [*module.named_parameters(), *module.named_buffers()]:
        kind = "parameter" if isinstance(each, nn.Parameter) else "buffer"
        if isinstance(each, LAZY):
            raise UsageError(f"{kind} {name} gets its shape from the first batch; call the module on a batch first")
        if each.device.type != "cpu":
            raise UsageError(f"{kind} {name} is on {each.device}; make the module on the CPU: --device moves it")
    target = TYPES[dtype]
    for name, parameter in trained(module).items():
        if parameter.dtype not in (torch.float32, target):
            computes = f"and the run computes in {target}"
            raise UsageError(f"parameter {name} is of {parameter.dtype}, {computes}: convert the module")
    if target is torch.float64:
        module.to(target)


def layout_of(module: nn.Module, dtype: np.dtype) -> Layout:
    """Return the layout of the parameters; a layer is a child of the module. UsageError without parameters."""
    places, offset, hidden = [], 0, hidden_weights(module)
    for name, parameter in trained(module).items():
        layer = name.partition(".")[0] if "." in name else "module"
        order = OUTPUTS_FIRST if id(parameter) in hidden else ""
        places.append(Place(name, tuple(parameter.shape), offset, layer, order))
        offset += parameter.numel()
    if not places:
        raise UsageError("the module has no parameters to train")
    return Layout(places, dtype)


def hidden_weights(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that Muon updates as matrices: those with two axes, and weights of convolutions,
    but for embeddings (also tied ones) and for the output layer, the last module with such a weight."""
    embeddings, found = set(), []
    for each in module.modules():
        own = [weight for weight in each.parameters(recurse=False) if weight.requires_grad]
        if isinstance(each, nn.Embedding | nn.EmbeddingBag):
            embeddings |= {id(weight) for weight in own}
            continue
        convolves = isinstance(each, nn.modules.conv._ConvNd)
        matrices = {id(weight) for weight in own if weight.ndim == 2 or (convolves and weight.ndim > 2)}
        if matrices:
            found.append(matrices)
    return set().union(*found[:-1]) - embeddings - set().union(*found[-1:])


def as_tensor(array: Array) -> Tensor:
    """Return the array as a tensor that shares its memory; a tensor of a read-only array must not be written."""
    if not CPU.holds(array):
        return torch.from_dlpack(array)  # type: ignore[no-any-return]
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def as_array(tensor: Tensor, device: Device = CPU) -> Array:
    """Return the tensor as an array on its device that shares its memory; a single number as an array of one."""
    tensor = tensor.detach()
    tensor = tensor.view(1) if tensor.ndim == 0 else tensor
    return tensor.numpy() if device is CPU else device.xp.from_dlpack(tensor)


def place_of(device: Device) -> torch.device:
    return torch.device("cpu") if device is CPU else torch.device("cuda", device.index)  # type: ignore[union-attr]


class FlatBinding:
    """Binds a module's parameters and gradients to flat vectors, as views. The vectors stay referenced until
    other vectors replace them: so an equal address is the same memory, even of another array object."""

    def __init__(self, module: nn.Module, layout: Layout):
        self.names = list(layout.tensors)
        self.parameters = list(trained(module).values())
        self.slices = [tensor.slice for tensor in layout.tensors.values()]
        self.shapes = [tensor.shape for tensor in layout.tensors.values()]
        self.vectors: list[Array | None] = [None, None]  # parameters, gradient
        self.views: list[list[Tensor]] = [[], []]
        self.starts: list[int] = []  # the address of each parameter
        self.hooks: list[Any] = []
        self.on_ready: Callable[[slice], None] | None = None
        self.done: set[int] = set()  # parameters whose gradient is final

    def bind(self, vector: Array, gradient: Array | None = None) -> None:
        """Make the parameters views of `vector`, and their gradients views of `gradient`; None: unchanged."""
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
        current = self.vectors[which]
        if current is vector:
            return False
        self.vectors[which] = vector
        return current is None or address(current) != address(vector) or CPU.holds(current) != CPU.holds(vector)

    def _views(self, vector: Array) -> list[Tensor]:
        whole = as_tensor(vector)
        return [whole[part].view(shape) for part, shape in zip(self.slices, self.shapes, strict=True)]

    def check(self) -> None:
        """Raise UsageError if the module has replaced one of its parameters."""
        for number, each in enumerate(self.parameters):
            if each.data_ptr() != self.starts[number] or each.shape != self.shapes[number]:
                raise UsageError(f"the module replaces its parameter {self.names[number]} while it computes")

    def release(self) -> None:
        """Copy the parameters into memory of their own; remove gradients and hooks."""
        self.tell(None)
        for each in self.parameters:
            each.data, each.grad = each.data.clone(), None
        self.forget()

    def forget(self) -> None:
        """Forget the vectors, after other code has moved the parameters and their gradients."""
        self.vectors, self.views, self.starts = [None, None], [[], []], []

    def tell(self, on_ready: Callable[[slice], None] | None) -> None:
        """Call on_ready(slice) from now on when a gradient is final; None: stop."""
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
                cause = "as by activation checkpointing with use_reentrant=True"
                advice = "take use_reentrant=False, or leave out --overlap"
                raise UsageError(f"the gradient of {name} has changed after it was final, {cause}: {advice}")
            self.done.add(number)
            assert self.on_ready is not None
            self.on_ready(part)

        return ready

    def report_rest(self, on_ready: Callable[[slice], None]) -> None:
        """Report the gradients that backward did not touch, and end the step."""
        for number in reversed(range(len(self.slices))):
            if number not in self.done:
                on_ready(self.slices[number])
        self.done.clear()


def address(vector: Array) -> int:
    if CPU.holds(vector):
        return int(vector.__array_interface__["data"][0])
    return int(vector.__cuda_array_interface__["data"][0])  # type: ignore[attr-defined]
