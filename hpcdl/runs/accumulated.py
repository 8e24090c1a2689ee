"""Gradient accumulation: a rank computes its share of a batch in parts, one after the other, to need less memory.

    for each part of the batch:
        loss <- loss + sum of losses of the part;   gradient <- gradient + its gradient

Only the activations of one part are held. The result is the same up to the order of additions."""

from collections.abc import Callable
from typing import Any

from hpcdl.data import Batch
from hpcdl.errors import AgreedError
from hpcdl.kernels.device import Array
from hpcdl.models.model import ModelWrapper, wrapper_of

NOTHING = slice(0, 0)


class Accumulated(ModelWrapper):
    """Wraps a model so that it computes the gradient of a batch in `parts` parts, one after the other."""

    def __init__(self, model: Any, parts: int):
        super().__init__(model)
        self.parts = parts

    def loss_and_gradient(
        self, parameters: Array, batch: Batch, gradient: Array, on_ready: Callable[[slice], object] | None = None
    ) -> float:
        """Add the batch's gradient to `gradient`; return its sum of losses. on_ready gets final slices, in the last
        part only; in earlier parts an empty slice after each layer, so that messages under way can proceed."""
        *parts, last = batch.split(self.parts)
        early = on_ready and (lambda part: on_ready(NOTHING))
        loss = sum(self.model.loss_and_gradient(parameters, part, gradient, early) for part in parts)
        return loss + self.model.loss_and_gradient(parameters, last, gradient, on_ready)


def accumulated(model: Any, parts: int) -> Any:
    """Return the model itself (parts = 1), or one that accumulates its gradient over `parts` parts of a batch."""
    return model if parts == 1 else Accumulated(model, parts)


def accumulation(model: Any) -> int:
    """Return the number of parts in which this model accumulates its gradient."""
    wrapper = wrapper_of(model, Accumulated)
    return wrapper.parts if wrapper else 1


def refuse_another_accumulation(model: Any, parts: int) -> None:
    """Raise AgreedError, on all ranks alike, unless the model's number of parts is `parts`, as --accumulate asks."""
    if accumulation(model) != parts:
        raise AgreedError(
            f"accumulate={parts} is not the model's number of parts, {accumulation(model)}: give the strategy "
            f"hpcdl.runs.Accumulated(model, {parts})"
        )
