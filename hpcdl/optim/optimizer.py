"""The base of all optimizers: step count, learning rate, clipping, averaging and checks.

An update of parameters w by the sum of gradients g over a batch, with scale = 1 / (examples of the batch):

    1. norm clipping, if enabled: scale <- scale * min(1, clip_norm / (scale |g|))    (Pascanu et al., ICML 2013)
    2. one pass of the rule over w, g and the rule's state (kernels/updates.py)
    3. average <- average + (w - average) / k at the k-th update of the average       (Polyak and Juditsky, 1992)

The pass computes the mean gradient and adds the weight decay: g stays unchanged, nothing is allocated. An optimizer may
update a slice of the model: all steps except the norm |g| are elementwise, and the caller passes the norm. A rule with
`weights` updates these tensors as whole matrices (muon.py), and a slice only without them."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.errors import UsageError
from hpcdl.kernels import updates
from hpcdl.kernels.device import CPU, Array, Device, device_of
from hpcdl.kernels.norm import sum_of_squares

AVERAGE = "average"  # name of the state vector with the mean of the parameters


class Optimizer(ABC):
    """An update rule with its state: flat vectors by name (`state`), and the number of updates done (`step`).

    since: value of `step` at the last reset. average_from: number, from 0, of the first update whose result enters the
    parameters' mean, the state vector `average`; None: no mean. averaged: number of results in the mean. size, dtype:
    of each vector. schedule(step): learning rate. weight_decay, clip_norm: 0 for none. device: where vectors lie."""

    vectors: tuple[str, ...] = ()
    skips_zero_gradient = False  # True if a coordinate with d = 0 and its state stay unchanged
    weights: Sequence[Any] = ()  # the tensors (hpcdl/models/layout.py) that the rule updates as whole matrices
    workspace: Array | None = None  # memory beside the state that an update needs

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
        return 0 if self.average_from is None else max(0, self.step - self.average_from)

    def of_size(self, size: int) -> "Optimizer":
        """Return the same rule for a slice of `size` elements, at step 0 and with new state."""
        other = copy.copy(self)
        other.size, other.step, other.since = size, 0, 0
        other.state = {name: self.device.zeros(size, self.dtype) for name in self.state}
        return other

    def over(self, part: slice) -> "Optimizer":
        """Return the same rule for the slice `part`, with views of this optimizer's state and a copy of its `step`."""
        other = copy.copy(self)
        other.size = part.stop - part.start
        other.state = {name: vector[part] for name, vector in self.state.items()}
        return other

    @property
    def sparse(self) -> bool:
        """True if a coordinate with gradient 0 stays unchanged, so that an update can skip it."""
        return self.skips_zero_gradient and self.weight_decay == 0 and self.average_from is None

    @property
    def additive(self) -> bool:
        """True if the update depends on gradient and rate alone, not on parameters or state."""
        return self.sparse and not self.vectors

    def update_at(self, index: np.ndarray, parameters: Array, gradient: Array, *scale_norm_rate: Any) -> None:
        """Update only the elements numbered `index` (distinct), which parameters and gradient hold; see `update`."""
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
        """Update `parameters` (size,) in place by the mean gradient, gradient * scale. UsageError: arrays do not fit.
        norm: 2-norm of the whole unscaled gradient; None: that of `gradient`. rate: learning rate; None: schedule's."""
        for array in (parameters, gradient):
            if array.shape != (self.size,) or array.dtype != self.dtype or not self.device.writable(array):
                wanted = f"writable, contiguous {self.dtype} vectors of {self.size} elements"
                found = f"a {array.dtype} array of shape {array.shape}"
                if not self.device.holds(array):
                    wanted, found = f"{wanted} on {self.device}", f"{found} on {device_of(array)}"
                raise UsageError(f"this optimizer updates {wanted}, not {found}")
        if self.clip_norm > 0:
            scale = self.clipped(scale, math.sqrt(sum_of_squares(gradient)) if norm is None else norm)
        self.apply(parameters, gradient, self.schedule(self.step) if rate is None else rate, scale)
        self.step += 1
        if self.averaged:
            updates.average(self.state[AVERAGE], parameters, 1 / self.averaged)

    def clipped(self, scale: float, norm: float | None) -> float:
        """Return the scale of a gradient with 2-norm `norm` after clipping; None: without clipping."""
        if norm is None or not scale * norm > self.clip_norm:
            return scale
        return scale * (self.clip_norm / (scale * norm))

    def reset(self) -> None:
        """Set the state to zero, as before the first update; the schedule and the average continue."""
        for name in self.vectors:
            self.state[name][:] = 0
        self.since = self.step

    @abstractmethod
    def apply(self, w: Array, g: Array, rate: float, scale: float) -> None:
        """Run the rule's pass over w, g and the state. rate: learning rate. scale g: the (clipped) mean gradient."""


def check_decay_rate(name: str, value: float) -> None:
    """Raise UsageError unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise UsageError(f"{name} is at least 0 and less than 1, not {value}")
