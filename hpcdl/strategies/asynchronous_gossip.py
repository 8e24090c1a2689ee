"""AD-PSGD: asynchronous gossip in pairs, in which no rank waits for another to compute.

    each rank i has a model x_i of its own and, as often as it can,
        picks a random neighbour j:   x_i, x_j <- (x_i + x_j) / 2, both at once
        w <- a copy of x_i
        g <- sum over its share of a batch of grad f(w; x, y)
        x_i <- x_i - lr N / b g                    (or the rule of the optimizer)

Averagings go on while g is computed; their number between the copy and the update is the staleness of g. A step moves
the mean of all x_i by lr / b g. An averaging does not move the mean, and sends K values each way on one edge of the
graph (hpcdl/comm/gossip/pairwise.py). A rank holds about 5 vectors of K values.

A step of the run is done when all ranks together have computed as many examples as its batch has. Rank 0, a worker too,
keeps the tally; evaluations and checkpoints take the average of all models, with which a resumed run begins on all
ranks (hpcdl/runs/async_coordinator.py). Asynchronous runs do not repeat to the bit.

(Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018)"""

import time
from collections import Counter
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.gossip.pairwise import PairwiseGossip
from hpcdl.comm.gossip.topology import Topology
from hpcdl.data import Data
from hpcdl.errors import UsageError
from hpcdl.models.model import abilities_of
from hpcdl.optim import Optimizer
from hpcdl.runs.async_coordinator import Follower, Leader
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.run import Run

LULL = 1e-3  # seconds that a rank without examples sleeps


def train(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run, topology: Topology) -> np.ndarray:
    """Train on all ranks of `comm`; return the average model on each. UsageError for directed or weighted edges."""
    check_undirected_and_unweighted(topology)
    device, size, dtype = abilities_of(model).device, model.layout.size, model.layout.dtype
    x, w, gradient = (device.empty(size, dtype) for _ in range(3))
    random, memory, stopwatch = run.random, run.memory, run.stopwatch
    x[:] = model.initialize(random)
    memory.hold("parameters", w)
    pairs = PairwiseGossip(comm, x, topology, memory)
    tally = (Leader if comm.rank == 0 else Follower)(run, Replicas(model, x, optimizer), pairs)
    run.report(method="adpsgd", topology=topology.spec, allreduce=None)
    run.begin("gossip", tally, data)
    tally.open()
    pairs.listen()
    size, per_epoch, _ = run.plan(data)
    batches, taken, steps = data.cursor(size, (comm.rank, comm.size)), run.step, 0
    staleness: Counter[int] = Counter()
    with run.going_on():
        while not tally.over:
            with stopwatch.step():
                with stopwatch.fetching():
                    batch = batches.take(*divmod(taken, per_epoch))
                loss, taken = 0.0, taken + 1
                if len(batch.y):
                    pairs.pick(random("pair", comm.rank, taken), taken)
                    w[:], before = x, pairs.averagings
                    gradient[:] = 0
                    loss = model.loss_and_gradient(w, batch, gradient, pairs.progress)
                    pairs.progress()
                    optimizer.update(x, gradient, scale=comm.size / batch.total)
                    pairs.moved = True
                    staleness[pairs.averagings - before] += 1
                    steps += 1
                else:
                    pairs.progress()
                    time.sleep(LULL)
                tally.add(loss, len(batch.y))
            tally.obey()
        batches.close()
        tally.close()
        with tally.everyone.inside("gather the summary"):
            found = tally.everyone.mpi.allgather((steps, pairs.averagings, staleness))
        all_steps, all_averagings, histograms = map(list, zip(*found, strict=True))
        stale: Counter[int] = sum(histograms, Counter())
        run.report(steps_per_rank=all_steps, averagings_per_rank=all_averagings)
        run.report(staleness_histogram=[stale[each] for each in range(max(stale, default=-1) + 1)])
    tally.raise_failure()
    return tally.parameters


def check_undirected_and_unweighted(topology: Topology) -> None:
    """Raise UsageError if the edges of the graph are directed or have weights."""
    if topology.directed:
        raise UsageError(
            f"adpsgd averages pairs of ranks, but {topology.spec} has directed edges; take ring, hypercube or another"
        )
    if topology.weights:
        raise UsageError(f"adpsgd averages two models with equal weights: leave the weights out of {topology.spec}")
