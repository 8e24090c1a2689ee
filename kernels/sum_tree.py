"""Sum tree: draws leaves with probabilities proportional to their priorities, which may change. CPU only.

    level 2                      [ a + b ... ]                        one node: the sum of its eight is the total
    level 1      [ a = 1 + 0 + ... + 3 | b | ... ]   [ ... ]
    level 0   [ 1 | 0 | ... | 3 ]  [ ... ]  [ ... ]                   the leaves: priorities

A node has eight children, which fill one cache line of 64 bytes; a million leaves make seven levels.

    assign    leaves <- values, then level by level: the sum of each node with a changed child
    draw      from the top down: the first of a node's eight children whose running sum exceeds the rest of the target

A sum is always computed from its eight children, in a fixed order. So rounding errors do not accumulate, and a tree
depends only on its leaves, not on their history. A leaf of priority 0 is never drawn. Both operations cost 8
log_8(leaves) additions. (Schaul, Quan, Antonoglou and Silver, "Prioritized experience replay", ICLR 2016, B.2.1)"""

import itertools

import numpy as np

from hpcdl.kernels.bind import exact, on_cpu
from hpcdl.kernels.device import CPU

FAN = 8  # children of a node
BITS = 3  # of a number from 0 to FAN - 1
MOST = 1e200  # the largest priority: sums of so many stay finite


@exact
def node_sum(tree, first):
    """Return the sum of the eight numbers from `first` on."""
    left = (tree[first] + tree[first + 1]) + (tree[first + 2] + tree[first + 3])
    return left + ((tree[first + 4] + tree[first + 5]) + (tree[first + 6] + tree[first + 7]))


@on_cpu
def assign(tree, starts, index, values):
    """Leaves[index] <- values, both (n,); return how many values are invalid: if any, nothing has changed."""
    invalid = 0
    for i in range(len(values)):
        invalid += not (values[i] >= 0.0 and values[i] <= MOST)
    if invalid > 0:
        return invalid
    for i in range(len(index)):
        tree[np.uintp(index[i])] = values[i]
    for level in range(1, len(starts)):
        below, here, shift, before = starts[level - 1], starts[level], BITS * level, np.int64(-1)
        for i in range(len(index)):
            node = index[i] >> shift
            if node != before:  # leaves of one node often follow each other
                tree[np.uintp(here + node)] = node_sum(tree, np.uintp(below + FAN * node))
                before = node
    return 0


@on_cpu
def draw(tree, starts, left, index):
    """index (n,) <- the leaves whose running sums first exceed `left` (n,): targets from 0 to below the total.
    All draws descend together, so that their memory accesses overlap. left <- the rest of each target."""
    index[:] = 0
    for level in range(len(starts) - 1, -1, -1):
        for i in range(len(left)):
            node = np.uintp(starts[level]) + np.uintp(FAN) * np.uintp(index[i])
            passed, chosen, before = 0.0, 0, 0.0
            for c in range(FAN):  # without a branch that depends on the numbers
                passed += tree[node + np.uintp(c)]
                beyond = left[i] >= passed
                chosen += beyond
                before = passed if beyond else before
            if chosen == FAN:  # by rounding the target exceeds the sum: take the last child that is not 0
                while tree[node + np.uintp(chosen - 1)] == 0.0 and chosen > 1:
                    chosen -= 1
                chosen, before = chosen - 1, 0.0
                for c in range(chosen):
                    before += tree[node + np.uintp(c)]
            left[i] -= before
            index[i] = FAN * index[i] + chosen


def level_sizes(leaves: int) -> list[int]:
    """Return the sizes of the levels from the leaves up, rounded up to whole nodes."""
    sizes = [-(-leaves // FAN) * FAN]
    while sizes[-1] > FAN:
        sizes.append(-(-sizes[-1] // FAN**2) * FAN)
    return sizes


def bytes_needed(leaves: int) -> int:
    """Return the bytes of a tree's numbers."""
    return 8 * sum(level_sizes(leaves))


class SumTree:
    """Priorities of `leaves` leaves, all 0 at first."""

    def __init__(self, leaves: int):
        self.sizes = level_sizes(leaves)
        self.starts = np.cumsum([0, *self.sizes[:-1]])
        self.tree = CPU.zeros(sum(self.sizes), np.float64)
        self.count = leaves
        self.assign(np.empty(0, np.int64), np.empty(0))  # compiles the loops, before a run's clock starts
        self.draw(np.empty(0))

    @property
    def leaves(self) -> np.ndarray:
        """The priorities: a view (leaves,), which callers only read."""
        return self.tree[: self.count]

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(node_sum_numpy(self.tree[-FAN:])[0])

    def assign(self, index: np.ndarray, values: np.ndarray) -> None:
        """Set the priorities at `index`, int64 (n,), to `values`, float64 (n,); of a repeated index the last counts.
        Raises ValueError, and changes nothing, if a value is NaN, negative or above 1e200."""
        if assign(self.tree, self.starts, index, values):
            raise ValueError("a priority is negative, infinite or NaN")

    def draw(self, targets: np.ndarray) -> np.ndarray:
        """Return the leaves, int64 (n,), whose running sums of priorities first exceed the targets, float64 (n,).
        targets: from 0 to below `total`, which must not be 0; uniform targets draw leaves by their priorities."""
        index = np.empty(len(targets), np.int64)
        draw(self.tree, self.starts, np.array(targets, np.float64), index)
        return index


def node_sum_numpy(nodes: np.ndarray) -> np.ndarray:
    """Return the sums of consecutive nodes of eight, in node_sum's order of additions."""
    pairs = nodes[0::2] + nodes[1::2]
    fours = pairs[0::2] + pairs[1::2]
    return fours[0::2] + fours[1::2]


class NumpySumTree(SumTree):
    """A sum tree in plain NumPy, with the same bits."""

    def assign(self, index: np.ndarray, values: np.ndarray) -> None:
        if not ((values >= 0) & (values <= MOST)).all():
            raise ValueError("a priority is negative, infinite or NaN")
        self.tree[index] = values
        for below, here in itertools.pairwise(self.starts):
            index = np.unique(index // FAN)
            children = self.tree[below + FAN * index[:, None] + np.arange(FAN)]
            self.tree[here + index] = node_sum_numpy(children.reshape(-1))

    def draw(self, targets: np.ndarray) -> np.ndarray:
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
