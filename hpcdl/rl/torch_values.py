"""A PyTorch module as a network of action values: one output for each action (q_network.py)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array, Device
from hpcdl.models.model import OnReady
from hpcdl.random import Random
from hpcdl.torch.module_factory import make_torch_model
from hpcdl.torch.tensors import as_tensor


def torch_values(spec: str, shape: tuple[int, ...], actions: int, dtype: str, device: Device, delta: float) -> Any:
    """Return the module of torch:package.module:function, whose outputs are action values."""
    offered = {"features": shape, "classes": actions, "outputs": (), "dtype": dtype, "device": device}
    return TorchValues(make_torch_model(spec, offered), shape, actions, delta)


class TorchValues:
    """A PyTorch module's model (hpcdl/torch/model.py) for observations of this shape. delta: of the Huber loss."""

    def __init__(self, model: Any, shape: tuple[int, ...], actions: int, delta: float):
        self.model, self.shape, self.actions, self.delta = model, shape, actions, delta
        self.layout = model.layout
        self.model.loss, self.model.summed = self.loss, True
        self.batch: Any = None  # a QBatch

    def initialize(self, random: Random) -> Array:
        parameters: Array = self.model.initialize(random)
        return parameters

    def values(self, parameters: Array, x: Array) -> Array:
        with self.model.scoring(parameters):
            output = self.checked(self.model.module(as_tensor(x)))
            return output.numpy() if output.device.type == "cpu" else self.model.device.xp.from_dlpack(output)

    def loss_and_gradient(self, parameters: Array, batch: Any, gradient: Array, on_ready: OnReady = None) -> float:
        self.batch = batch
        loss: float = self.model.loss_and_gradient(parameters, batch, gradient, on_ready)
        return loss

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the weighted losses of the actions taken; set the batch's errors."""
        given = (np.ascontiguousarray(each) for each in (self.batch.actions, self.batch.weights, self.batch.targets))
        actions, weights, targets = (torch.from_numpy(each).to(output.device) for each in given)
        error = self.checked(output).gather(1, actions[:, None])[:, 0] - targets
        size = error.abs()
        sendable_errors = size.clamp(max=self.delta)
        self.batch.errors = size.detach().cpu().numpy()
        return (weights * sendable_errors * (size - sendable_errors / 2)).sum()

    def checked(self, output: Tensor) -> Tensor:
        """Return the output; raises UsageError unless it has a value for each action."""
        if not isinstance(output, torch.Tensor) or output.shape[1:] != (self.actions,):
            shape = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else type(output).__name__
            raise UsageError(f"the module returns {shape} per observation, not {self.actions} values, one per action")
        return output
