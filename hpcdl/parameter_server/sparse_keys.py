"""Which elements of a store's vector travel where a client needs some of them only: rows of a matrix, and the rest.

    vector    | row 0 | row 1 | row 2 | row 3 | row 4 | ...       | tail: what is no row's |
    keys      |       |   x   |       |       |   x   |           |                        |
    travels   |       | # # # |       |       | # # # |           | # # # # # # # # # # #  |

The matrix is the weight of a model's first layer, with a row for each feature: a batch of sparse data touches those of
the features that it has. A key is the number of a row. Servers hold slices that are cut between rows, and each is told
its own keys, counted from the beginning of its slice; client and server find the same elements from them, so that no
element brings an index of its own.

(Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KEY = np.dtype(np.int64)


class VectorRows(NamedTuple):
    """How a vector is cut into rows: of `width` elements each, up to element `tail`, a multiple of it."""

    width: int
    tail: int

    def within(self, keys: np.ndarray, held: slice) -> np.ndarray:
        """Of these keys, which are sorted, those of rows in a slice of the vector, counted from its beginning."""
        first = held.start // self.width
        return keys[slice(*np.searchsorted(keys, (first, first + self.count(held))))] - first

    def count(self, held: slice) -> int:
        """How many rows there are in a slice of the vector."""
        return max(0, min(held.stop, self.tail) // self.width - held.start // self.width)

    def elements(self, keys: np.ndarray, held: slice) -> np.ndarray:
        """Which elements of the slice travel with these keys of its own: those of the rows, then those of the tail."""
        of_rows = (keys[:, None] * self.width + np.arange(self.width)).reshape(-1)
        return np.append(of_rows, np.arange(max(self.tail, held.start) - held.start, held.stop - held.start))


class Touched(NamedTuple):
    """What travels between a client and a server: keys, counted from the beginning of the slice, and elements."""

    keys: np.ndarray
    elements: np.ndarray


def added(
    rows: VectorRows, held: slice, parts: Sequence[Touched], values: Sequence[np.ndarray]
) -> tuple[Touched, np.ndarray]:
    """What any of the parts touches of a slice, and the sums of their values there, added in the order of the parts."""
    keys = np.unique(np.concatenate([part.keys for part in parts]))
    union = Touched(keys, rows.elements(keys, held))
    total = np.zeros(len(union.elements), values[0].dtype)
    of_rows, width = len(keys) * rows.width, rows.width
    for part, each in zip(parts, values, strict=True):
        cut = len(part.keys) * width
        total[:of_rows].reshape(-1, width)[np.searchsorted(keys, part.keys)] += each[:cut].reshape(-1, width)
        total[of_rows:] += each[cut:]
    return union, total
