"""A PyTorch module as a network of action values: one output for each action (q_network.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.random import Random
from hpcdl.rl.q_network import QBatch
from hpcdl.torch.tensors import as_tensor


class TorchValues:
    """`model`, a module as a model (hpcdl/torch/model.py), for observations of this shape; delta: of the Huber loss."""

    def __init__(self, model: Any, shape: tuple[int, ...], actions: int, delta: float):
        self.model, self.shape, self.actions, self.delta = model, shape, actions, delta
        self.layout = model.layout
        self.model.loss, self.model.summed = self.loss, True
        self.batch: QBatch | None = None

    def rows(self, count: int) -> tuple[int, ...]:
        """Return the shape of `count` observations as the module takes them."""
        return count, *self.shape

    def initialize(self, random: Random) -> Array:
        """Return the module's initial parameters, drawn with the run's seed."""
        parameters: Array = self.model.initialize(random)
        return parameters

    def values(self, parameters: Array, x: Array) -> Array:
        """Return Q (rows, actions)."""
        with self.model.scoring(parameters):
            output = self.checked(self.model.module(as_tensor(x)))
            return output.numpy() if output.device.type == "cpu" else self.model.device.xp.from_dlpack(output)

    def loss_and_gradient(
        self, parameters: Array, batch: QBatch, gradient: Array, on_ready: Callable[[slice], None] | None = None
    ) -> float:
        """As `QNetwork.loss_and_gradient`."""
        self.batch = batch
        loss: float = self.model.loss_and_gradient(parameters, batch, gradient, on_ready)
        return loss

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the weighted losses of the actions taken, summed over rows; fill in the batch's errors."""
        assert self.batch is not None
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
            raise UsageError(f"the module gives {shape} for an observation, and there are {self.actions} actions")
        return output
