"""HOGWILD! by threads and by locks, beside scikit-learn: mpiexec -n 2 hpcdl bench-hogwild --json a.json

Trains a linear model on rows of RCV1's shape, or on other data. These ways take turns: each number of --threads under
each --locking; several threads with replicas, which exchange their changes after --exchange-every updates; on several
ranks, one thread of each on one shared vector, and on a vector each, which shows what cores do that share nothing; for
logistic loss on sparse rows, a plain kernel, the shortest loop that does the same without locks and counts; and
scikit-learn's SGDClassifier, if that is installed. Prints examples per second, the gain over the fewest threads of the
same kind in the same turn, collisions and the test loss, which should be equal for all ways but that with a vector
each. --plot draws the test loss against the epochs. A dense case:
--data digits --model softmax --lr 0.05."""

import functools
import json
import logging
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.csr import CSR
from hpcdl.data import Data
from hpcdl.data.synthetic import draw_or_open_data
from hpcdl.errors import UsageError, unknown
from hpcdl.kernels.hogwild import LOCKINGS
from hpcdl.launch import benchmark_table as bench
from hpcdl.runs.options import not_negative, option, positive
from hpcdl.strategies import hogwild

SKLEARN, PLAIN = "scikit-learn", "plain kernel"
NEVER = 10**9  # rounds


@dataclass
class HogwildBenchOptions:
    """Options of bench-hogwild: the training, and the compared threads and locks."""

    data: str = option("rcv1", "rows: drawn ones, as by prepare-data synthetic, digits, or an HDF5 file")
    model: str = option("logistic", "a linear model: linear, logistic, svm or softmax")
    lr: float = option(0.5, "learning rate")
    schedule: str = option("constant", "schedule of the learning rate by epochs, as step:every=1,factor=0.6")
    epochs: int = option(2, "epochs of each run")
    threads: str = option("1,2", "numbers of threads, with commas between")
    locking: str = option("none,atomic,striped,global,round-robin", "lockings, with commas between")
    exchange_every: str = option("1024", "updates between the exchanges of threads that have replicas, with commas")
    round_size: int = option(0, "examples of a round, at whose end all threads meet; 0: a tenth of an epoch")
    turns: int = option(5, "how often each way is measured; the ways take turns")
    seed: int = option(0, "seed of the runs; that of drawn rows is in --data, as in rcv1:seed=1")
    plot: str = option("", "file for a picture of the test loss (needs the extra report)")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "epochs", "turns")
        bench.several(self, "threads", "exchange_every")
        not_negative(self, "round_size")
        self.locking = self.locking.split(",")
        for name in self.locking:
            if name not in LOCKINGS:
                raise unknown("locking", name, LOCKINGS)


class Variant(NamedTuple):
    """A measured way to train: on `ranks` ranks with `threads` threads each."""

    name: str
    ranks: int
    threads: int
    locking: str
    exchange_every: int = 0
    shared: bool = True  # one vector for all ranks


class HogwildMeasurement(NamedTuple):
    """seconds: of the training. losses: test loss after each epoch. collisions, staleness: of updates; None: none."""

    seconds: float
    losses: list
    collisions: float | None = None
    staleness: float | None = None


def rows_to_train(options: HogwildBenchOptions, ranks: int) -> Data:
    data = draw_or_open_data(options.data, seed=options.seed)
    if data.test is None:
        raise UsageError(f"--data {options.data} has no test rows, whose loss is compared")
    return data


def run(world, options: HogwildBenchOptions, data: Data) -> tuple | None:
    logging.getLogger("hpcdl").setLevel(logging.ERROR)  # more threads than cores: the table shows it
    variants = {each.name: each for each in variants_of(options, world.size, data.rows_in_memory.sparse)}
    ways = {name: lambda turn, each=each: measure(world, options, data, each) for name, each in variants.items()}
    found = bench.in_turns(1 + options.turns, ways)
    if world.rank > 0:
        return None
    return tabulated(options, data, {variants[name]: turns[1:] for name, turns in found.items()})  # without warm-up


