"""Sparse access to a store's vector: the rows that keys name travel, and the tail, which is in no row.

    vector    | row 0 | row 1 | row 2 | row 3 | row 4 | ...       | tail: elements of no row |
    keys      |       |   x   |       |       |   x   |           |                          |
    travels   |       | # # # |       |       | # # # |           | # # # # # # # # # # # #  |

The matrix is the weight of a model's first layer, with a row per feature: a batch of sparse data touches the rows of
its features. A key is a row number. Servers hold slices that are cut between rows, and each receives its own keys,
relative to its slice. Client and server derive the elements from the keys, so no element carries an index. (Li et al.,
"Scaling distributed machine learning with the parameter server", OSDI 2014)"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KEY = np.dtype(np.int64)


class VectorRows(NamedTuple):
    """Rows of a vector: `width` elements each, up to element `tail`, a multiple of `width`."""

    width: int
    tail: int

    def within(self, keys: np.ndarray, held: slice) -> np.ndarray:
        """Return the sorted keys that name rows of this slice, relative to its first row."""
        first = held.start // self.width
        return keys[slice(*np.searchsorted(keys, (first, first + self.count(held))))] - first

    def count(self, held: slice) -> int:
        """Return the number of rows in a slice of the vector."""
        return max(0, min(held.stop, self.tail) // self.width - held.start // self.width)

    def elements(self, keys: np.ndarray, held: slice) -> np.ndarray:
        """Return the places in the slice of the elements that travel with its keys: of the rows, then of the tail."""
        of_rows = (keys[:, None] * self.width + np.arange(self.width)).reshape(-1)
        return np.append(of_rows, np.arange(max(self.tail, held.start) - held.start, held.stop - held.start))


class Touched(NamedTuple):
    """The keys that a client names at a server, relative to the server's slice, and the places of their elements."""

    keys: np.ndarray
    elements: np.ndarray


def sum_touched(
    rows: VectorRows, held: slice, parts: Sequence[Touched], values: Sequence[np.ndarray]
) -> tuple[Touched, np.ndarray]:
    """Return the union of the parts, and the sums of their `values`, added in the order of the parts."""
    keys = np.unique(np.concatenate([part.keys for part in parts]))
    union = Touched(keys, rows.elements(keys, held))
    total = np.zeros(len(union.elements), values[0].dtype)
    row_elements, width = len(keys) * rows.width, rows.width
    for part, each in zip(parts, values, strict=True):
        cut = len(part.keys) * width
        total[:row_elements].reshape(-1, width)[np.searchsorted(keys, part.keys)] += each[:cut].reshape(-1, width)
        total[row_elements:] += each[cut:]
    return union, total
