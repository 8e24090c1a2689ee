"""A model around a model: it does one thing otherwise, and all else as the model inside.

`Accumulated` (hpcdl/runs/accumulated.py) computes in parts, `Slowed` (hpcdl/faults/straggler.py) takes its time.
"""

from typing import Any


class ModelWrapper:
    """`model`, with what a derived class does otherwise."""

    def __init__(self, model: Any):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def unwrapped(model: Any) -> Any:
    """The innermost model: for what is no part of the training."""
    while isinstance(model, ModelWrapper):
        model = model.model
    return model
