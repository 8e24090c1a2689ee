"""Units of a vector: who owns what of them, and where that lies in a rank's shard and in the whole model."""

import itertools

import numpy as np
import pytest

from hpcdl.chunks import chunk
from hpcdl.models.part import ModelPart
from hpcdl.parallel.units import Units


@pytest.mark.parametrize("owners", [False, True])
@pytest.mark.parametrize("lengths", [[7], [5, 1, 3], [1, 1], [4, 0, 9, 2, 2], [40, 1, 1, 1]], ids=str)
def test_each_element_of_each_unit_belongs_to_one_rank(lengths, owners):
    ends = [0, *itertools.accumulate(lengths)]
    units = [slice(*each) for each in itertools.pairwise(ends)]
    vector = np.arange(ends[-1])
    for size in range(1, 6):
        cut = [Units(units, rank, size, owners) for rank in range(size)]
        assert sorted(np.concatenate([vector[own] for each in cut for own in each.in_vector])) == vector.tolist()
        for rank, each in enumerate(cut):
            assert each.size == sum(own.stop - own.start for own in each.in_vector) == each.in_shard[-1].stop
            for unit, within, own, at in zip(units, each.in_unit, each.in_vector, each.in_shard, strict=True):
                assert np.array_equal(vector[unit][within], vector[own]) and at.stop - at.start == own.stop - own.start
                if not owners:
                    assert within == chunk(unit.stop - unit.start, size, rank)
            shard = np.concatenate([vector[own] for own in each.in_vector])
            for start, stop in itertools.combinations(range(ends[-1] + 1), 2):
                met = [shard[each.in_shard[u]][inside] for u, inside in each.owned_of(slice(start, stop))]
                inside = [value for value in shard if start <= value < stop]
                assert np.concatenate([[], *met]).tolist() == inside


@pytest.mark.parametrize("head", ["tied", "own"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_pieces_of_shards_lie_where_the_tensors_do(head, parts, gpt):
    """The whole vector comes back from the shards of all parts, whatever is cut twice."""
    model, size = gpt.made(getattr(gpt, head)), 3
    whole, times = np.arange(model.size) ** 2, np.zeros(model.size, int)
    for t, rank in itertools.product(range(parts), range(size)):
        part = ModelPart(model, share=(t, parts))
        units, vector = Units(part.units(), rank, size), np.zeros(part.size, int)
        for piece, _ in part.pieces():
            vector[piece.local : piece.local + piece.size] = whole[gpt.places(piece)]
        shard = np.concatenate([vector[own] for own in units.in_vector])
        held = units.pieces(part.pieces())
        assert sum(piece.size for piece, _ in held) == units.size
        for piece, speaks in held:
            assert np.array_equal(shard[piece.local : piece.local + piece.size], whole[gpt.places(piece)])
            times[gpt.places(piece)] += speaks
    assert (times == 1).all()
