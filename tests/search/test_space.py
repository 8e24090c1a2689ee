"""The space: what it reads, what it refuses, and its unit cube."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.errors import UsageError
from hpcdl.search.space import WHOLE, Parameter, Space

EXAMPLE = [
    "lr=log:0.001..0.5",
    "model=mlp:64|mlp:256,128",
    "batch-size=int:16..512:log",
    "optimizer=adam|momentum|sgd",
    "momentum:beta=0.8..0.99 if optimizer=momentum",
    "dropout=0.1..0.9",
    "workers=int:-2..5",
]
PIECES = ["a", "lr", "=", "|", "..", "log:", "int:", ":log", " if ", "1", "0.5", "-", "1e", "nan", "9" * 400]
PIECES += [":", " ", "é", "\x00"]
QUICK = settings(max_examples=150, derandomize=True, database=None, deadline=None)
UNIT = st.floats(0, 1, exclude_max=True)


def test_what_is_read():
    space = Space.read(EXAMPLE)
    assert space.names == [text.partition("=")[0] for text in EXAMPLE]
    assert space.parameters[0] == Parameter("lr", "float", (), 0.001, 0.5, True)
    assert space.parameters[1] == Parameter("model", "choice", ("mlp:64", "mlp:256,128"))
    assert space.parameters[2] == Parameter("batch-size", "int", (), 16, 512, True)
    assert space.parameters[4] == Parameter("momentum:beta", "float", (), 0.8, 0.99, False, ("optimizer", "momentum"))
    assert space.parameters[6] == Parameter("workers", "int", (), -2, 5)
    assert space.described() == EXAMPLE
    setting = Space.read(["schedule=cosine|1/t", "1/t:decay=0.1..0.2"]).parameters[1]
    assert setting.condition == ("schedule", "1/t")
    assert Space.read(["a=1|2 if"]).parameters[0].choices == ("1", "2 if")


@pytest.mark.parametrize(
    "text, kind, rest",
    [
        ("x=1|2|3", "choice", ("1", "2", "3")),
        ("x=5", "choice", ("5",)),
        ("x = a | b ", "choice", ("a", "b")),
        ("x=../a.h5", "choice", ("../a.h5",)),
        ("x=-1e-3..-1E-4", "float", (-0.001, -0.0001)),
        ("x=.5...75", "float", (0.5, 0.75)),
        ("x=int:1e1..1e2", "int", (10, 100)),
        ("x=-1e308..1e308", "float", (-1e308, 1e308)),
        ("x=momentum:beta=0.9|adam", "choice", ("momentum:beta=0.9", "adam")),
    ],
)
def test_specs(text, kind, rest):
    found = Space.read([text]).parameters[0]
    assert found.kind == kind
    assert rest == (found.choices if kind == "choice" else (found.low, found.high))
    assert Space.read(Space.read([text]).described()) == Space.read([text])


@pytest.mark.parametrize(
    "lines, said",
    [
        (["lr"], "write NAME=SPEC"),
        ([], "no parameter"),
        (["lr=0.5..0.5"], "one value only"),
        (["n=int:0..9:log"], "begins above 0"),
        (["lr=a..b"], "'a' is no number"),
        (["lr=0.1..nan"], "'nan' is no number"),
        (["lr=0..1.5e308"], "1.5e308 is too large"),
        (["n=int:0..1e300"], "1e300 is too large"),
        (["n=int:0.5..3"], "0.5 is no integer"),
        (["n=int:3"], "write int:LOW..HIGH"),
        (["lr=0.1..1:log"], "is no range: write LOW..HIGH, log:LOW..HIGH"),
        (["n=int:1..9:lin"], "is no range"),
        (["lr=0.1..0.5|1"], "'0.1..0.5' is a range, and a parameter has either"),
        (["lr="], "a choice is empty"),
        (["lr=a|b|a"], "the choice 'a' is given twice"),
        (["lr=1|2", "lr=3"], "lr: it is given twice"),
        (["batch-size=1|2", "batch_size=3"], "it is given twice"),
        (["--lr=1|2"], "leave out the dashes"),
        (["a b=1|2"], "can be no parameter's name"),
        (["a=1|2 if b"], "the condition 'b' should be NAME=CHOICE"),
        (["a=1|2 if b=3"], "'b', which is not in the space"),
        (["a=1|2 if b=3", "b=1..4"], "'b', which has a range"),
        (["a=1|2 if b=3", "b=1|4"], "b has no choice '3'"),
        (["a=1|2 if b=adan", "b=adam|sgd"], "did you mean 'adam'"),
        (["a=1|2 if b=1", "b=1|2 if a=1"], "its condition depends on itself"),
        (["momentum:beta=0.8..0.9"], "a setting of momentum, which no parameter has among its choices"),
        (["momentum:beta=0.8..0.9 if m=a", "m=a|b", "o=momentum"], "so it needs if o=momentum"),
        (["mlp:drop=0.8..0.9", "model=mlp:4|mlp:8"], "if model=mlp:4 or if model=mlp:8"),
        (["a=\x1b[1m|b"], "can be no choice"),
    ],
)
def test_refusals(lines, said):
    refused(Space.read, lines, said)


def refused(read, given, said):
    """It is refused in one line, which says this."""
    with pytest.raises(UsageError) as raised:
        read(given)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_yaml_says_the_same():
    space = Space.from_yaml(
        """
        lr: {low: 1e-3, high: 0.5, log: true}
        model: [mlp:64, "mlp:256,128"]
        batch-size: {low: 16, high: 512, int: yes, log: true}
        optimizer: adam|momentum|sgd
        momentum:beta: {low: 0.8, high: 0.99, if: optimizer=momentum}
        dropout: 0.1..0.9
        workers: {low: -2, high: 5, int: true}
        """
    )
    assert space == Space.read(EXAMPLE)
    given = {
        "lr": {"low": 1e-3, "high": 0.5, "log": True},
        "model": ["mlp:64", "mlp:256,128"],
        "batch-size": {"low": 16, "high": np.int64(512), "int": True, "log": True},
        "optimizer": {"choices": ["adam", "momentum", "sgd"]},
        "momentum:beta": {"low": 0.8, "high": 0.99, "if": {"optimizer": "momentum"}},
        "dropout": "0.1..0.9",
        "workers": "int:-2..5",
    }
    assert Space.from_yaml(given) == space
    assert Space.from_yaml({"x": [1, 2.5, True]}).parameters[0].choices == ("1", "2.5", "true")
    assert Space.from_yaml({"x": 3}).parameters[0].choices == ("3",)


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: [1, 2]\na: [3]", "a: it is given twice"),
        ("a: {low: 1}", "give low and high"),
        ("a: {low: 1, high: 2, step: 3}", "unknown key 'step'"),
        ("a: {low: 1, high: 2, hihg: yes}", "did you mean 'high'"),
        ("a: {low: 1, high: 2, log: perhaps}", "log should be true or false"),
        ("a: {low: [], high: 2}", "is no number"),
        ("a: {choices: x}", "choices are a list"),
        ("a: {choices: [x], low: 3}", "only `if` may stand"),
        ("a: [x, 1..2]", "is a range"),
        ("a: [x..y]", "is a range"),
        ('a: ["x|y"]', "can be no choice"),
        ('a: ["x if y=z"]', "can be no choice"),
        ('a: ["x\\ny"]', "can be no choice"),
        ("a: []", "a choice is empty"),
        ("a=1: 3", "can be no parameter's name"),
        ("a: {", "not valid YAML"),
        ("[" * 3000, "not valid YAML"),
        ("", "should be a mapping"),
    ],
)
def test_yaml_that_is_refused(text, said):
    refused(Space.from_yaml, text, said)


def test_what_is_trained_is_what_is_written():
    space = Space.read([*EXAMPLE, "gpt:width=int:8..64 if net=gpt:layers=2", "net=gpt:layers=2|own.net:Net,w=3"])
    values = {"lr": 0.1 + 0.2, "model": "mlp:64", "batch-size": 33, "optimizer": "momentum", "momentum:beta": 0.9}
    texts = {"lr": "0.30000000000000004", "model": "mlp:64", "batch-size": "33", "optimizer": "momentum:beta=0.9"}
    assert space.texts(values | {"gpt:width": 12, "net": "gpt:layers=2"}) == texts | {"net": "gpt:layers=2,width=12"}
    own = Space.read(["net=own.net:Net|own.net:Other", "own.net:Net:width=int:1..3", "batch_size=1|2"])
    found = own.texts({"net": "own.net:Net", "own.net:Net:width": 2, "batch_size": "1"})
    assert found == {"net": "own.net:Net,width=2", "batch-size": "1"}


def test_conditions_chain():
    space = Space.read(["c=1..2 if b=y", "b=x|y if a=on", "a=on|off"])
    assert set(space.values(np.array([0.5, 0.9, 0.1]))) == {"a", "b", "c"}
    assert set(space.values(np.array([0.5, 0.1, 0.1]))) == {"a", "b"}
    assert space.values(np.array([0.5, 0.9, 0.9])) == {"a": "off"}
    assert list(space.values(np.array([0.5, 0.9, 0.1]))) == ["c", "b", "a"]
    with pytest.raises(ValueError):
        space.values(np.array([0.5]))


def test_a_grid_has_no_point_twice():
    space = Space.read(EXAMPLE[:1] + EXAMPLE[3:5] + ["n=int:1..3", "m=int:1..100:log"])
    found = space.grid(4)
    assert len({repr(sorted(each.items())) for each in found}) == len(found) == 4 * (2 + 4) * 3 * 4
    assert [each["lr"] for each in found[:: 6 * 12]] == pytest.approx(np.geomspace(0.001, 0.5, 4))
    assert [each["x"] for each in Space.read(["x=log:0.001..1"]).grid(4)] == [0.001, 0.01, 0.1, 1.0]
    assert sorted({each["m"] for each in found}) == [1, 5, 22, 100]
    betas = sorted({each["momentum:beta"] for each in found if "momentum:beta" in each})
    assert betas == pytest.approx(np.linspace(0.8, 0.99, 4))
    assert {each["optimizer"] for each in found if "momentum:beta" in each} == {"momentum"}
    assert Space.read(["x=log:1..100", "y=0..1", "n=int:0..10"]).grid(1) == [{"x": 10.0, "y": 0.5, "n": 5}]
    with pytest.raises(UsageError, match="at least 1 point"):
        space.grid(0)
    with pytest.raises(UsageError, match="more than 100,000 points"):
        Space.read([f"x{i}=1|2" for i in range(40)]).grid(1)


@QUICK
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), max_size=3))
def test_whatever_is_given_is_read_or_refused_in_a_line(lines):
    try:
        space = Space.read(lines)
    except UsageError as error:
        assert "\n" not in str(error) and "\x00" not in str(error)
    else:
        assert Space.read(space.described()) == space
        assert Space.from_yaml(dict(line.split("=", 1) for line in space.described())) == space
        space.texts(space.values(np.full(len(space.parameters), 0.5)))


@st.composite
def ranges(draw):
    kind, log = draw(st.sampled_from(["int", "float"])), draw(st.booleans())
    numbers = st.integers(1 if log else -WHOLE, WHOLE) if kind == "int" else st.floats(1e-300 if log else -1e308, 1e308)
    low, high = sorted(draw(st.lists(numbers, min_size=2, max_size=2, unique=True)))
    return Parameter("x", kind, (), float(low), float(high), log)


@QUICK
@given(ranges(), UNIT)
def test_the_unit_cube_of_a_range(parameter, u):
    value = parameter.value(u)
    assert parameter.low <= value <= parameter.high
    assert type(value) is (int if parameter.kind == "int" else float)
    back = parameter.unit(value)
    assert 0 <= back < 1
    again = parameter.value(back)
    if parameter.kind == "int":
        assert again == value
        ends = (int(parameter.low), int(parameter.high))
        assert [parameter.value(parameter.unit(end)) for end in ends] == [*ends]
    elif parameter.log:
        assert again == pytest.approx(value, rel=1e-12)
    else:
        assert again == pytest.approx(value, rel=1e-12, abs=1e-14 * max(-parameter.low, parameter.high))
    assert Space.read([parameter.described()]) == Space((parameter,))
    assert parameter.value(0.0) == pytest.approx(parameter.low)
    grid = parameter.grid(5)
    assert (grid[0], grid[-1]) == (parameter.low, parameter.high)
    assert grid == sorted(set(grid))


@QUICK
@given(st.lists(UNIT, min_size=len(EXAMPLE), max_size=len(EXAMPLE)))
def test_values_and_coordinates_fit(unit):
    space = Space.read(EXAMPLE)
    values = space.values(np.array(unit))
    assert ("momentum:beta" in values) == (values["optimizer"] == "momentum")
    again = space.values(space.unit(values))
    assert list(again) == list(values)
    for name, value in values.items():
        assert again[name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)


def test_how_likely_each_value_is():
    cut = np.arange(30_000) / 30_000
    for text, weights in {
        "x=a|b|c": {each: 1 for each in "abc"},
        "x=int:-1..3": {k: 1 for k in range(-1, 4)},
        "x=int:1..5:log": {k: math.log((k + 0.5) / (k - 0.5)) for k in range(1, 6)},
    }.items():
        parameter = Space.read([text]).parameters[0]
        found = [parameter.value(u) for u in cut]
        for value, weight in weights.items():
            share = Fraction(found.count(value), len(cut))
            assert float(share) == pytest.approx(weight / sum(weights.values()), abs=1e-4)
    lr = Space.read(["x=log:0.001..1"]).parameters[0]
    assert [lr.value(u) for u in (0, 1 / 3, 2 / 3)] == pytest.approx([0.001, 0.01, 0.1])
