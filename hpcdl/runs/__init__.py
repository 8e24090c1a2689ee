"""One training run: its options, progress, metrics, evaluation, checkpoints, signals and summary."""

import importlib
from typing import Any

_HOME = {"Accumulated": "accumulated", "Options": "options", "Replicas": "replicas", "Run": "run", "Whole": "ownership"}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    # On demand: a script's signal handlers must be in place before the first import of MPI starts it.
    if name in _HOME:
        return getattr(importlib.import_module(f"hpcdl.runs.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