def variants_of(options: HogwildBenchOptions, ranks: int, sparse: bool) -> list[Variant]:
    """Return the ways to train on up to `ranks` ranks. One thread with locks shows what locks cost."""
    found = [
        Variant(f"{threads} x {locking}", 1, threads, locking)
        for locking in options.locking
        for threads in options.threads
    ]
    found += [
        Variant(f"{threads} x none, exchange {every}", 1, threads, "none", every)
        for every in options.exchange_every
        for threads in options.threads
        if threads > 1
    ]
    if ranks > 1:
        found += [Variant(f"{ranks} ranks x 1 {each}", ranks, 1, each) for each in options.locking[:1]]
        found += [Variant(f"{ranks} ranks, a vector each", ranks, 1, options.locking[0], shared=False)]
    if options.model == "logistic" and options.schedule == "constant":
        if sparse:
            found += [Variant(f"{threads} x {PLAIN}", 1, threads, PLAIN) for threads in options.threads]
        if find_spec("sklearn"):
            found.append(Variant(SKLEARN, 1, 1, ""))
    return found


def measure(world, options: HogwildBenchOptions, data: Data, variant: Variant) -> HogwildMeasurement | None:
    """Run a variant on the first ranks; other ranks sleep meanwhile, which frees their cores, and return None."""
    from mpi4py import MPI

    group = world.Split(0 if world.rank < variant.ranks else MPI.UNDEFINED, world.rank)
    found = None
    if group != MPI.COMM_NULL:
        if variant.name == SKLEARN:
            found = beside(options, data)
        elif variant.locking == PLAIN:
            found = by_plain_kernel(options, data, variant.threads)
        else:
            found = by_threads(group, options, data, variant)
        group.Free()
    come = world.Ibarrier()
    while not come.Test():
        time.sleep(1e-3)
    return found


