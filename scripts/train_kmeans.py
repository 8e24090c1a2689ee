"""Cluster by k-means on a parameter store:
mpiexec -n 5 python scripts/train_kmeans.py --clusters 10 --servers 2

    client                                             server, for its centroids
        c <- pull                                          each round, or each push:
        for its rows x: i(x) <- argmin_i |x - c_i|^2           n_i, s_i <- pushed
        push n_i, s_i: how many rows, and their sum            Lloyd        c_i <- s_i / n_i         where n_i > 0
                                                               mini-batch   v_i <- v_i + n_i
                                                                            c_i <- c_i + (s_i - n_i c_i) / v_i

Without --batch-size it is Lloyd's algorithm: each round takes all rows, a client its share of them, and the objective,
the mean of |x - c_i(x)|^2, never rises (Dhillon and Modha, "A data-clustering algorithm on distributed memory
multiprocessors", 2000). A centroid to which no row is nearest stays where it is.

With --batch-size it is mini-batch k-means: each round takes so many rows at random, and a centroid moves towards each
of its rows by 1 / v_i, where v_i counts the rows it has had, which makes it their mean (Sculley, "Web-scale k-means
clustering", WWW 2010). It takes any consistency; under async a round is one client's.

The first centroids are drawn by k-means++ (Arthur and Vassilvitskii, SODA 2007). The store holds (c_i, v_i) for each
centroid, on one server; a round costs each client K (features + 1) values each way. Lloyd's v_i are the sizes of the
clusters.
"""

# ruff: noqa: E402

from hpcdl.machine.world import check_world, start

start()  # before the next import starts MPI, which may end the process in words of its own

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from hpcdl.checkpoint import export
from hpcdl.chunks import chunk, chunks
from hpcdl.comm import Communicator, refuse_together
from hpcdl.data import open_data
from hpcdl.errors import LoneError, UsageError
from hpcdl.formatting import counted
from hpcdl.launch.launch_consistency import reading
from hpcdl.launch.program import ended
from hpcdl.machine.doctor import warn
from hpcdl.machine.threads import threads
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.step_coordinator import Lead, LedStore
from hpcdl.parameter_server.store_messages import Push
from hpcdl.random import Random
from hpcdl.runs.options import option
from hpcdl.runs.roles import divide

ROWS = 4096  # at a time


@dataclass
class KMeansOptions:
    """What is clustered, and how. Raises UsageError where a value makes no sense."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data; its training rows")
    clusters: int = option(10, "number of centroids")
    rounds: int = option(20, "passes over the rows, or mini-batches")
    batch_size: int = option(0, "rows per mini-batch, all clients together (async: of one); 0: all, Lloyd's algorithm")
    servers: int = option(1, "how many ranks hold the centroids; the other ranks are clients")
    consistency: Literal["bsp", "ssp", "async"] = option("bsp", "as in train-parameter-server")
    staleness: int = option(0, "ssp: by how many rounds a client may be ahead of the slowest")
    seed: int = option(0, "seed of the first centroids and of the mini-batches")
    out: str = option("", "write centroids, counts and the objective of each round: NAME.npz")

    def __post_init__(self):
        for name in ("clusters", "rounds", "servers"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be greater than 0, not {getattr(self, name)}")
        for name in ("batch_size", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} must not be negative, and is {getattr(self, name)}")
        if self.servers > self.clusters:
            raise UsageError(
                f"--servers {self.servers} cannot share {counted(self.clusters, 'cluster')}: a server holds 1 or more"
            )
        if not self.chosen.checked().in_rounds and not self.batch_size:
            raise UsageError(f"Lloyd's algorithm goes in rounds: for {self.consistency} choose a --batch-size")
        export.check_output_file("--out", self.out, (".npz",))

    @property
    def chosen(self) -> Consistency:
        return Consistency(self.consistency, self.staleness)


def main(arguments=None):
    """All ranks cluster; rank 0 prints and writes."""
    world = MPI.COMM_WORLD
    with ended("train-kmeans", world.rank):
        check_world(world)
        with reading(world) as parse:
            options = parse(KMeansOptions, "train-kmeans", __doc__, arguments)
            divide(world.size, options.servers)
        warn(world)
        data = open_data(options.data, comm=world, dtype="float64")
        with refuse_together(world):
            if options.clusters > data.examples:
                raise UsageError(f"--clusters {options.clusters}: {data.name} has {data.examples} training rows")
            first = plus_plus(data.train, options.clusters, options.seed) if world.rank == 0 else None
        comm = Communicator(world, "ring")
        with threadpool_limits(threads(world)):
            centroids, counts, objective = cluster(comm, data.train, first, options)
            inertia, purity = score(comm, data, centroids)
        if world.rank == 0:
            labels = f"  purity {purity:.2%}" if data.classes else ""
            print(f"{counted(options.clusters, 'cluster')} of {data.name}: objective {inertia:.6g}{labels}")
            if options.out:
                export.export({"centroids": centroids, "counts": counts, "objective": objective}, Path(options.out))
        data.close()
        comm.free()


def cluster(comm, split, first: np.ndarray | None, options) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Centroids, counts (both on all ranks) and the objective of each round (rank 0); first: on rank 0."""
    clusters, width = options.clusters, split.source.width + 1
    held, lead = np.zeros((clusters, width)), None
    if comm.rank == 0:
        held[:, :-1] = first
        lead = Rounds(options.rounds, held)
    store = ParameterStore(
        comm,
        held.size,
        held.dtype,
        servers=options.servers,
        consistency=options.chosen,
        update=Update(mini_batch if options.batch_size else lloyd, width),
        initial=held.ravel() if comm.rank == 0 else None,
        block=width,
        lead=lead,
    )
    if store.serves:
        store.serve()
    else:
        work(store, split, held, options)
    store.free()
    comm.broadcast(held)
    return held[:, :-1], held[:, -1], lead.objective if lead is not None else []


