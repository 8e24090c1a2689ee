"""All-reduce algorithms, one per file, chosen by name; a user's own is package.module:name.

An algorithm is a function (comm, vector, op): comm a bare mpi4py communicator, vector a flat contiguous array that
it reduces in place over all ranks, op(into, values) the reduction of two vectors. Written as a generator under
`@collective` (hpcdl/comm/collective_schedule.py) it runs asynchronously, too. A generator may use tags 0 to 31; a
receive without a tag matches sends without one.

Further properties of an algorithm are in its record, an `Algorithm` (record.py), which is ALGORITHM in each file here.
A user's own is a function, plain or under `@collective`, or such a record.
"""

from importlib import import_module

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.errors import UsageError, unknown
from hpcdl.plugins import load_plugin

FILES = ["naive", "direct", "ring", "tree", "recursive", "shared", "hierarchical", "mpi", "auto"]
ALGORITHMS: dict[str, Algorithm] = {name: import_module(f"{__name__}.{name}").ALGORITHM for name in FILES}


def algorithm(name: str) -> Algorithm:
    """Return the all-reduce algorithm of that name. Raises UsageError, with the known names, for another name."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name.startswith(":") or ":" not in name:
        raise unknown("all-reduce algorithm", name, [*ALGORITHMS, "package.module:function"])
    found, settings = load_plugin(name, f"--allreduce {name}")
    if isinstance(found, Algorithm):
        return found
    if not callable(found) or settings:
        raise UsageError(f"--allreduce {name}: it is not a function, which has no settings")
    steps = getattr(found, "steps", None)
    return Algorithm(name, steps, None if steps else found)
