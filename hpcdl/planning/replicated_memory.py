"""Memory of a rank under each strategy that does not partition the model by layers, in vectors of K parameters.

    strategy                 parameters                gradients    optimizer, of V vectors
    sequential, all-reduce   1                         1            V, and 1 with --compress: the rounding error
    svrg                     1                         1            V + 2, the snapshot and its gradient; 3 if drawn
    saga                     1                         1            V + 1, and a slope of each example and output
    sgld                     2: iterate, mean          1            V
    parameter server         worker 1; server s,       worker 1;    server V s
                             and s that leave          server s     s = K / servers, in rounds one from each worker
    gossip                   2 + received ones         1            V, and the vectors of the method
    local sgd                2: replica, average       1            V, and 1 + V of the outer rule
    federated                2: server's, client's     1            V of the server, V of a client
    hogwild                  1; of several 2; 2 more   none         V; 2 more a thread that exchanges
                             a thread that exchanges
    coordinate descent       1                         none         v in float64, and four numbers of each own example

Activations are those of a gradient of the rank's share of a batch, in --accumulate parts, taken from the pool by the
model's own code. Slices and shares are those of `hpcdl.chunks`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.comm.gossip.topology import topology
from hpcdl.federated.server import vectors_of as server_vectors
from hpcdl.memory import Memory
from hpcdl.models.linear_form import linear_form
from hpcdl.models.model import abilities_of
from hpcdl.optim import SETTINGS, vectors_of
from hpcdl.parameter_server.parameter_store import cut_slices
from hpcdl.parameter_server.replication import backups
from hpcdl.parameter_server.store_client import shows_own_pushes
from hpcdl.planning.workload import Workload
from hpcdl.runs.full_pass import ROWS
from hpcdl.strategies.gossip import batches_of
from hpcdl.strategies.hogwild import JOINS


def add_activations(case: Workload, memory: Memory, rows: int) -> None:
    """Add the activations of a gradient of `rows` rows."""
    model = case.model
    if not abilities_of(model).pool:  # a user's model, whose activations are not counted
        return
    model.pool.memory = memory
    w, g = (case.device.zeros(case.length, case.dtype) for _ in range(2))
    for part in case.rows(rows).split(min(case.options.accumulate, max(1, rows))):
        model.loss_and_gradient(w, part, g)
    model.pool.memory = None


def add_state(case: Workload, memory: Memory, parameters: float = 1, optimizer: float | None = None) -> None:
    """Add vectors of parameters and optimizer, and one of gradients."""
    case.add(memory, "parameters", parameters)
    case.add(memory, "gradients")
    case.add(memory, "optimizer", len(case.vectors) if optimizer is None else optimizer)


def add_step(case: Workload, memory: Memory, rows: int, parameters: float = 1, optimizer: float | None = None) -> None:
    """Add vectors like `hold`, and the activations of `rows` rows."""
    add_state(case, memory, parameters, optimizer)
    add_activations(case, memory, rows)


def data_parallel(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of a data-parallel rank."""
    residual = getattr(case.options, "compress", "none") != "none"
    add_step(case, memory, case.share(rank, case.size), optimizer=len(case.vectors) + residual)


