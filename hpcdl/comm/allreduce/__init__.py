"""All-reduce algorithms, one per file, chosen by name. A user's own algorithm is named package.module:name.

An algorithm is a function (comm, vector, op). comm is a bare mpi4py communicator; vector is a flat contiguous array
that the function reduces in place over all ranks; op(into, values) combines two vectors into the first. An algorithm
written as a generator under `@collective` (hpcdl/comm/collective_schedule.py) runs asynchronously, too. It may use tags
0 to 31; a receive without a tag matches sends without one. ALGORITHM in each file here is the algorithm's record, with
further properties (record.py). A user's own is a function, plain or under `@collective`, or such a record."""

from importlib import import_module

from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.errors import UsageError, unknown
from hpcdl.plugins import load_plugin

FILES = ["naive", "direct", "ring", "tree", "recursive", "circulant", "double_tree"]
FILES += ["shared", "hierarchical", "mpi", "auto"]
ALGORITHMS: dict[str, Algorithm] = {name: import_module(f"{__name__}.{name}").ALGORITHM for name in FILES}


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of a known name, or of package.module:name. UsageError, with known names, for others."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name.startswith(":") or ":" not in name:
        raise unknown("all-reduce algorithm", name, [*ALGORITHMS, "package.module:function"])
    found, settings = load_plugin(name, f"--allreduce {name}")
    if isinstance(found, Algorithm):
        return found
    if not callable(found) or settings:
        raise UsageError(f"--allreduce {name}: name a function, or an Algorithm record, without settings")
    steps = getattr(found, "steps", None)
    return Algorithm(name, steps, None if steps else found)
