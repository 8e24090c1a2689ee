"""Train by gossip on a sparse graph: mpiexec -n 4 python scripts/train_gossip.py --topology ring --method dpsgd"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from typing import Literal

from hpcdl.comm import refuse_together
from hpcdl.comm.gossip.draw import draw
from hpcdl.comm.gossip.mixing import RULES
from hpcdl.comm.gossip.topology import topology, without
from hpcdl.errors import UsageError
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.options import option
from hpcdl.strategies import asynchronous_gossip
from hpcdl.strategies.gossip import batches_of, train

OUTLIVE = ("adapt-then-combine", "dpsgd", "gradient-tracking")  # methods whose ranks may be lost


@dataclass
class GossipOptions(SurvivingOptions):
    topology: str = option(
        "ring",
        "ring, torus, torus:RxC, hypercube, exponential, one-peer, star, complete, random-regular:degree=3, "
        "erdos-renyi:p=0.5, random-matching, or a file with a line 'a b' or 'a b weight' for each edge",
    )
    mixing: Literal["metropolis-hastings", "uniform"] = option("metropolis-hastings", "weights of the neighbours")
    method: Literal["adapt-then-combine", "dpsgd", "adpsgd", "gradient-tracking", "detag", "defacto"] = option(
        "adapt-then-combine", "how steps and averaging with the neighbours go together"
    )
    phase: int = option(0, "detag, defacto: batches of a phase, and detag's rounds of gossip; 0: as the graph needs")

    draw: str = option("", "file into which the graph is drawn before the training: .png, .svg or .pdf")

    def __post_init__(self):
        super().__post_init__()
        self._refuse_negative("phase")


def check_method_and_graph(options, ranks, model):
    """Raise UsageError where these ranks have no such graph, or the method cannot use it."""
    graph = graph_of(options, ranks)
    if options.survive:
        refuse_no_survivors(options, graph)
    if options.method == "adpsgd":
        asynchronous_gossip.check_undirected_and_unweighted(graph)
        if options.phase or options.mixing != RULES[0]:
            raise UsageError("adpsgd averages two at a time, half and half: leave out --mixing and --phase")
    else:
        batches_of(options.method, graph, options.mixing, options.phase)


def graph_of(options, ranks):
    """The graph of so many ranks; of those that are left, where the name has none, what is left of the one before."""
    shrunk = options.survivor.shrunk if options.survivor is not None else []
    try:
        return topology(options.topology, ranks, options.seed)
    except UsageError:
        if not shrunk:
            raise
    graph = topology(options.topology, shrunk[0][0], options.seed)
    for _, gone in shrunk:
        graph = without(graph, gone)
    return graph


def refuse_no_survivors(options, graph):
    """Raise UsageError where the ranks that are left could not go on."""
    if options.method not in OUTLIVE:
        raise UsageError(
            f"--survive: {options.method}'s state depends on how many ranks there are, or they do not step together; "
            f"take --method {', '.join(OUTLIVE[:-1])} or {OUTLIVE[-1]}"
        )
    if graph.weights is not None:
        raise UsageError(f"--survive: {options.topology} has weights, of which nobody knows those of a smaller graph")


def start(comm, model, data, optimizer, run):
    options = run.options
    graph = graph_of(options, comm.size)
    with refuse_together(comm.mpi):
        if options.draw and comm.rank == 0:
            draw(graph, options.mixing, options.draw)
    if options.method == "adpsgd":
        asynchronous_gossip.train(comm, model, data, optimizer, run, graph)
    else:
        train(comm, model, data, optimizer, run, graph, options.mixing, options.method, options.phase)


TRAINING = Training("train-gossip", GossipOptions, __doc__, start, check=check_method_and_graph)
main = TRAINING.main


if __name__ == "__main__":
    main()
