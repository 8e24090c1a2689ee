"""HOGWILD! by threads and by locks, beside scikit-learn: mpiexec -n 2 python scripts/bench_hogwild.py --json a.json

Trains a linear model on rows of RCV1's shape, or on other data, in turns: by one thread, by several, under each
locking, by several that exchange what they have changed after so many updates, where there are ranks by one thread of
each on memory that they share and on a vector each, which is what the cores can do where they have nothing in common,
and, where scikit-learn is installed, by its SGDClassifier. Prints examples per second, collisions and the test loss,
which should be the same but for the vectors apart; --plot draws the test loss against the epochs. A dense case:
--data digits --model softmax --lr 0.05.
"""

import json
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.csr import CSR
from hpcdl.data import Data
from hpcdl.data.synthetic import draw_or_open_data
from hpcdl.errors import UsageError
from hpcdl.kernels.hogwild_locks import LOCKINGS
from hpcdl.launch.benchmark_table import benchmark, figure, positive, quartiles, report, save, several, spread, trained
from hpcdl.runs import Options
from hpcdl.runs.options import option
from hpcdl.strategies import hogwild

SKLEARN = "scikit-learn"
NEVER = 10**9  # rounds


@dataclass
class HogwildBenchOptions:
    """What is trained, and how."""

    data: str = option("rcv1", "rows: drawn ones, as by prepare-data synthetic, digits, or an HDF5 file")
    model: str = option("logistic", "a linear model: linear, logistic, svm or softmax")
    lr: float = option(0.5, "learning rate")
    schedule: str = option("constant", "and its schedule by epochs, as step:every=1,factor=0.6")
    epochs: int = option(2, "epochs of each run")
    threads: str = option("1,2", "numbers of threads, with commas between")
    locking: str = option("none,atomic,striped,global,round-robin", "lockings, with commas between")
    exchange_every: str = option("1024", "updates between the exchanges of threads that have replicas, with commas")
    round_size: int = option(0, "examples of a round, at whose end all threads meet; 0: a tenth of an epoch")
    turns: int = option(5, "how often everything is measured, one after the other")
    seed: int = option(0, "seed of the runs; that of drawn rows is in --data, as in rcv1:seed=1")
    plot: str = option("", "file for a picture of the test loss (needs the extra report)")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "epochs", "turns")
        several(self, "threads", "exchange_every")
        if self.round_size < 0:
            raise UsageError(f"--round-size must not be negative, and is {self.round_size}")
        self.locking = self.locking.split(",")
        for name in self.locking:
            if name not in LOCKINGS:
                raise UsageError(f"--locking: {', '.join(LOCKINGS)} or several with commas between, not {name!r}")


class Variant(NamedTuple):
    """What is measured: by so many ranks, each with so many threads."""

    name: str
    ranks: int
    threads: int
    locking: str
    exchange_every: int = 0
    shared: bool = True  # one vector for all ranks


class HogwildMeasurement(NamedTuple):
    """seconds of the training, its losses on the test part after each epoch, and of the summary what is sampled."""

    seconds: float
    losses: list
    collisions: float | None = None
    staleness: float | None = None


def main(arguments=None):
    def rows(options, _):
        data = draw_or_open_data(options.data, seed=options.seed)
        if data.test is None:
            raise UsageError(f"--data {options.data}: there are no test rows, whose loss is compared")
        return data

    with benchmark("bench-hogwild", HogwildBenchOptions, __doc__, arguments, rows) as (world, options, data):
        logging.getLogger("hpcdl").setLevel(logging.ERROR)  # more threads than cores: the table shows it
        variants = variants_of(options, world.size)
        turns = [[measure(world, options, data, each) for each in variants] for _ in range(1 + options.turns)]
        if world.rank == 0:
            show(options, data, variants, turns[1:])  # the first turn warms up


def variants_of(options: HogwildBenchOptions, ranks: int) -> list[Variant]:
    """What is measured on so many ranks; a single thread needs no locks, but shows what they cost."""
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
    fits = sklearn() and options.model == "logistic" and options.schedule == "constant"
    return [*found, Variant(SKLEARN, 1, 1, "")] if fits else found


def sklearn():
    """Its linear models, or None."""
    try:
        from sklearn import linear_model
    except ImportError:
        return None
    return linear_model


def measure(world, options: HogwildBenchOptions, data: Data, variant: Variant) -> HogwildMeasurement | None:
    """One run, on the first ranks; those that have no part in it sleep meanwhile, and leave the core to others."""
    group = world.Split(0 if world.rank < variant.ranks else MPI.UNDEFINED, world.rank)
    found = None
    if group != MPI.COMM_NULL:
        found = beside(options, data) if variant.name == SKLEARN else by_threads(group, options, data, variant)
        group.Free()
    come = world.Ibarrier()
    while not come.Test():
        time.sleep(1e-3)
    return found


