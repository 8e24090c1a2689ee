"""The flops of a kernel are those of its own text, which runs in plain Python on numbers that count operations."""

import ast
import inspect
import math
import textwrap
import types

import numpy as np
import pytest

from hpcdl.kernels import elementary
from hpcdl.kernels.cases import CASES
from hpcdl.kernels.intensity import COSTS, EXP, TANH

ROWS, COLUMNS = 6, 3


class Number(float):
    """A number that counts the operations on numbers of its class."""

    flops = 0

    @classmethod
    def counted(cls, flops, value):
        Number.flops += flops
        return value if isinstance(value, bool) else cls(value)


def operation(name):
    def method(self, *others):
        return Number.counted(1, getattr(float, name)(self, *map(float, others)))

    return method


for name in ("add", "sub", "mul", "truediv", "pow"):
    for side in ("", "r"):
        setattr(Number, f"__{side}{name}__", operation(f"__{side}{name}__"))
for name in ("lt", "le", "gt", "ge", "ne", "eq"):
    setattr(Number, f"__{name}__", operation(f"__{name}__"))
Number.__hash__ = float.__hash__
Number.__neg__ = lambda self: Number(-float(self))


def largest(z, i, count):
    """Return the largest of the first `count` numbers; counts a comparison for each, also for the first."""
    return Number.counted(count, max(float(z[i, j]) for j in range(count)))


SAME = types.SimpleNamespace(float64=lambda v: v, uintp=int, int64=int, floor=math.floor)
MATHS = types.SimpleNamespace(
    sqrt=lambda v: Number.counted(1, math.sqrt(v)), log=lambda v: Number.counted(1, math.log(v))
)
INSTEAD = {
    "np": SAME,
    "math": MATHS,
    "exp": lambda v: Number.counted(EXP, math.exp(v)),
    "tanh": lambda v: Number.counted(TANH, math.tanh(v)),
    "largest": largest,
    "from_float16": Number,
    "from_bfloat16": Number,
}


def plain(function):
    """Return the Python function of a compiled one, which calls the Python functions of other compiled ones."""
    function = getattr(function, "py_func", function)
    space = dict(function.__globals__)
    for name in function.__code__.co_names:
        if name in INSTEAD:
            space[name] = INSTEAD[name]
        elif hasattr(space.get(name), "py_func"):
            space[name] = plain(space[name])
    return types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)


def counted(argument):
    """Return an argument whose floating-point numbers count."""
    if isinstance(argument, np.ndarray) and argument.dtype.kind == "f":
        made = np.empty(argument.shape, object)
        made[...] = [[Number(v) for v in row] for row in argument] if made.ndim == 2 else list(map(Number, argument))
        return made
    return Number(argument) if isinstance(argument, float) else argument


def flops_of(name):
    """Return the flops of a kernel's body over all elements, or of its loop, and the shape that gives its size."""
    case = CASES[name]
    columns = 1 if case.columns == 1 else COLUMNS
    args = [counted(each) for each in case.make(ROWS, columns, "float32", np.random.default_rng(0))]
    if name.startswith("embed"):
        args[0] = case.make(ROWS, columns, "float32", np.random.default_rng(0))[0]  # tokens are names
    if name in ("max_into", "min_into"):
        args[1] = args[0].copy()  # then neither comparison is left out
    first = args[case.main] if case.kernel.kind == "block" else args[0]
    if name == "layer_norm_backward":
        first = args[0]
    body, Number.flops = plain(case.kernel.body), 0
    if case.kernel.kind == "block":
        args = [Addressed(each) if isinstance(each, np.ndarray) else each for each in args]
        if name.startswith("embed"):
            args[0] = args[0].array
        body(*args)
    elif case.kernel.kind == "elementwise":
        for i in range(first.size):
            body(i, *args)
    else:
        for i in range(ROWS):
            for j in range(columns):
                found = body(i, j, *args)
                if case.kernel.kind.startswith("sums"):
                    args[-1][j] += found
    return Number.flops, first.shape


class Addressed:
    """An array of objects that passes for one of numbers."""

    def __init__(self, array):
        self.array, self.shape, self.size = array, array.shape, array.size
        self.dtype = types.SimpleNamespace(type=Number)
        self.ctypes = types.SimpleNamespace(data=id(array))

    def __getitem__(self, index):
        return self.array[index]

    def __setitem__(self, index, value):
        self.array[index] = value

    def reshape(self, *shape):
        return Addressed(self.array.reshape(*shape))


OF_KERNELS = [name for name in COSTS if name in CASES]


@pytest.mark.parametrize("name", OF_KERNELS)
def test_flops(name):
    found, shape = flops_of(name)
    rows, columns = shape if len(shape) == 2 else (shape[0], 1)
    said = COSTS[name].flops(rows, columns)
    if name == "softmax_cross_entropy":  # compares a row's loss with itself where it was predicted correctly
        assert said <= found <= said + rows
    else:
        assert found == said + (name == "squared")  # half of the sum


@pytest.mark.parametrize("name", OF_KERNELS)
def test_bytes_are_those_of_the_cases(name):
    """Equal but for labels, tokens, and vectors of a row's or a column's length."""
    case, rows, columns = CASES[name], 40, 30
    args = case.make(rows, columns, "float32", np.random.default_rng(0))
    size = args[case.main].size
    if name in ("add_into", "scale") or len(args[case.main].shape) == 1:
        assert COSTS[name].moved(size) == case.traffic(*args)
    else:
        rest = case.traffic(*args) - COSTS[name].moved(*args[case.main].shape)
        assert 0 <= rest <= 16 * (rows + columns) + (8 * rows * columns if name == "squared" else 0)


def operations(*functions):
    """Return the number of arithmetic operations and comparisons in the text of functions."""
    trees = [ast.parse(textwrap.dedent(inspect.getsource(each.py_func))) for each in functions]
    return sum(isinstance(node, ast.BinOp | ast.Compare) for tree in trees for node in ast.walk(tree))


def test_an_exponential_and_a_hyperbolic_tangent():
    integer = 1  # the bits of the exponent less 1
    parts = elementary.exponential(np.float32, np.int32, 23, 0.7, 0.0, -86.9, 89.0, elementary.series32)[1]
    assert operations(elementary.exp32, parts, elementary.series32) - integer == EXP
    assert operations(elementary.tanh32) == TANH
