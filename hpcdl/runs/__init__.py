"""One training run: its options, progress, metrics, evaluation, checkpoints, signals and summary."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdl.runs.accumulated import Accumulated as Accumulated
    from hpcdl.runs.options import Options as Options
    from hpcdl.runs.ownership import Whole as Whole
    from hpcdl.runs.replicas import Replicas as Replicas
    from hpcdl.runs.run import Run as Run

_HOME = {"Accumulated": "accumulated", "Options": "options", "Replicas": "replicas", "Run": "run", "Whole": "ownership"}
__all__ = ["Accumulated", "Options", "Replicas", "Run", "Whole"]


def __getattr__(name: str) -> Any:
    # On demand: a script's signal handlers must be in place before the first import of MPI starts it.
    if name in _HOME:
        return getattr(importlib.import_module(f"hpcdl.runs.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