def svrg(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of SVRG (snapshot and its full gradient) or SAGA (table of slopes)."""
    options, vectors = case.options, len(case.vectors)
    if options.method == "saga":
        outputs = linear_form(case.model, "--method saga").outputs
        add_step(case, memory, case.share(rank, case.size), optimizer=vectors + 1)
        case.add(memory, "optimizer", 1, case.data.examples * outputs)
    else:
        add_step(case, memory, case.share(rank, case.size), optimizer=vectors + 2 + (options.snapshot == "random"))
    first = max(case.plan[0], min(ROWS * case.size, case.data.examples))  # batches of the pass over all rows
    add_activations(case, memory, case.share(rank, case.size, min(first, case.data.examples)))


def sgld(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of SGLD: the iterate of the rank's chain, and the mean of the samples."""
    parts = [chunk(case.size, case.options.chains, c) for c in range(case.options.chains)]
    own = next(part for part in parts if part.start <= rank < part.stop)
    add_step(case, memory, case.share(rank - own.start, own.stop - own.start), parameters=2)


def add_server(
    case: Workload, memory: Memory, rank: int, holders: int, workers: int, rounds: bool, optimizer: int
) -> None:
    """Add the memory of a server's slice: values, copies that are being sent, and pushed gradients.

    In rounds all workers get one copy; else each may get another version, and the forecast counts the most that can be
    in flight. A replica of another server's slice takes its values and pushed gradients.
    """
    width = 1
    if getattr(case.options, "sparse_push", False):
        width = case.model.layers[0].full_shapes["weight"][1]
    own = cut_slices(case.length, holders, width)[rank]
    length, replicas = own.stop - own.start, getattr(case.options, "replicas", 1)
    case.add(memory, "parameters", 2 if rounds else 1 + workers, length)
    case.add(memory, "gradients", workers if rounds or replicas > 1 else 1, length)
    case.add(memory, "optimizer", optimizer, length)
    for primary in [each for each in range(holders) if rank in backups(each, holders, replicas)]:
        followed = cut_slices(case.length, holders, width)[primary]
        for kind, vectors in (("parameters", 1), ("gradients", workers), ("optimizer", optimizer)):
            case.add(memory, kind, vectors, followed.stop - followed.start)


def parameter_server(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of a server (its slices) or worker (pulled parameters and the gradient that it pushes)."""
    options, on_workers = case.options, case.options.servers_on_workers
    rounds, clocked = options.chosen.in_rounds, options.chosen.clocked
    holders = case.size if on_workers else options.servers
    workers = case.size if on_workers else case.size - options.servers
    if rank < holders:
        add_server(case, memory, rank, holders, workers, rounds, len(case.vectors))
    if on_workers or rank >= options.servers:
        number = rank if on_workers else rank - options.servers
        unasked = bool(options.broadcast_every)
        adds_own = unasked and shows_own_pushes(options.chosen) and not (case.vectors or options.weight_decay)
        case.add(memory, "parameters", 1 + unasked + adds_own * (options.staleness + 1))
        case.add(memory, "gradients")
        add_activations(case, memory, case.share(number, workers) if clocked else case.batch)


def senders(case: Workload, rank: int, size: int) -> set[int]:
    """Return the ranks from which a rank receives in gossip, over the period of the graph."""
    graph = topology(case.options.topology, size, case.options.seed)
    return {source for source, to in graph.edges if to == rank and source != rank}


def gossip(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of gossip: replica, average, received vectors, and vectors of the method."""
    options, vectors = case.options, len(case.vectors)
    neighbours, rows = senders(case, rank, case.size), case.share(rank, case.size)
    received = len(neighbours)
    if options.method == "adpsgd":
        # x, the average, the copy for the gradient; a receive buffer per lower neighbour; for one higher neighbour at a
        # time the sent vector and the mean that comes back.
        lower = sum(each < rank for each in neighbours)
        add_step(case, memory, rows, 3 + lower + 2 * (received > lower), optimizer=2 * vectors)
    elif options.method in ("gradient-tracking", "detag"):
        before = 2 * (options.method == "detag")  # x and y of the round before, and those that are sent
        add_step(case, memory, rows, parameters=2 + 2 * received + before, optimizer=vectors + 4 + before)
    else:
        if options.method == "defacto":
            graph = topology(options.topology, case.size, options.seed)
            batches_of("defacto", graph, options.mixing, options.phase)
        add_step(case, memory, rows, parameters=2 + received, optimizer=vectors + (options.method == "defacto"))


def local_sgd(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of local SGD: replica, average, the outer rule's start and its vectors."""
    outer = case.options.outer.partition(":")[0]
    more = 1 + len(vectors_of(case.options.outer)) if outer in SETTINGS else 0
    add_step(case, memory, case.share(rank, case.size), parameters=2, optimizer=len(case.vectors) + more)


def federated(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of federated averaging: the server's parameters and rule, and a client's."""
    options, examples = case.options, case.data.examples
    server, theirs = len(server_vectors(options.server_optimizer)), len(vectors_of(options.optimizer))
    clients = options.clients or examples  # 0: the owners of a column, which is not read
    own = chunk(examples, min(clients, examples), 0)  # of an even partition
    rows = min(options.local_batch or own.stop, own.stop)
    chosen = max(1, round(options.fraction * clients))  # divided among the ranks: the last may have none
    add_state(case, memory, 2, server + theirs + bool(options.average))
    if rank < chosen:
        add_activations(case, memory, rows)
    if options.late:
        case.add(memory, "optimizer", 1, case.length + 1, 8)


def hogwild(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of HOGWILD!: a vector of all threads, or replicas that they exchange; no gradients."""
    options, vectors, exchanging = case.options, len(case.vectors), 0
    together = case.size if options.shared else 1
    if options.exchange_every and options.threads * together > 1:
        exchanging = 2 * options.threads
    if options.join == JOINS[2]:
        if rank < options.servers:
            add_server(case, memory, rank, options.servers, case.size - options.servers, False, 0)
            return
        case.add(memory, "parameters", 2 + exchanging)  # w, and as it was pulled
        case.add(memory, "gradients")  # as OnServers counts what it scores
        case.add(memory, "optimizer", exchanging)
        return
    several = case.size // together > 1
    received = len(senders(case, rank, case.size)) if several and options.join == JOINS[1] else 0
    case.add(memory, "parameters", 1 + several + received + exchanging)
    case.add(memory, "optimizer", vectors + exchanging * vectors)


def coordinate_descent(case: Workload, rank: int, memory: Memory) -> None:
    """Add the memory of coordinate descent: the dual vector in float64, and 4 numbers per own example.

    They are the variable, the target, the norm and the place.
    """
    form, own = linear_form(case.model, case.program), case.share(rank, case.size, case.data.examples)
    case.add(memory, "parameters")
    case.add(memory, "optimizer", 1, form.outputs * (form.features + 1), 8)
    case.add(memory, "optimizer", 1, own * (2 * form.outputs + 2), np.dtype(np.float64).itemsize)


RANK_MEMORY: dict[str, Callable[[Workload, int, Memory], Any]] = {
    "train-sequential": data_parallel,
    "train-allreduce": data_parallel,
    "train-svrg": svrg,
    "train-sgld": sgld,
    "train-parameter-server": parameter_server,
    "train-gossip": gossip,
    "train-local-sgd": local_sgd,
    "train-federated": federated,
    "train-hogwild": hogwild,
    "train-coordinate-descent": coordinate_descent,
}
