"""Dense layers by themselves: their parts and their order. What they compute: test_layered.py and test_part.py."""

import pytest

from hpcdl.errors import UsageError
from hpcdl.models.group import IdentityGroup
from hpcdl.models.layers import Dense, dense_layers
from hpcdl.models.pool import Pool


@pytest.mark.parametrize(
    ("by", "shapes"), [("columns", [((6, 3), (3,)), ((6, 2), (2,)), ((6, 2), (2,))]), ("rows", [((2, 7), (7,))] * 3)]
)
def test_shapes_of_parts(by, shapes):
    layer = Dense("dense2", 6, 7, "relu", Pool("float64"), by=by)
    for part, wanted in enumerate(shapes):
        cut = layer.cut(part, 3)
        assert tuple(cut.shapes.values()) == wanted and (cut.part, cut.parts) == (part, 3)
        assert cut.full_shapes == layer.shapes == {"weight": (6, 7), "bias": (7,)}
        assert cut.output_shape(5, IdentityGroup()) == (5, wanted[0][1]) and cut.divided == (by == "columns")
    assert layer.parts == 1 and layer.cut(0, 1).shapes == layer.shapes


def test_rows_that_cannot_be_shared_evenly():
    with pytest.raises(UsageError, match=r"hidden layer's width 6 .* among 4 ranks; choose a multiple of 4"):
        Dense("dense2", 6, 7, "relu", Pool("float64"), by="rows").cut(0, 4)
    Dense("dense1", 6, 7, "relu", Pool("float64")).cut(0, 4)  # columns may be cut unevenly


def test_dense_layers():
    layers = dense_layers([7, 5, 4, 2], "relu", Pool("float32"))
    assert [layer.name for layer in layers] == ["dense1", "dense2", "dense3"]
    assert [layer.shapes["weight"] for layer in layers] == [(7, 5), (5, 4), (4, 2)]
    assert [layer.activation.__name__ for layer in layers] == ["Relu", "Relu", "Identity"]
    assert [layer.first for layer in layers] == [True, False, False]
    assert [layer.divided for layer in layers] == [True, False, True]  # by columns and rows in turn
