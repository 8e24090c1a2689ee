"""Topologies of every number of ranks, for tests of gossip."""

from hpcdl.comm.gossip.topology import topology
from hpcdl.errors import UsageError

SIZES = range(1, 17)


def graph(spec, size, seed=3):
    """The topology, or None where there is none of this size."""
    if spec == "random-regular":
        spec = f"random-regular:degree={min(size - 1, 2 if size % 2 else 3)}"
    try:
        return topology(spec, size, seed)
    except UsageError:
        prime = size > 1 and all(size % k for k in range(2, size))
        assert (spec == "torus" and prime) or (spec == "hypercube" and size & (size - 1)) or "=" in spec
        return None


def graphs(spec, sizes=SIZES):
    """The topology on every size that there is."""
    return filter(None, (graph(spec, size) for size in sizes))


def pairs(graph):
    return {(rank, to) for rank, ranks in enumerate(graph) for to in ranks}
