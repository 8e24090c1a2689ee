"""k-means on a parameter store, by rounds of all rows (Lloyd) or of mini-batches; see scripts/train_kmeans.py."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdl.chunks import chunk, chunks
from hpcdl.comm import Communicator
from hpcdl.data import Data
from hpcdl.data.dataset import Split
from hpcdl.errors import LoneError, UsageError
from hpcdl.parameter_server.clocks import Horizon
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.store_messages import Push
from hpcdl.parameter_server.store_settings import Serving, StoreLayout
from hpcdl.random import Random

ROWS = 4096  # rows of a block


def cluster(
    comm: Communicator, split: Split, first: np.ndarray | None, options: Any
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return centroids, their row counts (on all ranks), objectives by round (on rank 0). first: rank 0's centroids."""
    clusters, width, rounds = options.clusters, split.source.width + 1, options.rounds
    held, leads, objective = np.zeros((clusters, width)), comm.rank == 0, list[float]()
    if leads:
        held[:, :-1] = first
    store = ParameterStore(
        comm,
        StoreLayout(held.size, comm.size, held.dtype, options.servers, block=width),
        Serving(options.chosen),
        update=partial(update, mini_batch if options.batch_size else lloyd, width),
        initial=held.ravel() if leads else None,
        horizon=(lambda: Horizon(rounds, rounds)) if leads else None,
    )
    if leads:
        for squares, total in store.completed_steps():
            objective.append(squares / total)
            print(f"round {len(objective)}/{rounds}  objective {objective[-1]:.6g}", flush=True)
            if len(objective) == rounds:
                store.gather(held.ravel(), needs=rounds)
        if (push := store.server.not_finite) is not None:
            raise LoneError(f"the distances on rank {push.client} are not finite: scale the data")
    elif store.serves:
        store.serve()
    else:
        work(store, split, held, options)
    store.free()
    comm.broadcast(held)
    return held[:, :-1], held[:, -1], objective


def work(store: ParameterStore, split: Split, held: np.ndarray, options: Any) -> None:
    """Do a client's rounds: pull the centroids, add up the rows nearest to each, push the sums."""
    share = (len(store.clients), store.clients.index(store.comm.rank)) if store.consistency.clocked else (1, 0)
    total, random = options.batch_size or split.examples, Random(options.seed)
    part = chunk(total, *share)
    x: Any = None if options.batch_size else split.rows(part.start, part.stop)[0]
    while (step := store.pull(held.ravel())) is not None:
        if options.batch_size:
            x = split.take(random("batch", step).integers(0, split.examples, total)[part])[0]
        pushed, distance = np.zeros_like(held), 0.0
        for block in blocks(len(x)):
            nearest, squares = assign(x[block], held[:, :-1])
            member = np.zeros((len(nearest), len(held)))
            member[np.arange(len(nearest)), nearest] = 1
            pushed[:, :-1] += member.T @ x[block]
            pushed[:, -1] += member.sum(axis=0)
            distance += squares
        store.push(pushed.ravel(), count=len(x), total=total, loss=distance)
    store.close()


def assign(x: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the number of the centroid nearest to each row, and the sum of the squared distances to these centroids.
    |x - c|^2 = |x|^2 - 2 x.c + |c|^2: a matrix product for all rows and centroids."""
    nearest = ((centroids**2).sum(axis=1) / 2 - x @ centroids.T).argmin(axis=1)
    return nearest, float(((x - centroids[nearest]) ** 2).sum())


def update(rule: Callable, width: int, values: np.ndarray, pushed: np.ndarray, push: Push) -> None:
    """Apply pushed sums to the clusters that a server holds, by `rule(centroids, counts, sums, rows)`."""
    held, added = values.reshape(-1, width), pushed.reshape(-1, width)
    rule(held[:, :-1], held[:, -1], added[:, :-1], added[:, -1])


def lloyd(centroids: np.ndarray, counts: np.ndarray, sums: np.ndarray, rows: np.ndarray) -> None:
    """Set each centroid to the mean of the rows nearest to it."""
    some = rows > 0
    centroids[some] = sums[some] / rows[some, None]
    counts[:] = rows


def mini_batch(centroids: np.ndarray, counts: np.ndarray, sums: np.ndarray, rows: np.ndarray) -> None:
    """Set each centroid to the mean of all rows that it has had so far, as steps of 1 / count, row by row, would do."""
    some, counts[:] = rows > 0, counts + rows
    centroids[some] += (sums[some] - rows[some, None] * centroids[some]) / counts[some, None]


def score(comm: Communicator, data: Data, centroids: np.ndarray) -> tuple[float, float]:
    """Return the objective over all training rows, and the purity: share of rows with their cluster's top label."""
    table, squares = np.zeros((len(centroids), max(1, data.classes))), np.zeros(1)
    part = chunk(data.train.examples, comm.size, comm.rank)
    for block in blocks(part.stop - part.start):
        x, y = data.train.rows(part.start + block.start, part.start + block.stop)
        nearest, distance = assign(x, centroids)
        squares += distance
        labels = y.astype(int) if data.classes else np.zeros_like(nearest)
        np.add.at(table, (nearest, labels), 1)
    comm.all_reduce(table)
    comm.all_reduce(squares)
    return float(squares[0] / data.train.examples), float(table.max(axis=1).sum() / data.train.examples)


def plus_plus(split: Split, clusters: int, seed: int) -> np.ndarray:
    """Return first centroids by k-means++: rows drawn with weight (distance to the nearest row drawn before)^2."""
    random, centroids = Random(seed)("centroids"), np.empty((clusters, split.source.width))
    nearest = np.full(split.examples, np.inf)
    for i in range(clusters):
        total = nearest.sum()
        if total == 0:
            raise UsageError(f"--clusters {clusters}: the training part has only {i} different rows")
        row = random.choice(split.examples, p=nearest / total if i else None)
        centroids[i] = split.take([row])[0][0]
        for block in blocks(split.examples):
            squares = ((split.rows(block.start, block.stop)[0] - centroids[i]) ** 2).sum(axis=1)
            np.minimum(nearest[block], squares, out=nearest[block])
    return centroids


def blocks(rows: int) -> list[slice]:
    """Return slices that cover all rows, of at most ROWS rows each, which fit into memory."""
    return chunks(rows, math.ceil(rows / ROWS))
