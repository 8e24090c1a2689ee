"""Where tensors lie in the flat vector, how they are cut, and where the parts of one vector lie in another."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.chunks import chunk
from hpcdl.models import make_model
from hpcdl.models.layout import Hyperslab, Layout, Tensor, piece


@pytest.fixture
def layout():
    return make_model("mlp:6,4", (5,), 3, "float32").layout


def test_tensors_fill_the_vector_in_order(layout):
    names = [f"dense{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")]
    shapes = [(5, 6), (6,), (6, 4), (4,), (4, 3), (3,)]
    assert list(layout.tensors) == names
    assert [tensor.shape for tensor in layout.tensors.values()] == shapes
    assert [tensor.layer for tensor in layout.tensors.values()] == [name.split(".")[0] for name in names]
    assert layout.size == sum(np.prod(shape) for shape in shapes)
    vector = np.arange(layout.size)
    views = layout.views(vector)
    np.testing.assert_array_equal(np.concatenate([views[name].ravel() for name in names]), vector)


def test_views_share_memory(layout):
    vector = np.zeros(layout.size)
    layout.view(vector, "dense2.weight")[1, 2] = 7
    assert vector[5 * 6 + 6 + 1 * 4 + 2] == 7
    layout.views(vector)["dense3.bias"][2] = 8
    assert vector[-1] == 8


def test_layer_slices(layout):
    assert layout.layer_slices == [("dense1", slice(0, 36)), ("dense2", slice(36, 64)), ("dense3", slice(64, 79))]


def test_describe_survives_json_and_tells_layouts_apart(layout):
    text = layout.describe()
    assert json.loads(json.dumps(text)) == text
    assert text[0] == {"name": "dense1.weight", "shape": [5, 6], "dtype": "float32"}
    assert text == make_model("mlp:6,4,activation=tanh", (5,), 3, "float32").layout.describe()
    for other in (("mlp:6,5", "float32"), ("mlp:6,4", "float64"), ("mlp:6", "float32")):
        assert text != make_model(other[0], (5,), 3, other[1]).layout.describe()


def plain(name, shapes, tied=None):
    """A layer as a layout sees it."""
    return SimpleNamespace(name=name, shapes=shapes, tied=tied or {})


def test_a_tied_tensor_lies_with_the_first_layer_that_uses_it():
    first, middle = plain("a", {"table": (5, 2)}), plain("b", {"bias": (3,)})
    last, more = plain("c", {}, {"a.table": (5, 2)}), plain("d", {"gain": (2,)}, {"a.table": (5, 2)})
    layout = Layout.of_layers([first, middle, last, more], "float64")
    assert list(layout.tensors) == ["a.table", "b.bias", "d.gain"] and layout.size == 15
    assert layout.layer_slices == [("a", slice(0, 10)), ("b", slice(10, 13)), ("d", slice(13, 15))]
    assert [tensor.name for tensor in layout.used_by(more)] == ["d.gain", "a.table"]
    part = Layout.of_layers([middle, last, more], "float64")  # without the layer where it lies: one copy
    assert list(part.tensors) == ["b.bias", "a.table", "d.gain"] and part.size == 15
    assert part.tensors["a.table"].layer == "c"
    assert [tensor.slice for tensor in part.used_by(last)] == [slice(3, 13)]


def elements(each):
    """[(number here, number there), ...] of all elements of a piece, from the definition."""
    places = itertools.product(range(each.blocks), range(each.length))
    return [(each.local + block * each.length + i, each.start + block * each.stride + i) for block, i in places]


def test_what_of_a_piece_lies_in_a_slice():
    """Every slice of small pieces, against the elements one by one."""
    for local, blocks, length, gap in itertools.product((0, 2), (0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 2)):
        whole = Hyperslab(local, 7, blocks, length, length + gap)
        assert whole.size == len(elements(whole))
        for start, stop in itertools.combinations_with_replacement(range(16), 2):
            found = whole.within(slice(start, stop))
            wanted = [(here - start, there) for here, there in elements(whole) if start <= here < stop]
            assert [pair for each in found for pair in elements(each)] == wanted
            assert len(found) <= 3 and all(each.size > 0 for each in found)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_where_a_part_of_a_tensor_lies(axis, parts):
    shape = (4, 3, 5)
    whole = Layout([Tensor("before", (6,), 0, "a"), Tensor("w", shape, 6, "a")], "int64")
    vector = np.arange(whole.size)
    for part in range(parts):
        own = slice(None) if axis is None else chunk(shape[axis], parts, part)
        view = vector[6:].reshape(shape)[(*[slice(None)] * (axis or 0), own)]
        tensor = Tensor("w", view.shape, 2, "a")
        found = piece(tensor, whole.tensors["w"], axis, part, parts)
        assert [here for here, _ in elements(found)] == list(range(2, 2 + view.size))
        assert [vector[there] for _, there in elements(found)] == view.ravel().tolist()
