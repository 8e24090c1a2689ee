"""Sharding units: parts of a vector that are used together, each owned in chunks by all ranks, or by one rank.

    units     | unit 0       | unit 1    | unit 2                |
    chunks    | r0 | r1 | r2 | r0  r1 r2 | r0    | r1    | r2    |        hpcdl.chunks of each unit
    owners    | r1           | r2        | r0                    |        balanced over the ranks

A rank's shard contains its parts without gaps, unit after unit.
"""

import itertools

from hpcdl.chunks import chunk, longest_first


class Units:
    """The places of this rank's owned elements in a vector, in its units and in the rank's shard.

    units: slices of the vector. owners: True if each unit belongs to one rank, and not in chunks to all; `owner` is
    then the list of owners, else None. Of unit u this rank owns `in_unit[u]`, which is `in_vector[u]` of the vector and
    `in_shard[u]` of its shard of `size` elements.
    """

    def __init__(self, units: list[slice], rank: int, size: int, owners: bool = False):
        self.units, lengths = units, [unit.stop - unit.start for unit in units]
        self.owner = longest_first(lengths, size) if owners else None
        if self.owner is not None:
            cuts = [slice(0, n if owner == rank else 0) for n, owner in zip(lengths, self.owner, strict=True)]
        else:
            cuts = [chunk(n, size, rank) for n in lengths]
        self.in_unit = cuts
        self.in_vector = [
            slice(unit.start + cut.start, unit.start + cut.stop) for unit, cut in zip(units, cuts, strict=True)
        ]
        ends = [0, *itertools.accumulate(cut.stop - cut.start for cut in cuts)]
        self.in_shard = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        self.size = ends[-1]

    def pieces(self, pieces: list) -> list:
        """Convert pieces of the vector, (piece, True if this rank represents it), to pieces of the shard."""
        return [
            (each._replace(local=each.local + at.start), speaks)
            for own, at in zip(self.in_vector, self.in_shard, strict=True)
            for piece, speaks in pieces
            for each in piece.within(own)
        ]

    def unit_of(self, part: slice) -> int | None:
        """Return the number of the unit that contains this slice; None for an empty slice."""
        if part.start == part.stop:
            return None
        return next(u for u, unit in enumerate(self.units) if unit.start <= part.start < unit.stop)

    def owned_of(self, part: slice) -> list[tuple[int, slice]]:
        """Return this rank's part of a slice of the vector: (unit, slice of its owned part of that unit)."""
        found = []
        for u, own in enumerate(self.in_vector):
            start, stop = max(own.start, part.start), min(own.stop, part.stop)
            if start < stop:
                found.append((u, slice(start - own.start, stop - own.start)))
        return found
