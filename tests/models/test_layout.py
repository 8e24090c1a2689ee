"""Where tensors lie in the flat vector, and how they are cut."""

import json

import numpy as np
import pytest

from hpcdl.models import make_model


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


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize(("name", "axis"), [("dense1.weight", 0), ("dense1.weight", 1), ("dense1.bias", 0)])
def test_cut_parts_are_views_that_make_up_the_tensor(layout, name, axis, parts):
    vector = np.random.default_rng(0).standard_normal(layout.size)
    pieces = [layout.cut(name, axis, part, parts)(vector) for part in range(parts)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=axis), layout.view(vector, name))
    sizes = [piece.shape[axis] for piece in pieces]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    for piece in pieces:
        piece[...] = -1
    assert (layout.view(vector, name) == -1).all()
    assert (vector == -1).sum() == layout.view(vector, name).size


def test_describe_survives_json_and_tells_layouts_apart(layout):
    text = layout.describe()
    assert json.loads(json.dumps(text)) == text
    assert text[0] == {"name": "dense1.weight", "shape": [5, 6], "dtype": "float32"}
    assert text == make_model("mlp:6,4,activation=tanh", (5,), 3, "float32").layout.describe()
    for other in (("mlp:6,5", "float32"), ("mlp:6,4", "float64"), ("mlp:6", "float32")):
        assert text != make_model(other[0], (5,), 3, other[1]).layout.describe()
