"""k-means on a parameter store, by rounds of all rows (Lloyd) or of mini-batches: scripts/train_kmeans.py says how."""

import math
from collections.abc import Callable
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

ROWS = 4096  # at a time


def cluster(
    comm: Communicator, split: Split, first: np.ndarray | None, options: Any
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Centroids, counts (both on all ranks) and the objective of each round (rank 0); first: on rank 0."""
    clusters, width, rounds = options.clusters, split.source.width + 1, options.rounds
    held, leads, objective = np.zeros((clusters, width)), comm.rank == 0, list[float]()
    if leads:
        held[:, :-1] = first
    store = ParameterStore(
        comm,
        StoreLayout(held.size, comm.size, held.dtype, options.servers, block=width),
        Serving(options.chosen),
        update=Update(mini_batch if options.batch_size else lloyd, width),
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
    """What a client does in each round: pull the centroids, add up the rows nearest to each, push."""
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
    """The number of the centroid nearest to each row, and the sum of the squared distances to these.

    |x - c|^2 = |x|^2 - 2 x.c + |c|^2: a matrix product for all rows and centroids.
    """
    nearest = ((centroids**2).sum(axis=1) / 2 - x @ centroids.T).argmin(axis=1)
    return nearest, float(((x - centroids[nearest]) ** 2).sum())


class Update:
    """What a server does with what is pushed: `rule(centroids, counts, sums, rows)`, for the clusters it holds."""

    def __init__(self, rule: Callable, width: int):
        self.rule, self.width = rule, width

    def __call__(self, values: np.ndarray, pushed: np.ndarray, push: Push) -> None:
        held, added = values.reshape(-1, self.width), pushed.reshape(-1, self.width)
        self.rule(held[:, :-1], held[:, -1], added[:, :-1], added[:, -1])


def lloyd(centroids: np.ndarray, counts: np.ndarray, sums: np.ndarray, rows: np.ndarray) -> None:
    """Each centroid becomes the mean of the rows nearest to it."""
    some = rows > 0
    centroids[some] = sums[some] / rows[some, None]
    counts[:] = rows


def mini_batch(centroids: np.ndarray, counts: np.ndarray, sums: np.ndarray, rows: np.ndarray) -> None:
    """Each centroid becomes the mean of all rows that it has had: steps of 1 / counts, one row after the other."""
    some, counts[:] = rows > 0, counts + rows
    centroids[some] += (sums[some] - rows[some, None] * centroids[some]) / counts[some, None]


def score(comm: Communicator, data: Data, centroids: np.ndarray) -> tuple[float, float]:
    """The objective over all training rows; the purity: the share of rows with the most frequent label of theirs."""
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
    """k-means++: each first centroid is a row, drawn in proportion to its squared distance from those drawn before."""
    random, centroids = Random(seed)("centroids"), np.empty((clusters, split.source.width))
    nearest = np.full(split.examples, np.inf)
    for i in range(clusters):
        total = nearest.sum()
        if total == 0:
            raise UsageError(f"--clusters {clusters}: the training rows have only {i} different values")
        row = random.choice(split.examples, p=nearest / total if i else None)
        centroids[i] = split.take([row])[0][0]
        for block in blocks(split.examples):
            squares = ((split.rows(block.start, block.stop)[0] - centroids[i]) ** 2).sum(axis=1)
            np.minimum(nearest[block], squares, out=nearest[block])
    return centroids


def blocks(rows: int) -> list[slice]:
    """All rows in blocks that are not too long to be in memory at once."""
    return chunks(rows, math.ceil(rows / ROWS))
