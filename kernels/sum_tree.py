"""A sum tree: draws one of many leaves with a chance in proportion to its priority, and changes priorities.

    level 2                      [ a + b ... ]                        one node: its eight add up to the total
    level 1      [ a = 1 + 0 + ... + 3 | b | ... ]   [ ... ]
    level 0   [ 1 | 0 | ... | 3 ]  [ ... ]  [ ... ]                   the leaves: priorities

Eight children make a node, which is one cache line of 64 bytes, so that a million leaves are seven levels:

    assign    leaves <- values, then level by level: the sum of each node above one that has changed
    draw      from the top: of the node's eight, the first at which the sum of them so far is beyond what is left

A sum is that of its eight children as they are, in one order, never the old sum and a difference: so nothing drifts,
and a tree depends on its leaves alone, not on how they came to be so. A leaf of priority 0 is never drawn. Both cost
8 log_8(leaves) additions. `NumpySumTree` does the same in plain NumPy, to the bit. CPU only.

(Schaul, Quan, Antonoglou and Silver, "Prioritized experience replay", ICLR 2016, appendix B.2.1)
"""

import itertools
from functools import cache
from typing import Any

import numpy as np

from hpcdl.kernels.bind import exact, on_cpu, prepare
from hpcdl.kernels.device import CPU

FAN = 8  # children of a node
BITS = 3  # of a number from 0 to FAN - 1
MOST = 1e200  # the largest priority: sums of so many stay finite


@exact
def node_sum(tree, first):
    """The sum of the eight numbers from `first` on."""
    left = (tree[first] + tree[first + 1]) + (tree[first + 2] + tree[first + 3])
    return left + ((tree[first + 4] + tree[first + 5]) + (tree[first + 6] + tree[first + 7]))


@on_cpu
def assign(tree, starts, index, values):
    """Leaves <- values (n,) at index (n,), the last counts; how many are no priorities: then nothing has changed."""
    wrong = 0
    for i in range(len(values)):
        wrong += not (values[i] >= 0.0 and values[i] <= MOST)
    if wrong > 0:
        return wrong
    for i in range(len(index)):
        tree[np.uintp(index[i])] = values[i]
    for level in range(1, len(starts)):
        below, here, shift, before = starts[level - 1], starts[level], BITS * level, np.int64(-1)
        for i in range(len(index)):
            node = index[i] >> shift
            if node != before:  # neighbours come one after another
                tree[np.uintp(here + node)] = node_sum(tree, np.uintp(below + FAN * node))
                before = node
    return 0


@on_cpu
def draw(tree, starts, left, index):
    """index (n,) <- the leaves at which the sum of priorities passes left (n,), from 0 to below the total.

    A level at a time for all of them, so that many are under way; left is what is left of each.
    """
    index[:] = 0
    for level in range(len(starts) - 1, -1, -1):
        for i in range(len(left)):
            node = np.uintp(starts[level]) + np.uintp(FAN) * np.uintp(index[i])
            passed, chosen, before = 0.0, 0, 0.0
            for c in range(FAN):  # no jump depends on the numbers
                passed += tree[node + np.uintp(c)]
                beyond = left[i] >= passed
                chosen += beyond
                before = passed if beyond else before
            if chosen == FAN:  # rounded: the last that is not 0, to its end
                while tree[node + np.uintp(chosen - 1)] == 0.0 and chosen > 1:
                    chosen -= 1
                chosen, before = chosen - 1, 0.0
                for c in range(chosen):
                    before += tree[node + np.uintp(c)]
            left[i] -= before
            index[i] = FAN * index[i] + chosen


@cache
def loops() -> tuple[Any, Any]:
    """`assign` and `draw`, compiled."""
    number, whole = np.empty(0), np.empty(0, np.int64)
    return prepare(assign, number, whole, whole, number), prepare(draw, number, whole, number, whole)


def level_sizes(leaves: int) -> list[int]:
    """The numbers of each level, from the leaves on, filled up to whole nodes."""
    sizes = [-(-leaves // FAN) * FAN]
    while sizes[-1] > FAN:
        sizes.append(-(-sizes[-1] // FAN**2) * FAN)
    return sizes


def bytes_needed(leaves: int) -> int:
    """The bytes of the tree's numbers."""
    return 8 * sum(level_sizes(leaves))


class SumTree:
    """Priorities of so many leaves, all 0 at first."""

    def __init__(self, leaves: int):
        self.sizes = level_sizes(leaves)
        self.starts = np.cumsum([0, *self.sizes[:-1]])
        self.tree = CPU.zeros(sum(self.sizes), np.float64)
        self.count = leaves
        self.prepare()

    def prepare(self) -> None:
        """Compile what it needs, before any clock runs."""
        self._assign, self._draw = loops()

    @property
    def leaves(self) -> np.ndarray:
        """The priorities, a view (leaves,) to be read."""
        return self.tree[: self.count]

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(node_sum_numpy(self.tree[-FAN:])[0])

    def assign(self, index: np.ndarray, values: np.ndarray) -> None:
        """The priorities at index int64 (n,) become values float64 (n,); of one that is named twice, the last.

        Raises ValueError, and changes nothing, where one is NaN, negative or beyond 1e200.
        """
        if self._assign(self.tree, self.starts, index, values):
            raise ValueError("a priority is negative, infinite or NaN")

    def draw(self, targets: np.ndarray) -> np.ndarray:
        """The leaves, int64 (n,), at which the running sum of priorities passes the targets, float64 (n,).

        targets: from 0 to below `total`, which must not be 0; those that are uniform draw by priority.
        """
        index = np.empty(len(targets), np.int64)
        self._draw(self.tree, self.starts, np.array(targets, np.float64), index)
        return index


def node_sum_numpy(nodes: np.ndarray) -> np.ndarray:
    """Sums of nodes of eight that lie one after another, added up in the order of node_sum."""
    pairs = nodes[0::2] + nodes[1::2]
    fours = pairs[0::2] + pairs[1::2]
    return fours[0::2] + fours[1::2]


class NumpySumTree(SumTree):
    """The same in plain NumPy: a level at a time for all that is changed or drawn."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def assign(self, index: np.ndarray, values: np.ndarray) -> None:
        """As SumTree has it."""
        if not ((values >= 0) & (values <= MOST)).all():
            raise ValueError("a priority is negative, infinite or NaN")
        self.tree[index] = values
        for below, here in itertools.pairwise(self.starts):
            index = np.unique(index // FAN)
            children = self.tree[below + FAN * index[:, None] + np.arange(FAN)]
            self.tree[here + index] = node_sum_numpy(children.reshape(-1))

    def draw(self, targets: np.ndarray) -> np.ndarray:
        """As SumTree has it."""
        left, at = np.array(targets, np.float64), np.zeros(len(targets), np.int64)
        for first in self.starts[::-1]:
            children = self.tree[first + FAN * at[:, None] + np.arange(FAN)]
            passed = np.cumsum(children, axis=1)
            chosen = (left[:, None] >= passed).sum(axis=1)
            last = FAN - 1 - (children[:, ::-1] != 0).argmax(axis=1)
            chosen = np.where(chosen == FAN, last, chosen)
            left -= np.where(chosen > 0, passed[np.arange(len(at)), chosen - 1], 0.0)
            at = FAN * at + chosen
        return at
