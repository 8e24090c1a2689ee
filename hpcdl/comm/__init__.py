"""Messages between ranks: the primitives, the all-reduce algorithms, the trace and the watchdog."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdl.comm.communicator import Communicator as Communicator
    from hpcdl.comm.failure import refuse_together as refuse_together
    from hpcdl.comm.point_to_point import ANY as ANY
    from hpcdl.comm.point_to_point import Arrival as Arrival

WHERE = {
    "ANY": "point_to_point",
    "Arrival": "point_to_point",
    "Communicator": "communicator",
    "refuse_together": "failure",
}
__all__ = ["ANY", "Arrival", "Communicator", "refuse_together"]


def __getattr__(name: str) -> Any:
    """Import `name` at its first use: a program that only reads recordings (diagnostics) does not start MPI."""
    import importlib

    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{WHERE[name]}"), name)
    return value