def work(store, split, held, options) -> None:
    """What a client does in each round: pull the centroids, add up the rows nearest to each, push."""
    share = (len(store.clients), store.clients.index(store.comm.rank)) if store.consistency.clocked else (1, 0)
    total, random = options.batch_size or split.examples, Random(options.seed)
    part = chunk(total, *share)
    x = None if options.batch_size else split.rows(part.start, part.stop)[0]
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


def assign(x, centroids) -> tuple[np.ndarray, float]:
    """The number of the centroid nearest to each row, and the sum of the squared distances to these.

    |x - c|^2 = |x|^2 - 2 x.c + |c|^2: a matrix product for all rows and centroids.
    """
    nearest = ((centroids**2).sum(axis=1) / 2 - x @ centroids.T).argmin(axis=1)
    return nearest, float(((x - centroids[nearest]) ** 2).sum())


class Update:
    """What a server does with what is pushed: `rule(centroids, counts, sums, rows)`, for the clusters it holds."""

    def __init__(self, rule, width: int):
        self.rule, self.width = rule, width

    def __call__(self, values, pushed, push) -> None:
        held, added = values.reshape(-1, self.width), pushed.reshape(-1, self.width)
        self.rule(held[:, :-1], held[:, -1], added[:, :-1], added[:, -1])


def lloyd(centroids, counts, sums, rows) -> None:
    """Each centroid becomes the mean of the rows nearest to it."""
    some = rows > 0
    centroids[some] = sums[some] / rows[some, None]
    counts[:] = rows


def mini_batch(centroids, counts, sums, rows) -> None:
    """Each centroid becomes the mean of all rows that it has had: steps of 1 / counts, one row after the other."""
    some, counts[:] = rows > 0, counts + rows
    centroids[some] += (sums[some] - rows[some, None] * centroids[some]) / counts[some, None]


class Rounds(Lead):
    """On rank 0: gives out the rounds and prints the objective of each."""

    def __init__(self, rounds: int, whole: np.ndarray):
        self.steps = self.limit = rounds
        self.whole, self.objective = whole, []

    def begin(self, store: LedStore, step: int) -> None:
        self.store = store

    def admit(self, push: Push) -> None:
        if not math.isfinite(push.loss):
            raise LoneError(f"the distances on rank {push.client} are not finite: scale the data")

    def done(self, loss: float, total: float) -> None:
        """A round has been applied; after the last one fetch the centroids. loss: the sum of the squared distances."""
        self.objective.append(loss / total)
        print(f"round {len(self.objective)}/{self.steps}  objective {self.objective[-1]:.6g}", flush=True)
        if len(self.objective) == self.steps:
            self.store.gather(self.whole.ravel(), needs=self.steps)


def score(comm, data, centroids) -> tuple[float, float]:
    """The objective over all training rows; the purity: the share of rows with the most frequent label of theirs."""
    table, squares = np.zeros((len(centroids), max(1, data.classes))), np.zeros(1)
    part = chunk(data.train.examples, comm.size, comm.rank)
    for block in blocks(part.stop - part.start):
        x, y = data.train.rows(part.start + block.start, part.start + block.stop)
        nearest, distance = assign(x, centroids)
        squares += distance
        np.add.at(table, (nearest, y.astype(int) if data.classes else 0), 1)
    comm.all_reduce(table)
    comm.all_reduce(squares)
    return float(squares[0] / data.train.examples), float(table.max(axis=1).sum() / data.train.examples)


def plus_plus(split, clusters: int, seed: int) -> np.ndarray:
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


if __name__ == "__main__":
    main()