def by_threads(group, options: HogwildBenchOptions, data: Data, variant: Variant) -> HogwildMeasurement:
    """A run of HOGWILD!; seconds are those of its rounds and of drawing their order."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "run")) if group.rank == 0 else "none"
        out = group.bcast(out)
        settings = Options(
            model=options.model,
            optimizer="sgd",
            schedule=options.schedule,
            lr=options.lr,
            epochs=options.epochs,
            batch_size=min(options.round_size, data.examples) or -(-data.examples // 10),
            seed=options.seed,
            out=out,
            trace=0,
            progress="none",
        )
        how = {"threads": variant.threads, "locking": variant.locking, "exchange_every": variant.exchange_every}
        how |= {"shared": True} if variant.ranks > 1 and variant.shared else {"join_every": NEVER}
        run = trained(Communicator(group), hogwild.train, settings, data, **how)
        lines = Path(out, "metrics.jsonl").read_text().splitlines() if group.rank == 0 else []
    losses = [line["test_loss"] for line in map(json.loads, lines) if "test_loss" in line]
    summary = run.summary or {"collisions": None, "update_staleness": {"mean": None}}
    return HogwildMeasurement(run.seconds, losses, summary["collisions"], summary["update_staleness"]["mean"])


def beside(options: HogwildBenchOptions, data: Data) -> HogwildMeasurement:
    """The same by scikit-learn: no penalty, the same rate, as many epochs."""
    x, y = rows_of(data.train)
    made = sklearn().SGDClassifier(
        loss="log_loss", penalty=None, learning_rate="constant", eta0=options.lr, max_iter=options.epochs, tol=None,
        random_state=options.seed,
    )  # fmt: skip
    begun = time.perf_counter()
    made.fit(x, y)
    seconds = time.perf_counter() - begun
    x, y = rows_of(data.test)
    margin = np.where(y == 1, 1, -1) * made.decision_function(x).astype(np.float64)
    return HogwildMeasurement(seconds, [float(np.logaddexp(0, -margin).mean())])


def rows_of(split):
    """All rows of a split, as scikit-learn takes them."""
    x, y = split.rows(0, split.examples)
    if isinstance(x, CSR):
        from scipy.sparse import csr_matrix

        x = csr_matrix((x.data, x.indices, x.indptr.astype(np.int32)), x.shape)
    return x, y


def show(
    options: HogwildBenchOptions, data: Data, variants: list[Variant], turns: list[list[HogwildMeasurement]]
) -> None:
    """Print the table, write the numbers, draw the picture."""
    columns = {variant: [turn[k] for turn in turns] for k, variant in enumerate(variants)}
    examples = options.epochs * data.examples
    speeds = {variant: [examples / each.seconds for each in some] for variant, some in columns.items()}
    base = next(iter(speeds.values()))
    rows, records = [], []
    for variant, some in columns.items():
        ratios = [one / other for one, other in zip(speeds[variant], base, strict=True)]
        loss = statistics.median(each.losses[-1] for each in some)
        shares = [[each[k] for each in some if each[k] is not None] for k in (2, 3)]
        collisions, staleness = (statistics.median(share) if share else None for share in shares)
        rows.append(
            {
                "": variant.name,
                "M examples/s": spread([speed / 1e6 for speed in speeds[variant]], ".3f"),
                f"against {variants[0].name}": spread(ratios, ".2f"),
                "collisions": "" if collisions is None else f"{collisions:.2%}",
                "staleness": "" if staleness is None else f"{staleness:.2f}",
                "test loss": f"{loss:.5f}",
            }
        )
        record = {"name": variant.name, "ranks": variant.ranks, "threads": variant.threads, "locking": variant.locking}
        record["exchange_every"] = variant.exchange_every
        record |= quartiles("examples_per_second", speeds[variant]) | quartiles("ratio", ratios)
        middle = np.median([each.losses for each in some], axis=0).tolist()
        records.append(record | {"collisions": collisions, "staleness": staleness, "test_loss_per_evaluation": middle})
    about = f"{data.name}, {data.examples} rows of {int(np.prod(data.features))} features, {options.model}"
    report(f"HOGWILD!: {about}, lr {options.lr:g}, {options.epochs} epochs", "bench-hogwild", options, rows, records)
    if options.plot:
        draw(options, records)


def draw(options: HogwildBenchOptions, records: list[dict]) -> None:
    """The test loss against the epochs."""
    picture = figure("--plot", figsize=(7, 4.2), layout="constrained")
    axes = picture.subplots()
    for record in records:
        losses = record["test_loss_per_evaluation"]
        if record["name"] != SKLEARN:
            axes.plot(range(1, len(losses) + 1), losses, marker="o", markersize=3, label=record["name"])
    axes.set_xlabel("epochs")
    axes.set_ylabel("test loss")
    axes.legend()
    save(picture, options.plot)


if __name__ == "__main__":
    main()
