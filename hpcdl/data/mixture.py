"""Mixtures: one training on several data sets, of which each batch has fixed shares; --data mix:A=0.7,B=0.3

    position of the epoch   0 1 2 3 4 5 6 7 8 9 ...      which source: a cycle of 1,000 positions, in which each source
    source                  A A B A B A A A B A ...      has its share, in an order drawn by (seed, epoch, cycle)
    row of A                0 1   2   3 4 5   6          rows of a source come in its own order, whose epochs follow one
    row of B                    0   1       2            another: the row after the last one is the first of its next

An epoch ends when A, the first source, has been read once. Each epoch has as many rows of each source (`drawn`), one
off its share at most. How many rows of a source come before a position follows by counting in one cycle, so batches are
the same for any number of ranks and a run resumes at any step. Test and validation rows, and statistics for
standardizing, are those of the first source. Memory: that of the sources, and a copy of each one's part of a batch."""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from hpcdl.csr import CSR
from hpcdl.data import sampler
from hpcdl.data.augment import Moves
from hpcdl.data.batch import Batch, BatchBuffers
from hpcdl.data.dataset import Data, Split
from hpcdl.data.digest import blake
from hpcdl.data.readers import most_rows
from hpcdl.data.sampler import Share
from hpcdl.data.schema import Schema
from hpcdl.errors import UsageError, parse_finite
from hpcdl.plugins import MIXTURE, is_mixture, is_plugin
from hpcdl.random import Random

CYCLE = 1000  # positions
FORM = "write mix:A=0.7,B=0.3, with data sets and their weights"


def test_source(name: str) -> str:
    """Return the data set whose test rows count: the first of a mixture, else the name itself. Raises UsageError."""
    return next(iter(parse_mixture(name))) if is_mixture(name) else name


def parse_mixture(text: str) -> dict[str, float]:
    """Return the weights of the sources by name. UsageError: no positive number, a source that comes twice, a mixture
    in the mixture, or a function, which may have commas in its settings."""
    weights: dict[str, float] = {}
    for item in text.removeprefix(MIXTURE).split(","):
        name, _, number = (each.strip() for each in item.rpartition("="))
        if not name:
            raise UsageError(f"--data {text}: {item!r} is no data set with a weight; {FORM}")
        if is_mixture(name):
            raise UsageError(f"--data {text}: {name} is a mixture in a mixture; name its sources, with their weights")
        if is_plugin(name):
            raise UsageError(f"--data {text}: {name} is a function; a mixture takes data files and known data sets")
        try:
            weight = parse_finite(number)
        except ValueError:
            weight = 0.0
        if weight <= 0:
            raise UsageError(f"--data {text}: the weight of {name} should be a number greater than 0, not {number!r}")
        if name in weights:
            raise UsageError(f"--data {text}: {name} comes twice; give it one weight")
        weights[name] = weight
    return weights


def apportioned(weights: Sequence[float], seats: int) -> np.ndarray:
    """Return whole numbers of sum `seats`, each less than 1 off its share: the largest remainders are rounded up."""
    shares = np.array(weights, np.float64) / sum(weights) * seats
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: seats - counts.sum()]] += 1
    return counts


