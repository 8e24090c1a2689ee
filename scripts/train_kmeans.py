"""Cluster by k-means on a parameter store:
mpiexec -n 5 hpcdl train-kmeans --clusters 10 --servers 2

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
clusters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcdl.checkpoint.export import check_output_file, export
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.launch.start import Program
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.roles import divide
from hpcdl.runs.options import not_negative, option, positive


@dataclass
class KMeansOptions:
    """Options of train-kmeans: the data, and how they are clustered. Raises UsageError."""

    data: str = option("digits", "data set: digits, or an HDF5 file made by prepare-data; its training rows")
    clusters: int = option(10, "number of centroids")
    rounds: int = option(20, "passes over the rows, or mini-batches")
    batch_size: int = option(0, "rows per mini-batch, all clients together (async: of one); 0: all, Lloyd's algorithm")
    servers: int = option(1, "how many ranks hold the centroids; the other ranks are clients")
    consistency: Literal["bsp", "ssp", "async"] = option("bsp", "as in train-parameter-server")
    staleness: int = option(0, "ssp: rounds that a client may be ahead of the slowest")
    seed: int = option(0, "seed of the first centroids and of the mini-batches")
    out: str = option("", "write centroids, counts and the objective of each round: NAME.npz")

    def __post_init__(self):
        positive(self, "clusters", "rounds", "servers")
        not_negative(self, "batch_size", "seed")
        if self.servers > self.clusters:
            raise UsageError(
                f"--servers {self.servers} cannot share {counted(self.clusters, 'cluster')}: a server holds 1 or more"
            )
        if not self.chosen.checked().in_rounds and not self.batch_size:
            raise UsageError(f"--consistency {self.consistency} needs --batch-size: Lloyd's algorithm goes in rounds")
        check_output_file("--out", self.out, (".npz",))

    @property
    def chosen(self) -> Consistency:
        return Consistency(self.consistency, self.staleness)


def run(world, arguments):
    """Cluster on all ranks; rank 0 prints and writes."""

    from hpcdl.comm import Communicator, refuse_together
    from hpcdl.data import open_data
    from hpcdl.launch.launch_consistency import reading
    from hpcdl.machine.doctor import warn
    from hpcdl.machine.threads import Threads
    from hpcdl.machine.world import check_world
    from hpcdl.parameter_server.kmeans import cluster, plus_plus, score

    check_world(world)
    with reading(world) as parse:
        options = parse(KMeansOptions, "train-kmeans", __doc__, arguments)
        divide(world.size, options.servers)
    data = open_data(options.data, comm=world, dtype="float64")
    with refuse_together(world):
        if options.clusters > data.examples:
            raise UsageError(f"--clusters {options.clusters}: {data.name} has only {data.examples} training rows")
        first = plus_plus(data.train, options.clusters, options.seed) if world.rank == 0 else None
    comm = Communicator(world, "ring")
    warn(world)
    with Threads(world):
        centroids, counts, objective = cluster(comm, data.train, first, options)
        inertia, purity = score(comm, data, centroids)
    if world.rank == 0:
        labels = f"  purity {purity:.2%}" if data.classes else ""
        print(f"{counted(options.clusters, 'cluster')} of {data.name}: objective {inertia:.6g}{labels}")
        if options.out:
            export({"centroids": centroids, "counts": counts, "objective": objective}, Path(options.out))
    data.close()
    comm.free()


main = Program("train-kmeans", KMeansOptions, __doc__, run, stoppable=False)


if __name__ == "__main__":
    main()
