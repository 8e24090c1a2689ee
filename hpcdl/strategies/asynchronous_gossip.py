"""AD-PSGD: asynchronous gossip in pairs, in which no rank waits for another to compute.

    each rank i has a model x_i of its own and, as often as it can,
        picks a random neighbour j:   x_i, x_j <- (x_i + x_j) / 2, both at once
        w <- a copy of x_i
        g <- sum over its share of a batch of grad f(w; x, y)
        x_i <- x_i - lr N / b g                    (or the rule of the optimizer)

Averagings go on while g is computed: some enter x_i between the copy and the update, by so many is g stale. A fast rank
takes more steps than a slow one; the mean of all x_i moves with each of them by lr / b g, and with no averaging.

Of a pair, the lower rank sends its x and the higher one answers with the mean, while both go on with their own steps:
hpcdl/comm/gossip/pairwise.py, where it is seen that no circle of ranks waits. Messages are taken forward between the
layers of the backward pass and between steps.

Cost of a step: one averaging, 2K values on one edge of the graph, K each way; memory for about 5 vectors of K. A rank
that computes for long between two layers lets those who wait for its m do steps of their own, without averagings.

Rank 0, a worker too, keeps the tally: a step of the run is done when all ranks together have computed as many examples
as its batch has. For an evaluation or a checkpoint rank 0 calls all ranks to a meeting, where the average of all models
is made (hpcdl/runs/async_coordinator.py). A run that is resumed begins from there on all ranks, whatever their number;
nothing of an asynchronous run repeats to the bit.

(Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018)
"""

import time
from collections import Counter
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.gossip.pairwise import PairwiseGossip
from hpcdl.comm.gossip.topology import Topology
from hpcdl.comm.progress import activity
from hpcdl.data import Data
from hpcdl.errors import UsageError
from hpcdl.models.model import abilities_of
from hpcdl.optim import Optimizer
from hpcdl.runs.async_coordinator import Follower, Leader
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.run import Run

LULL = 1e-3  # seconds for which a rank without examples rests


def train(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run, topology: Topology) -> np.ndarray:
    """Train on all ranks of `comm`, the neighbours of a graph in pairs; returns the average, the same on each.

    Raises UsageError for a graph that `check_undirected_and_unweighted` refuses.
    """
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
        run.report(**told(tally.everyone, steps, pairs.averagings, staleness))
    tally.raise_failure()
    return tally.parameters


def check_undirected_and_unweighted(topology: Topology) -> None:
    """Raise UsageError where the edges of the graph do not go both ways, or have weights."""
    if topology.directed:
        raise UsageError(
            f"adpsgd averages in pairs, and the edges of {topology.spec} go one way; take ring, hypercube or another"
        )
    if topology.weights:
        raise UsageError(f"adpsgd averages two at a time, half and half: leave the weights out of {topology.spec}")


def told(everyone: Communicator, steps: int, averagings: int, staleness: Counter[int]) -> dict:
    """What each rank has done, for the summary; collective."""
    with activity.inside("gather the summary", everyone):
        all_steps, all_averagings, histograms = zip(
            *everyone.mpi.allgather((steps, averagings, staleness)), strict=True
        )
    stale: Counter[int] = sum(histograms, Counter())
    return {
        "steps_per_rank": list(all_steps),
        "averagings_per_rank": list(all_averagings),
        "staleness_histogram": [stale[each] for each in range(max(stale, default=-1) + 1)],
    }
