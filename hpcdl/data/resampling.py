"""Other rows and other features of data that are open: those that a member of an ensemble is trained on.

    rows        n drawn with replacement from the n training examples, by equal weights (the bootstrap of bagging) or
                by those of boosting; about 1/e of them are left out
    features    a random fraction of them; the others are 0 in all rows, as if they had no deviation that counts
                (random subspaces)

(Breiman, "Bagging predictors", Machine Learning 1996; Ho, "The random subspace method for constructing decision
forests", IEEE PAMI 1998.) What is drawn follows from (seed, member) alone. Rows are numbers into those that lie in
memory, once for all ranks of a node: nothing is copied. The features that are left out become part of what rows are
standardized by, so that checkpoints keep them, and whoever predicts leaves them out, too.
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
    """What member number `member` is trained on. rows: whether they are drawn; weights: by which, None: equal ones.

    features: the fraction that it sees.
    """

    seed: int
    member: int
    rows: bool = False
    weights: np.ndarray | None = None
    features: float = 1.0

    def examples(self, count: int) -> np.ndarray:
        """Sorted numbers of the training examples, `count` of `count`; one may be there several times, or not."""
        if not self.rows:
            return np.arange(count)
        random = Random(self.seed)("bootstrap", self.member)
        if self.weights is None:
            return np.sort(random.integers(0, count, count))
        return np.sort(random.choice(count, count, p=self.weights))

    def left_out(self, width: int) -> np.ndarray:
        """Sorted numbers of the features that it does not see, of so many; it sees one at least."""
        kept = max(1, round(self.features * width))
        return np.sort(Random(self.seed)("subspace", self.member).permutation(width)[kept:])

    def apply(self, data: Data) -> None:
        """Let the data be so. UsageError where their rows do not all lie in memory, or zeros mean something else."""
        if self.rows:
            draw_rows(data, self)
        if self.features < 1:
            leave_out(data, self.left_out(math.prod(data.features)))


def draw_rows(data: Data, draw: Draw) -> None:
    """Let the training examples be those that are drawn."""
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
    """Let these features be 0 in all rows."""
    if getattr(data, "_reader", None) is None:
        raise UsageError("a subspace of the features needs its rows without data servers")
    if data.sparse or data.vocabulary is not None:
        what = "sparse rows, which are not standardized" if data.sparse else "tokens of a text"
        raise UsageError(f"a subspace of the features needs dense rows of numbers, not {what}")
    width = math.prod(data.features)
    found = {"mean": np.zeros(width), "deviation": np.ones(width)} | {
        name: each.copy() for name, each in data.statistics.items()
    }
    found["mean"][features], found["deviation"][features] = 0.0, LEFT_OUT
    standard = Standard(found, data.dtype)
    for split in (data.train, data.test, data.validation):
        if split is not None:
            split.source.standard = standard
    data.statistics = found
