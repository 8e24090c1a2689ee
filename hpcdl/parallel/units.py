"""Sharding units: parts of a vector that are used together, each owned in chunks by all ranks, or by one rank.

    units     | unit 0       | unit 1    | unit 2                |
    chunks    | r0 | r1 | r2 | r0  r1 r2 | r0    | r1    | r2    |        hpcdl.chunks of each unit
    owners    | r1           | r2        | r0                    |        balanced over the ranks

A rank's shard contains its parts without gaps, unit after unit."""

import itertools

from hpcdl.chunks import chunk, longest_first


class Units:
    """Where this rank's owned elements are: in a vector, in its units (slices of the vector), and in the rank's shard.
    owners: True if one rank owns each unit; `owner`: that rank by unit, or None. Of unit u this rank owns `in_unit[u]`,
    at `in_vector[u]` of the vector and `in_shard[u]` of its shard."""

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
        """Return which elements of the slice `part` this rank owns: (unit, slice of the rank's part of the unit)."""
        cuts = [(own.start, max(own.start, part.start), min(own.stop, part.stop)) for own in self.in_vector]
        return [(u, slice(start - at, stop - at)) for u, (at, start, stop) in enumerate(cuts) if start < stop]
