"""Dense layers by themselves: where they call the group's operators, and weights that are parts of a cut tensor.

The layers of a transformer are tested as a model, in test_gpt.py and, where ranks share them, test_part.py.
"""

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.models.group import IdentityGroup
from hpcdl.models.layers import Dense, dense_layers
from hpcdl.models.pool import Pool


class Doubling:
    """As if a second rank held the same part: each sum over the group is twice the own value. Keeps what it is asked.

    exchange: hand back another array, as a group does whose parts hold different rows.
    """

    rank, size, sequence = 0, 2, False

    def __init__(self, exchange=False):
        self.exchange, self.asked = exchange, []

    def f(self, x, pool):
        self.asked.append("f")
        return x

    def g_backward(self, dy, pool):
        self.asked.append("g_backward")
        return dy

    def g(self, y, pool):
        self.asked.append("g")
        return self.twice(y, pool)

    def f_backward(self, dx, pool):
        self.asked.append("f_backward")
        return self.twice(dx, pool)

    def twice(self, array, pool):
        if not self.exchange:
            array *= 2
            return array
        other = pool.take(*array.shape)
        other[...] = 2 * array
        array[...] = np.nan  # nobody may look at it any more
        pool.give(array)
        return other


@pytest.fixture
def arrays():
    """w = (W, b), x, dy for a layer of 4 inputs and 3 outputs."""
    random = np.random.default_rng(0)
    shapes = [(4, 3), (3,), (5, 4), (5, 3)]
    weight, bias, x, dy = (random.standard_normal(shape) for shape in shapes)
    return (weight, bias), x, dy


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("by", ["columns", "rows"])
@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "gelu"])
def test_group_operators(activation, by, exchange, arrays, reference):
    """By columns dx is summed over the group; by rows y is, before the bias."""
    (weight, bias), x, dy = arrays
    value, slope = reference.VALUES[activation], reference.SLOPES[activation]
    pool = Pool("float64")
    layer = Dense("dense2", 4, 3, activation, pool, by=by)
    for group, factor in ((IdentityGroup(), 1), (Doubling(exchange), 2)):
        z = (factor if by == "rows" else 1) * x @ weight + bias
        y, saved = layer.forward((weight, bias), x, group)
        np.testing.assert_allclose(y, value(z), rtol=1e-13, atol=1e-15)
        g = np.zeros((4, 3)), np.zeros(3)
        dx = layer.backward((weight, bias), saved, dy.copy(), g, group)
        dz = dy * slope(z)
        want = (factor if by == "columns" else 1) * dz @ weight.T
        np.testing.assert_allclose(dx, want, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(g[0], x.T @ dz, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(g[1], dz.sum(axis=0), rtol=1e-12, atol=1e-13)
        pool.give(dx)
    assert group.asked == ["g" if by == "rows" else "f_backward"]
    assert sum(map(len, pool.free.values())) == len(pool.bases)  # nothing is lent any more


def test_the_first_layer_sums_nothing(arrays):
    w, x, dy = arrays
    layer, group = Dense("dense1", 4, 3, "relu", Pool("float64"), first=True), Doubling()
    _, saved = layer.forward(w, x, group)
    assert layer.backward(w, saved, dy, (np.zeros((4, 3)), np.zeros(3)), group) is None and not group.asked


@pytest.mark.parametrize(
    ("by", "shapes"),
    [("columns", [((6, 3), (3,)), ((6, 2), (2,)), ((6, 2), (2,))]), ("rows", [((2, 7), (7,))] * 3)],
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


def test_backward_leaves_dy_and_x_as_they_are(arrays):
    w, x, dy = arrays
    for activation in ("none", "relu", "tanh", "gelu"):
        layer = Dense("dense2", 4, 3, activation, Pool("float64"))
        x_before, dy_before = x.copy(), dy.copy()
        _, saved = layer.forward(w, x, IdentityGroup())
        layer.backward(w, saved, dy, (np.zeros((4, 3)), np.zeros(3)), IdentityGroup())
        np.testing.assert_array_equal(x, x_before)
        np.testing.assert_array_equal(dy, dy_before)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_strided_part_of_a_weight(axis, arrays):
    (weight, bias), x, dy = arrays
    rows, columns = (slice(0, 2), slice(None)) if axis == 0 else (slice(None), slice(1, 3))
    part, x, dy = weight[rows, columns], np.ascontiguousarray(x[:, rows]), np.ascontiguousarray(dy[:, columns])
    gradient = np.zeros_like(weight)
    layer = Dense("dense2", 4, 3, "none", Pool("float64"))
    w, g = (part, bias[columns].copy()), (gradient[rows, columns], np.zeros(part.shape[1]))
    y, saved = layer.forward(w, x, IdentityGroup())
    np.testing.assert_allclose(y, x @ part + bias[columns], rtol=1e-13)
    dx = layer.backward(w, saved, dy, g, IdentityGroup())
    np.testing.assert_allclose(dx, dy @ part.T, rtol=1e-13)
    expected = np.zeros_like(weight)
    expected[rows, columns] = x.T @ dy
    np.testing.assert_allclose(gradient, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "gelu"])
def test_what_forward_took_goes_back_to_the_pool(activation, arrays):
    w, x, dy = arrays
    pool = Pool("float64")
    layer = Dense("dense2", 4, 3, activation, pool)
    for _ in range(3):
        _, saved = layer.forward(w, x, IdentityGroup())
        layer.release(saved)
        _, saved = layer.forward(w, x, IdentityGroup())
        pool.give(layer.backward(w, saved, dy, (np.zeros((4, 3)), np.zeros(3)), IdentityGroup()))
    buffers = [buffer for kept in pool.free.values() for buffer in kept]
    assert len({id(buffer) for buffer in buffers}) == len(buffers) <= 4  # y, z of the gelu, dx, the product


def test_dense_layers():
    layers = dense_layers([7, 5, 4, 2], "relu", Pool("float32"))
    assert [layer.name for layer in layers] == ["dense1", "dense2", "dense3"]
    assert [layer.shapes["weight"] for layer in layers] == [(7, 5), (5, 4), (4, 2)]
    assert [layer.activation.__name__ for layer in layers] == ["Relu", "Relu", "Identity"]
    assert [layer.first for layer in layers] == [True, False, False]
    assert [layer.divided for layer in layers] == [True, False, True]  # by columns and rows in turn
