"""What every optimizer shares: the step count, the learning rate of the step, clipping, and the checks.

An update of parameters w by the sum of gradients g over a batch, with scale = 1 / (examples of the batch):

    1. norm clipping, where asked for: scale <- scale * min(1, clip_norm / (scale |g|))    (Pascanu et al., ICML 2013)
    2. the rule's one pass over w, g and its state (kernels/updates.py)

The mean gradient and the weight decay are formed inside that pass, so g is left as it is and nothing is allocated. An
optimizer may hold a slice of the model only: all is element by element, but for the norm, which its caller then gives.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, Device, device_of
from hpcdl.kernels.norm import sum_of_squares


class Optimizer(ABC):
    """An update rule with its state: flat vectors by name (`state`), and the number of updates done (`step`).

    since: the updates that were done when the state was last zero.

    size, dtype: of the parameter vector or slice. schedule(step): learning rate. weight_decay, clip_norm: 0 is none.
    device: where parameters, gradient and state lie.
    """

    vectors: tuple[str, ...] = ()

    def __init__(
        self,
        size: int,
        dtype: DTypeLike,
        schedule: Callable[[int], float],
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        device: Device = CPU,
    ):
        if not 0 <= weight_decay < math.inf:
            raise UsageError(f"the weight decay is zero or positive, not {weight_decay}")
        if not 0 <= clip_norm < math.inf:
            raise UsageError(f"the norm to clip at is positive, or zero for no clipping, not {clip_norm}")
        self.size, self.dtype, self.schedule, self.device = size, np.dtype(dtype), schedule, device
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.state = {name: device.zeros(size, dtype) for name in self.vectors}
        self.step = self.since = 0

    def of_size(self, size: int) -> "Optimizer":
        """The same rule for a slice of `size` elements, with a state of its own, at its first step."""
        other = copy.copy(self)
        other.size, other.step, other.since = size, 0, 0
        other.state = {name: self.device.zeros(size, self.dtype) for name in self.state}
        return other

    def over(self, part: slice) -> "Optimizer":
        """The same rule for a slice of the vector, with that slice of this one's state; it counts its own steps."""
        other = copy.copy(self)
        other.size = part.stop - part.start
        other.state = {name: vector[part] for name, vector in self.state.items()}
        return other

    def update(
        self,
        parameters: Array,
        gradient: Array,
        scale: float = 1.0,
        norm: float | None = None,
        rate: float | None = None,
    ) -> None:
        """Update `parameters` (size,) in place by the mean gradient, gradient * scale.

        norm: the 2-norm of the whole gradient before scaling, where `gradient` is a slice of it; for clipping only.
        rate: the learning rate, where it is not that of the schedule at this step.
        Raises UsageError where an array does not fit.
        """
        for array in (parameters, gradient):
            if array.shape != (self.size,) or array.dtype != self.dtype or not self.device.writable(array):
                wanted = f"writable, contiguous {self.dtype} vectors of {self.size} elements"
                found = f"a {array.dtype} array of shape {array.shape}"
                if not self.device.holds(array):
                    wanted, found = f"{wanted} on {self.device}", f"{found} on {device_of(array)}"
                raise UsageError(f"this optimizer updates {wanted}, not {found}")
        if self.clip_norm > 0:
            norm = scale * (math.sqrt(sum_of_squares(gradient)) if norm is None else norm)
            if norm > self.clip_norm:
                scale *= self.clip_norm / norm
        self.apply(parameters, gradient, self.schedule(self.step) if rate is None else rate, scale)
        self.step += 1

    def reset(self) -> None:
        """Forget the gradients so far: the state is zero again, as before the first update; the schedule goes on."""
        for vector in self.state.values():
            vector[:] = 0
        self.since = self.step

    @abstractmethod
    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        """The rule's own pass over w, g and its state, at this learning rate."""


def check_decay_rate(name: str, value: float) -> None:
    """Raise UsageError unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise UsageError(f"{name} is at least 0 and less than 1, not {value}")
