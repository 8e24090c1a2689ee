"""Whether replicas that must agree do so, every so many steps while the run goes on (--check replicas=STEPS).

    rank 0   | step | checksum of parameters | of each vector of the optimizer's |
    rank 1   |  ...        an all-gather of these on the run's own communicator, counted apart from the training
    all      where ranks differ: which vector, on which ranks, after which step; what most ranks hold is taken as right

Without it a run says at its end whether the replicas agree. Memory that fails without a word, a random number of one's
own that differs from rank to rank, or an update of one rank alone are then found long after they happened.

The checksum is CRC-32 (Peterson and Brown, "Cyclic codes for error detection", 1961): it finds every change of up to 32
neighbouring bits, and others but for one in 4 * 10^9; zlib takes 0.2 ns a byte.
"""

import zlib
from collections import Counter
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.runs.ownership import Ownership, Whole


class AgreeingReplicas:
    """Compares the replicas of a run every so many steps; 0: never.

    Raises AgreedError where the strategy has none that must agree.
    """

    def __init__(self, held: Ownership, every: int, strategy: str, step: int):
        self.held, self.every, self.agreed = held, every, step  # the last step after which they did
        if every and not isinstance(held, Whole):
            what = "of one's own on each rank, or a part" if held.parameters is not None else "no parameters"
            raise AgreedError(
                f"--check replicas: under {strategy.replace('_', ' ')} a rank holds {what}, which need not agree"
            )

    def due(self, step: int) -> bool:
        """Whether the ranks compare after this step."""
        return bool(self.every) and step % self.every == 0

    def compare(self, step: int) -> None:
        """What the ranks hold after this step; collective. Raises TrainingError on all of them where they differ."""
        vectors = {"parameters": self.held.parameters} | {
            f"optimizer state ({name})": vector for name, vector in self.held.optimizer.state.items()
        }
        peers = self.held.peers
        sums = np.zeros((peers.size, len(vectors)), np.int64)
        flat = sums.reshape(-1)
        flat[chunk(flat.size, peers.size, peers.rank)] = [checksum(self.held, each) for each in vectors.values()]
        peers.all_gather(flat)
        for name, column in zip(vectors, sums.T.tolist(), strict=True):
            if len(set(column)) > 1:
                raise TrainingError(f"after step {step} {departed(column, name)}; {self.before()}{CAUSES}")
        self.agreed = step

    def before(self) -> str:
        return f"after step {self.agreed} all was the same. "


CAUSES = (
    "What makes ranks differ: a random number or a clock of one's own in model or data, a vector that one rank alone "
    "changes, memory that fails (another machine tells)"
)


def checksum(held: Ownership, vector: Any) -> int:
    """Of the bits of a vector, wherever it lies."""
    contiguous: Any = np.ascontiguousarray(held.device.host(vector))
    return zlib.crc32(contiguous)


def departed(sums: list[int], name: str) -> str:
    """Who differs, given the checksums of all ranks: those that do not hold what more than half of them do."""
    (most, count), size = Counter(sums).most_common(1)[0], len(sums)
    if 2 * count > size:
        others = [rank for rank, each in enumerate(sums) if each != most]
        rest = [rank for rank, each in enumerate(sums) if each == most]
        return f"{format_ranks(others)} {'hold' + 's' * (len(others) == 1)} other {name} than {format_ranks(rest)}"
    groups: dict[int, list[int]] = {}
    for rank, each in enumerate(sums):
        groups.setdefault(each, []).append(rank)
    if len(groups) == size:
        return f"{format_ranks(range(size))} differ in {name}"
    return f"{' and '.join(map(format_ranks, groups.values()))} differ in {name}"
