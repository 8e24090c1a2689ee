"""Resampling for ensembles: the rows (bootstrap) and the features (random subspace) that a member is trained on.

    rows        n drawn with replacement from the n training examples, with equal weights (the bootstrap of bagging) or
                those of boosting; about 1/e of the examples are left out
    features    a random fraction of them; the others are 0 in all rows

(Breiman, "Bagging predictors", Machine Learning 1996; Ho, "The random subspace method for constructing decision
forests", IEEE PAMI 1998.) The draws depend on (seed, member) alone. Drawn rows are numbers into the rows in memory:
nothing is copied. Features that are left out get the deviation LEFT_OUT in the statistics that standardize rows, so
that checkpoints keep them and predictions leave them out, too.
"""

import math
from typing import NamedTuple

import numpy as np

from hpcdl.data.dataset import Data, Split
from hpcdl.data.digest import blake
from hpcdl.data.readers import MemoryReader
from hpcdl.data.standard import LEFT_OUT, Standard
from hpcdl.errors import UsageError
from hpcdl.random import Random


class Draw(NamedTuple):
    """The resampling of an ensemble's member.

    rows: True to draw rows; weights: of the rows, None: equal; features: the fraction that the member sees.
    """

    seed: int
    member: int
    rows: bool = False
    weights: np.ndarray | None = None
    features: float = 1.0

    def examples(self, count: int) -> np.ndarray:
        """Return `count` sorted example numbers drawn from `count` examples, some repeated, some left out."""
        if not self.rows:
            return np.arange(count)
        random = Random(self.seed)("bootstrap", self.member)
        if self.weights is None:
            return np.sort(random.integers(0, count, count))
        return np.sort(random.choice(count, count, p=self.weights))

    def left_out(self, width: int) -> np.ndarray:
        """Return the sorted numbers of the features, of `width`, that the member does not see; it sees one at least."""
        seen = max(1, round(self.features * width))
        return np.sort(Random(self.seed)("subspace", self.member).permutation(width)[seen:])

    def apply(self, data: Data) -> None:
        """Resample the data in place. UsageError if rows are not all in memory, or no feature can be set to 0."""
        if self.rows:
            draw_rows(data, self)
        if self.features < 1:
            leave_out(data, self.left_out(math.prod(data.features)))


def draw_rows(data: Data, draw: Draw) -> None:
    """Replace the training examples by the drawn ones."""
    reader = getattr(data, "_reader", None)
    if not isinstance(reader, MemoryReader) or reader.local:
        raise UsageError("rows are drawn again (bagging, boosting) with --placement shared only, without data servers")
    drawn = draw.examples(data.examples)
    numbers = drawn if reader.numbers is None else reader.numbers[drawn]
    owners = None if reader.owners is None else reader.owners[drawn]
    data._reader = MemoryReader(reader.rows, numbers, reader.classes, reader.seed, reader.spec, owners=owners)
    data.train = Split(data.train.source, numbers, data.dtype)
    digest = data._make_digest
    data._make_digest = lambda: blake(f"{digest()} rows {blake(drawn.tobytes()).hexdigest()}".encode()).hexdigest()


def leave_out(data: Data, features: np.ndarray) -> None:
    """Set these features to 0 in all rows."""
    if getattr(data, "_reader", None) is None:
        raise UsageError("a subspace of the features needs its rows without data servers")
    if data.sparse or data.vocabulary is not None:
        what = "sparse rows, which are not standardized" if data.sparse else "tokens of a text"
        raise UsageError(f"a subspace of the features needs dense rows of numbers, not {what}")
    width = math.prod(data.features)
    statistics = {"mean": np.zeros(width), "deviation": np.ones(width)} | {
        name: each.copy() for name, each in data.statistics.items()
    }
    statistics["mean"][features], statistics["deviation"][features] = 0.0, LEFT_OUT
    standard = Standard(statistics, data.dtype)
    for split in (data.train, data.test, data.validation):
        if split is not None:
            split.source.standard = standard
    data.statistics = statistics
