"""Model wrappers: a wrapper changes one behaviour of a model and delegates everything else.

`Accumulated` (hpcdl/runs/accumulated.py) computes in parts, `StragglerModel` (hpcdl/faults/straggler.py) computes
slowly.
"""

from typing import Any, TypeVar

Wrapper = TypeVar("Wrapper", bound="ModelWrapper")


class ModelWrapper:
    """Base of wrappers: delegates to `model` all members that a subclass does not define."""

    def __init__(self, model: Any):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def wrapper_of(model: Any, kind: type[Wrapper]) -> Wrapper | None:
    """Return the outermost wrapper of this class; None if there is none."""
    while isinstance(model, ModelWrapper):
        if isinstance(model, kind):
            return model
        model = model.model
    return None


def unwrapped(model: Any) -> Any:
    """Return the innermost model."""
    while isinstance(model, ModelWrapper):
        model = model.model
    return model
