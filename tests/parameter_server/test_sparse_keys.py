"""Keys name the same elements to a client and to its servers, wherever the vector is cut between rows."""

import numpy as np
import pytest

from hpcdl.parameter_server.sparse_keys import Touched, VectorRows, sum_touched
from hpcdl.parameter_server.store_settings import StoreLayout


@pytest.mark.parametrize("width, features, rest", [(1, 11, 1), (3, 5, 3), (4, 6, 9), (5, 2, 40)])
@pytest.mark.parametrize("holders", [1, 2, 3, 5])
def test_the_elements_of_all_servers_are_those_of_the_rows_and_all_of_the_tail(width, features, rest, holders):
    size, rows = features * width + rest, VectorRows(width, features * width)
    slices = StoreLayout(size, holders, servers=holders, block=width).slices
    assert slices[-1].stop == size and all(cut.start % width == 0 for cut in slices)
    vector = np.arange(size)
    for keys in ([], [0], [features - 1], [0, features // 2], range(features)):
        keys = np.unique(np.array(keys, np.int64))
        found = [vector[cut][rows.elements(rows.within(keys, cut), cut)] for cut in slices]
        wanted = np.append(vector[: rows.tail].reshape(features, width)[keys].reshape(-1), vector[rows.tail :])
        assert np.array_equal(np.sort(np.concatenate(found)), wanted)
        own = [rows.within(keys, cut) for cut in slices]
        assert sum(map(len, own)) == len(keys) and all(each.dtype == np.int64 for each in own)


@pytest.mark.parametrize("held", [slice(0, 30), slice(30, 66), slice(0, 66)], ids=str)
def test_sums_are_those_of_whole_vectors_to_the_bit(held):
    """Of 20 rows of 3 and a tail of 6; a slice may have no tail, and a part no key."""
    random, rows = np.random.default_rng(0), VectorRows(3, 60)
    first, last = held.start // 3, min(held.stop, 60) // 3
    parts, values, dense = [], [], np.zeros(held.stop - held.start)
    for size in (4, 0, 7):
        keys = np.sort(random.choice(last - first, size, replace=False))
        parts.append(Touched(keys, rows.elements(keys, held)))
        values.append(random.standard_normal(len(parts[-1].elements)))
        whole = np.zeros_like(dense)
        whole[parts[-1].elements] = values[-1]
        dense += whole
    union, total = sum_touched(rows, held, parts, values)
    assert np.array_equal(union.keys, np.unique(np.concatenate([part.keys for part in parts])))
    found = np.zeros_like(dense)
    found[union.elements] = total
    assert np.array_equal(found, dense) and len(total) < len(dense)