def by_threads(group, options: HogwildBenchOptions, data: Data, variant: Variant) -> HogwildMeasurement:
    """Train by HOGWILD!; seconds are those of its rounds and of drawing the order of examples."""
    from hpcdl.comm import Communicator

    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "run")) if group.rank == 0 else "none"
        out = group.bcast(out)
        rows = min(options.round_size, data.examples) or -(-data.examples // 10)
        plain = {"data": "digits", "optimizer": "sgd", "trace": 0}
        settings = bench.training_options(options, batch_size=rows, out=out, **plain)
        how = {"threads": variant.threads, "locking": variant.locking, "exchange_every": variant.exchange_every}
        how |= {"shared": True} if variant.ranks > 1 and variant.shared else {"join_every": NEVER}
        run = bench.trained(Communicator(group), hogwild.train, settings, data, **how)
        lines = Path(out, "metrics.jsonl").read_text().splitlines() if group.rank == 0 else []
    losses = [line["test_loss"] for line in map(json.loads, lines) if "test_loss" in line]
    summary = run.summary or {"collisions": None, "update_staleness": {"mean": None}}
    return HogwildMeasurement(run.seconds, losses, summary["collisions"], summary["update_staleness"]["mean"])


def by_plain_kernel(options: HogwildBenchOptions, data: Data, threads: int) -> HogwildMeasurement:
    """Train by `plain_kernel` on threads that share w; seconds are those of all epochs and of drawing their orders."""
    loop, random = plain_kernel(), np.random.default_rng(options.seed)
    x, y = data.train.rows(0, data.examples)
    w = np.zeros(x.shape[1] + 1, np.float32)
    rate, values = np.float32(options.lr), np.asarray(x.data, np.float32)
    loop(values, x.indices, x.indptr, y, np.empty(0, np.int64), w, rate)  # compiles
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(options.epochs):
            order = random.permutation(data.examples)
            parts = [order[part] for part in chunks(data.examples, threads)]
            list(pool.map(lambda part: loop(values, x.indices, x.indptr, y, part, w, rate), parts))
    seconds = time.perf_counter() - begun
    x, y = data.test.rows(0, data.test.examples)
    rows = np.repeat(np.arange(len(y)), np.diff(x.indptr))
    margin = w[-1] + np.bincount(rows, x.data * w[x.indices], len(y))
    return HogwildMeasurement(seconds, [logistic_loss(margin, y)])


@functools.cache
def plain_kernel():
    """Return HOGWILD! as the paper states it, for logistic loss: plain loads and stores, nothing counted or checked."""
    import numba

    @numba.njit(nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz", "afn"})
    def loop(data, indices, indptr, y, order, w, rate):
        bias, one = w.size - 1, np.float32(1)
        for row in order:
            first, last = np.uintp(indptr[row]), np.uintp(indptr[row + 1])
            z = w[bias]
            for e in range(first, last):
                z += data[e] * w[np.uintp(indices[e])]
            change = rate * (one / (one + np.exp(-z)) - np.float32(y[row]))
            for e in range(first, last):
                w[np.uintp(indices[e])] -= change * data[e]
            w[bias] -= change

    return loop


def logistic_loss(margin: np.ndarray, y: np.ndarray) -> float:
    return float(np.logaddexp(0, np.where(y == 1, -margin, margin)).mean())


def beside(options: HogwildBenchOptions, data: Data) -> HogwildMeasurement:
    """Train by scikit-learn, without penalty, at the same rate, for as many epochs."""
    from sklearn.linear_model import SGDClassifier

    x, y = rows_of(data.train)
    made = SGDClassifier(
        loss="log_loss", penalty=None, learning_rate="constant", eta0=options.lr, max_iter=options.epochs, tol=None,
        random_state=options.seed,
    )  # fmt: skip
    begun = time.perf_counter()
    made.fit(x, y)
    seconds = time.perf_counter() - begun
    x, y = rows_of(data.test)
    return HogwildMeasurement(seconds, [logistic_loss(made.decision_function(x).astype(np.float64), y)])


def rows_of(split):
    """Return (x, y) of all rows of a split, as scikit-learn takes them."""
    x, y = split.rows(0, split.examples)
    if isinstance(x, CSR):
        from scipy.sparse import csr_matrix

        x = csr_matrix((x.data, x.indices, x.indptr.astype(np.int32)), x.shape)
    return x, y


def tabulated(
    options: HogwildBenchOptions, data: Data, columns: dict[Variant, list[HogwildMeasurement]]
) -> tuple[str, list[dict], list[dict]]:
    examples = options.epochs * data.examples
    speeds = {variant: [examples / each.seconds for each in some] for variant, some in columns.items()}
    first, base = next(iter(speeds.items()))
    fewest = {each.locking: speed for each, speed in reversed(speeds.items()) if each.ranks == 1}  # the first of each
    rows, records = [], []
    for variant, some in columns.items():
        ratios = [one / other for one, other in zip(speeds[variant], base, strict=True)]
        gains = [one / other for one, other in zip(speeds[variant], fewest[variant.locking], strict=True)]
        loss = statistics.median(each.losses[-1] for each in some)
        shares = [[each[k] for each in some if each[k] is not None] for k in (2, 3)]
        collisions, staleness = (statistics.median(share) if share else None for share in shares)
        rows.append(
            {
                "": variant.name,
                "M examples/s": bench.spread([speed / 1e6 for speed in speeds[variant]], ".3f"),
                f"against {first.name}": bench.spread(ratios, ".2f"),
                "gain": bench.spread(gains, ".2f"),
                "collisions": "" if collisions is None else f"{collisions:.2%}",
                "staleness": "" if staleness is None else f"{staleness:.2f}",
                "test loss": f"{loss:.5f}",
            }
        )
        record = variant._asdict()
        del record["shared"]
        record |= bench.quartiles("examples_per_second", speeds[variant]) | bench.quartiles("ratio", ratios)
        record |= bench.quartiles("gain", gains)
        middle = np.median([each.losses for each in some], axis=0).tolist()
        records.append(record | {"collisions": collisions, "staleness": staleness, "test_loss_per_evaluation": middle})
    about = f"{data.name}, {data.examples} rows of {int(np.prod(data.features))} features, {options.model}"
    if options.plot:
        axes = bench.subplot(xlabel="epochs", ylabel="test loss")
        for record in records:
            losses = record["test_loss_per_evaluation"]
            if record["name"] != SKLEARN and record["locking"] != PLAIN:
                axes.plot(range(1, len(losses) + 1), losses, marker="o", markersize=3, label=record["name"])
        axes.legend()
        bench.save(axes, options.plot)
    return f"HOGWILD!: {about}, lr {options.lr:g}, {options.epochs} epochs", rows, records


main = bench.benchmark("bench-hogwild", HogwildBenchOptions, __doc__, run, rows_to_train)


if __name__ == "__main__":
    main()
