"""All-reduce algorithms, one per file, chosen by name; or a user's own, as package.module:function.

An algorithm is a function (comm, vector, op): comm a bare mpi4py communicator, vector a flat contiguous array that
it reduces in place over all ranks, op(into, values) the reduction of two vectors. Written as a generator under
`@collective` (hpcdl/comm/steps.py) it runs asynchronously too. A generator's messages may bear tags 0 to 31, and a
receive that names no tag takes those sent without one.

Two attributes are optional: prepare(comm), a collective call made before the first all-reduce, returns the memory of
the node (hpcdl/comm/node.py) that the algorithm works in; choose(comm, vector) returns the algorithm to take.
"""

import importlib
from collections.abc import Callable

from hpcdl.comm.allreduce.auto import auto
from hpcdl.comm.allreduce.direct import direct
from hpcdl.comm.allreduce.hierarchical import hierarchical
from hpcdl.comm.allreduce.mpi import mpi
from hpcdl.comm.allreduce.naive import naive
from hpcdl.comm.allreduce.recursive import recursive
from hpcdl.comm.allreduce.ring import ring
from hpcdl.comm.allreduce.shared import shared
from hpcdl.comm.allreduce.tree import tree
from hpcdl.errors import UsageError, unknown

ALGORITHMS = {
    "naive": naive,
    "direct": direct,
    "ring": ring,
    "tree": tree,
    "recursive": recursive,
    "shared": shared,
    "hierarchical": hierarchical,
    "mpi": mpi,
    "auto": auto,
}


def algorithm(name: str) -> Callable:
    """The all-reduce algorithm of that name. Raises UsageError, with the known names, when there is none."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    module, colon, function = name.partition(":")
    if not (module and colon):
        raise unknown("all-reduce algorithm", name, [*ALGORITHMS, "package.module:function"])
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--allreduce {name}: {error}; give an importable package.module:function") from None
    if not callable(found):
        raise UsageError(f"--allreduce {name}: {function} is not a function")
    return found
