"""What every optimizer shares: the step count, the learning rate of the step, clipping, and the checks.

An update of parameters w by the sum of gradients g over a batch, with scale = 1 / (examples of the batch):

    1. norm clipping, where asked for: scale <- scale * min(1, clip_norm / (scale |g|))    (Pascanu et al., ICML 2013)
    2. the rule's one pass over w, g and its state (kernels/updates.py)
    3. average <- average + (w - average) / k, where averaging has begun k updates before  (Polyak and Juditsky, 1992)

The mean gradient and the weight decay are formed inside that pass, so g is left as it is and nothing is allocated. An
optimizer may hold a slice of the model only: all is element by element, but for the norm, which its caller then gives.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError
from hpcdl.kernels import updates
from hpcdl.kernels.device import CPU, Array, Device, device_of
from hpcdl.kernels.norm import sum_of_squares

AVERAGE = "average"  # the vector of the state that is the mean of parameters


class Optimizer(ABC):
    """An update rule with its state: flat vectors by name (`state`), and the number of updates done (`step`).

    since: the updates that were done when the state was last zero.
    average_from: the update, from 0, with which the mean of the parameters begins, that is kept as the state `average`;
    None: there is none. averaged: how many are in it.

    size, dtype: of the parameter vector or slice. schedule(step): learning rate. weight_decay, clip_norm: 0 is none.
    device: where parameters, gradient and state lie.
    """

    vectors: tuple[str, ...] = ()
    rests = False  # whether the rule leaves alone a coordinate, and its state, as long as its d is zero

    def __init__(
        self,
        size: int,
        dtype: DTypeLike,
        schedule: Callable[[int], float],
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        device: Device = CPU,
        average_from: int | None = None,
    ):
        if not 0 <= weight_decay < math.inf:
            raise UsageError(f"the weight decay is zero or positive, not {weight_decay}")
        if not 0 <= clip_norm < math.inf:
            raise UsageError(f"the norm to clip at is positive, or zero for no clipping, not {clip_norm}")
        self.size, self.dtype, self.schedule, self.device = size, np.dtype(dtype), schedule, device
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.average_from = average_from
        names = self.vectors if average_from is None else (*self.vectors, AVERAGE)
        self.state = {name: device.zeros(size, dtype) for name in names}
        self.step = self.since = 0

    @property
    def averaged(self) -> int:
        """How many updates the state `average` is the mean of."""
        return 0 if self.average_from is None else max(0, self.step - self.average_from)

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

    @property
    def sparse(self) -> bool:
        """Whether a coordinate whose gradient is zero stays as it is: then those that are not may be updated alone."""
        return self.rests and self.weight_decay == 0 and self.average_from is None

    @property
    def additive(self) -> bool:
        """Whether an update adds what depends on its gradient and rate alone, not on parameters or a state."""
        return self.sparse and not self.vectors

    def update_at(self, index: np.ndarray, parameters: Array, gradient: Array, *scale_norm_rate: Any) -> None:
        """`update` of the elements with these numbers alone, each once; both arrays hold these elements."""
        part = copy.copy(self)
        part.size, part.state = len(index), {name: vector[index] for name, vector in self.state.items()}
        part.update(parameters, gradient, *scale_norm_rate)
        for name, vector in part.state.items():
            self.state[name][index] = vector
        self.step = part.step

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
        if self.averaged:
            updates.average(self.state[AVERAGE], parameters, 1 / self.averaged)

    def reset(self) -> None:
        """Forget the gradients so far: the state is zero, as before the first update; schedule and average go on."""
        for name in self.vectors:
            self.state[name][:] = 0
        self.since = self.step

    @abstractmethod
    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        """The rule's own pass over w, g and its state, at this learning rate."""


def check_decay_rate(name: str, value: float) -> None:
    """Raise UsageError unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise UsageError(f"{name} is at least 0 and less than 1, not {value}")
