"""Check every few steps that replicas which must agree do so (--check replicas=STEPS).

    rank 0   | checksum of the parameters | of each vector of the optimizer |
    rank 1   |  ...        an all-gather on the run's own communicator, counted apart from the training
    all      if ranks differ: which vector, on which ranks, after which step; the majority is taken as right

A run without --check compares replicas at its end. CRC-32 (Peterson and Brown, "Cyclic codes for error detection",
1961) detects each change within 32 neighbouring bits, and all but one in 4 * 10^9 others; zlib takes 0.2 ns a byte."""

import zlib
from typing import Any

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.runs.ownership import Ownership, Whole


class AgreeingReplicas:
    """Compares replicas every `every` steps; 0: never. step: steps done. Raises AgreedError if replicas may differ."""

    def __init__(self, held: Ownership, every: int, strategy: str, step: int):
        self.held, self.every, self.agreed = held, every, step  # agreed: the last step with equal replicas
        if every and not isinstance(held, Whole):
            what = "parameters of its own, or a part of them" if held.parameters is not None else "no parameters"
            raise AgreedError(
                f"--check replicas compares equal replicas; under {strategy.replace('_', ' ')} a rank holds {what}"
            )

    def due(self, step: int) -> bool:
        """True if the ranks compare after this step."""
        return bool(self.every) and step % self.every == 0

    def compare(self, step: int) -> None:
        """Compare the ranks' vectors after this step; collective. Raises TrainingError on all ranks if they differ."""
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
                before = f"after step {self.agreed} all ranks held the same"
                raise TrainingError(f"after step {step} {departed(column, name)}; {before}. {CAUSES}")
        self.agreed = step


CAUSES = (
    "Possible causes: model or data use a random number or a clock of each rank, one rank alone changes a vector, or "
    "memory fails (then on this machine only)"
)


def checksum(held: Ownership, vector: Any) -> int:
    """Return the CRC-32 of a vector's bits; the vector may lie on the device of `held`."""
    contiguous: Any = np.ascontiguousarray(held.device.host(vector))
    return zlib.crc32(contiguous)


def departed(sums: list[int], name: str) -> str:
    """Return a text that names the ranks without the majority's checksum; without a majority, all. sums: by rank."""
    groups, size = dict[int, list[int]](), len(sums)
    for rank, each in enumerate(sums):
        groups.setdefault(each, []).append(rank)
    most = max(groups.values(), key=len)
    if 2 * len(most) > size:
        others = [rank for rank in range(size) if rank not in most]
        return f"{format_ranks(others)} {'hold' + 's' * (len(others) == 1)} other {name} than {format_ranks(most)}"
    if len(groups) == size:
        return f"{format_ranks(range(size))} differ in {name}"
    return f"{' and '.join(map(format_ranks, groups.values()))} differ in {name}"
