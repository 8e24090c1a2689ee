"""Gradient accumulation: a rank computes its share of a batch in parts, one after the other, to need less memory.

    loss = 0
    for each part of the batch:
        loss <- loss + sum of losses of the part;   gradient <- gradient + its gradient

Activations are those of one part, 1/parts of the batch's. A gradient is a sum over examples, so that the result is the
same but for the order of additions, and no update takes place in between.
"""

from collections.abc import Callable
from typing import Any

from hpcdl.data import Batch
from hpcdl.errors import AgreedError
from hpcdl.kernels.device import Array
from hpcdl.models.model import ModelWrapper, wrapper_of

NOTHING = slice(0, 0)


class Accumulated(ModelWrapper):
    """`model`, whose gradient of a batch is computed in so many parts."""

    def __init__(self, model: Any, parts: int):
        super().__init__(model)
        self.parts = parts

    def loss_and_gradient(
        self, parameters: Array, batch: Batch, gradient: Array, on_ready: Callable[[slice], object] | None = None
    ) -> float:
        """Adds to `gradient`; returns the sum of losses.

        on_ready(slice): a slice of the gradient is final, in the last part only. Between the layers of the parts
        before it is told that nothing is: for what goes on meanwhile, that is the moment.
        """

        def not_yet(part: slice) -> None:
            assert on_ready is not None
            on_ready(NOTHING)

        *parts, last = batch.split(self.parts)
        early = on_ready and not_yet
        loss = sum(self.model.loss_and_gradient(parameters, part, gradient, early) for part in parts)
        return loss + self.model.loss_and_gradient(parameters, last, gradient, on_ready)


def accumulated(model: Any, parts: int) -> Any:
    """The model itself, or one that accumulates its gradient over so many parts of a batch."""
    return model if parts == 1 else Accumulated(model, parts)


def accumulation(model: Any) -> int:
    """The parts in which this model accumulates its gradient."""
    wrapper = wrapper_of(model, Accumulated)
    return wrapper.parts if wrapper else 1


def refuse_another_accumulation(model: Any, parts: int) -> None:
    """Raise AgreedError, on all ranks alike, where the options ask for so many parts and the model has others."""
    if accumulation(model) != parts:
        raise AgreedError(
            f"accumulate={parts}: that is the model's to do; give the strategy hpcdl.runs.Accumulated(model, {parts})"
        )