class Mixture:
    """Which source each position of an epoch takes: pure functions of weights, training rows by source, and seed.

    counts   rows of each source in a cycle of 1,000      drawn      rows of each source in an epoch
    first    number of each source's first training row   examples   rows of an epoch
             in `batch.index`, which counts through all sources"""

    def __init__(self, names: Sequence[str], weights: Sequence[float], rows: Sequence[int], seed: int):
        self.names, self.weights, self.rows, self.seed = list(names), list(weights), list(map(int, rows)), int(seed)
        self.counts = apportioned(weights, CYCLE)
        if not self.counts.all():
            name = self.names[int(self.counts.argmin())]
            raise UsageError(f"--data {MIXTURE}...: the share of {name} is less than one row in {CYCLE}: leave it out")
        self.full, rest = divmod(self.rows[0], int(self.counts[0]))  # full cycles, and rows of the first source after
        self.last = np.rint(self.counts * (rest / self.counts[0])).astype(np.int64)
        self.drawn = self.full * self.counts + self.last
        if not self.drawn.all():
            name = self.names[int(self.drawn.argmin())]
            raise UsageError(
                f"--data {MIXTURE}...: an epoch, {self.rows[0]} rows of {self.names[0]}, has none of {name}"
            )
        self.examples = int(self.drawn.sum())
        self.first = np.cumsum([0, *self.rows])
        self._cycle = functools.lru_cache(16)(self._draw)

    def describe(self) -> dict:
        """Return the arguments of the constructor as a JSON object."""
        return {"names": self.names, "weights": self.weights, "rows": self.rows, "seed": self.seed}

    def _draw(self, epoch: int, cycle: int) -> np.ndarray:
        of_cycle = np.repeat(np.arange(len(self.names)), self.counts if cycle < self.full else self.last)
        return Random(self.seed)("mixture", epoch, cycle).permutation(of_cycle)

    def sources(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the source of each of the positions start to stop - 1 of an epoch."""
        cycles = range(start // CYCLE, -(-stop // CYCLE))
        parts = [np.empty(0, np.int64), *(self._cycle(epoch, each) for each in cycles)]
        return np.concatenate(parts)[start - start // CYCLE * CYCLE :][: stop - start]

    def before(self, epoch: int, position: int) -> np.ndarray:
        """Return how many rows of each source come before a position of an epoch, counted from the start of epoch 0."""
        cycle = position // CYCLE
        begun = self.sources(epoch, cycle * CYCLE, position)
        return epoch * self.drawn + cycle * self.counts + np.bincount(begun, minlength=len(self.names))

    def used(self, epoch: int, step: int, batch_size: int) -> dict[str, dict[str, float]]:
        """Return the rows drawn of each source by name, and its epochs, before a step of an epoch."""
        counts = self.before(epoch, min(step * batch_size, self.examples)).tolist()
        used = zip(self.names, counts, self.rows, strict=True)
        return {name: {"rows": count, "epochs": round(count / rows, 6)} for name, count, rows in used}


class JoinedRows:
    """The training rows of all sources, one after the other, with the interface of `placement.MemoryRows`."""

    def __init__(self, parts: list[Split]):
        self.parts, first = parts, parts[0]
        self.first = np.cumsum([0, *(part.examples for part in parts)])
        self.form, self.width, self.outputs, self.sparse = (
            first.form,
            first.form.width,
            first.form.outputs,
            first.form.sparse,
        )
        self.y_kind, self.standard = first.source.y_kind, first.source.standard
        self.kind = max((memory_kind(part) for part in parts), key=lambda kind: kind.itemsize)

    def __len__(self) -> int:
        return int(self.first[-1])

    def gather(self, index: np.ndarray, x: Any, y: np.ndarray) -> None:
        """Set x and y to the rows with these numbers, as the sources give them."""
        of, taken = np.searchsorted(self.first, index, side="right") - 1, {}
        for number, part in enumerate(self.parts):
            where = np.flatnonzero(of == number)
            if len(where):
                taken[number] = where, *part.take(index[where] - self.first[number])
        scatter(list(taken.values()), x, y)

    def most_elements(self, rows: int) -> int:
        """Return a bound on the elements that any `rows` rows have together."""
        return int(sum(part.source.most_elements(min(rows, len(part.source))) for part in self.parts))

    def close(self) -> None:
        """The sources are closed as data sets."""


def memory_kind(part: Split) -> np.dtype:
    """Return the type of x of a split, in memory."""
    source = part.source
    kind: np.dtype = getattr(source, "kind", None) or source.x.dtype
    return kind


def scatter(parts: list[tuple[np.ndarray, Any, np.ndarray]], x: Any, y: np.ndarray) -> None:
    """Set rows of x and y. parts: (numbers of rows, their x, their y); together they are all rows of x."""
    for where, _, part_y in parts:
        y[where] = part_y
    if isinstance(x, CSR):
        if parts:
            order = np.concatenate([where for where, _, _ in parts])
            x.put(CSR.joined([part_x for _, part_x, _ in parts]).take(np.argsort(order)))
        return
    for where, part_x, _ in parts:
        x[where] = part_x


class MixedReader:
    """Batches of a mixture, from the readers of its sources."""

    owners = None

    def __init__(self, readers: list[Any], mixture: Mixture, forms: list[Any], augment: Any):
        self.readers, self.mixture, self.forms, self.augment = readers, mixture, forms, augment
        self.examples = mixture.examples

    def batches(
        self, epoch: int, batch_size: int, share: Share, steps: Iterable[int], buffers: BatchBuffers, ahead: bool = True
    ) -> Generator[Batch, None, None]:
        """Yield the batches of these steps, as readers do."""
        mixture, alone = self.mixture, len(self.readers) == 1
        share_at = partial(sampler.global_share, self.examples, batch_size)

        def spans(source: int) -> Iterable[tuple[int, int]]:
            for step in steps:
                part = share_at(step, *share)
                yield tuple(int(mixture.before(epoch, at)[source]) for at in (part.start, part.stop))  # type: ignore[misc]

        with contextlib.ExitStack() as stack:
            takes = [
                stack.enter_context(reader.reading(spans(number) if ahead else None))
                for number, reader in enumerate(self.readers)
            ]
            pairs = [BatchBuffers(1, form) for form in self.forms]
            for step in steps:
                first, last, offset, total = share_at(step, *share)
                x, y = buffers.next(last - first)
                moves = self.augment.moves(epoch, step, total, offset, last - first) if self.augment else None
                before, of = mixture.before(epoch, first), mixture.sources(epoch, first, last)
                index, parts = np.empty(last - first, np.int64), []
                for number, take in enumerate(takes):
                    where, begin = np.flatnonzero(of == number), int(before[number])
                    mine = Moves(*(move[where] for move in moves)) if moves else None
                    own = (x, y) if alone else pairs[number].next(len(where))
                    index[where] = mixture.first[number] + take(begin, begin + len(where), *own, mine)
                    parts.append((where, *own))
                if not alone:
                    scatter(parts, x, y)
                yield Batch(x, y, total, epoch, step, index)

    def most_rows(self, batch_size: int, share: Share) -> int:
        return most_rows(self.examples, batch_size, *share)


class MixedData(Data):
    """A mixture as a data set. `batch.index` numbers the training rows of all sources, one source after the other, and
    `train` holds these; `examples` are those of an epoch. sources: the opened data sets."""

    def __init__(self, sources: list[Data], mixture: Mixture):
        first, self.mixture, self.sources = sources[0], mixture, sources
        reader: Any = MixedReader(
            [each._reader for each in sources], mixture, [each.train.form for each in sources], first._reader.augment
        )
        rows: Any = JoinedRows([each.train for each in sources])
        same: dict[str, Any] = {name: getattr(first, name) for name in ("features", "classes", "schema", "dtype")}
        orders, digests = [each.order for each in sources], [each._make_digest for each in sources]
        super().__init__(
            **same,
            name=first.name if len(sources) == 1 else f"mix of {', '.join(each.name for each in sources)}",
            train=rows,
            test=None,
            held_out=np.empty(0, np.int64),
            reader=reader,
            threaded=any(each._threaded for each in sources),
            order=self.joined(orders),
            digest=lambda: self.joined_digest([make() for make in digests]),
        )
        self.test, self.validation, self.examples = first.test, first.validation, mixture.examples
        self._resources = list(sources)

    def joined(self, orders: list[str]) -> str:
        """Return the order of an epoch from those of the sources."""
        if len(orders) == 1:
            return orders[0]
        parts = (f"{count} of {order}" for count, order in zip(self.mixture.counts, orders, strict=True))
        return f"in each {CYCLE} rows {', '.join(parts)}"

    def joined_digest(self, digests: list[str]) -> str:
        if len(digests) == 1:
            return digests[0]
        return blake(json.dumps([digests, self.mixture.counts.tolist()]).encode()).hexdigest()

    def order_under(self, placement: str, partition: str, window: int) -> str:
        """As that of `Data`."""
        return self.joined([each.order_under(placement, partition, window) for each in self.sources])

    @property
    def class_counts(self) -> np.ndarray | None:
        """The number of rows of each class in an epoch, about."""
        counts = [each.class_counts for each in self.sources]
        shares = self.mixture.drawn / np.array(self.mixture.rows)
        weighed = [count * share for count, share in zip(counts, shares, strict=True) if count is not None]
        return np.rint(sum(weighed)).astype(np.int64) if len(weighed) == len(counts) else None

    def _check_in_memory(self, share: Share | None = None) -> NoReturn:
        raise UsageError("this strategy needs the rows of one data set in memory, and a mixture has several")

    def with_rows(self, drawn: np.ndarray) -> NoReturn:
        """Rows of a mixture are not drawn again. Raises UsageError."""
        self._check_in_memory()

    def divide(self, count: int) -> NoReturn:
        """A mixture is not divided among clients. Raises UsageError."""
        self._check_in_memory()

    def with_standard(self, standard: Any) -> NoReturn:
        """Rows of a mixture are standardized by the first source. Raises UsageError."""
        self._check_in_memory()


def mixed(text: str, sources: list[Data], weights: Sequence[float], seed: int) -> MixedData:
    """Return the mixture of opened data sets; UsageError if they differ in features, classes or schema."""
    for other in sources[1:]:
        refuse_difference(text, sources[0], other)
    times = Counter(each.name for each in sources)
    names = [each.name if times[each.name] == 1 else each.source for each in sources]
    data = MixedData(sources, Mixture(names, weights, [each.examples for each in sources], seed))
    parts = (f"{each.source}={repr(weight).removesuffix('.0')}" for each, weight in zip(sources, weights, strict=True))
    data.source = MIXTURE + ",".join(parts)
    return data


def refuse_difference(text: str, first: Data, other: Data) -> None:
    """Raise UsageError if a source of a mixture does not fit the first one."""
    mine, theirs = (properties(each) for each in (first, other))
    for name, value in mine.items():
        if value != theirs[name]:
            said = [f"{shown(each[name])} ({data.name})" for each, data in ((mine, first), (theirs, other))]
            raise UsageError(
                f"--data {text}: sources of a mixture are alike, but their {name} differ: {' and '.join(said)}"
            )


def properties(data: Data) -> dict[str, Any]:
    """Return what the sources of a mixture have in common, by name."""
    schema: Schema = data.schema
    about = schema.describe()
    recipe = about.pop("recipe") or {}
    columns = [{k: v for k, v in each.items() if k != "fill"} for each in recipe.get("columns") or []]
    names = {"labels": "names of classes", "base": "numbers of the first feature", "scale": "scales"}
    return {
        "shapes of rows": list(data.features),
        "numbers of classes": data.classes,
        "shapes of targets": list(data.outputs),
        "kinds of rows": "sparse" if data.sparse else "dense",
        **{names.get(name, name): value for name, value in about.items()},
        "columns": columns,
    }


def shown(value: Any) -> str:
    """Return a short text of a property."""
    text = "none" if value in (None, []) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def counts_of(data: Any, step: int, per_epoch: int, batch_size: int) -> dict[str, Any]:
    """Return the entry `data_sources` of a run's summary after `step` steps; {} if the data are no mixture."""
    mixture: Mixture | None = getattr(data, "mixture", None)
    return {} if mixture is None else {"data_sources": mixture.used(*divmod(step, per_epoch), batch_size)}
