"""The search space: its parameters as text, as points of the unit cube and as options.

    lr=log:0.001..0.5                                     a number, its logarithm uniform
    dropout=0.1..0.9                                      a number, uniform
    layers=int:2..8    batch-size=int:16..512:log         integers: uniform; P(k) proportional to 1/k
    model=mlp:64|mlp:256,128    optimizer=adam            choices, one or several, uniform
    momentum:beta=0.8..0.99 if optimizer=momentum         a setting of a choice, which becomes momentum:beta=0.91
    width=int:8..64 if model=mlp:64                       active only if another parameter has this choice

Methods see a unit cube with one coordinate u in [0, 1) per parameter, also an inactive one, in the order of the space:

    choice, n of them     number floor(n u)
    float                 low + (high - low) u                      log: exp of the same with their logarithms
    int                   low + floor((high - low + 1) u)           log: exp(x) rounded, x from log(low - 1/2) to
                                                                    log(high + 1/2): P(k) ~ log((k+1/2) / (k-1/2))"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import yaml

from hpcdl.errors import UsageError, line, nearest
from hpcdl.formatting import dashed
from hpcdl.search.tasks import Values

LARGEST = 1e308  # of a float; the next power of ten overflows
WHOLE = 2**40  # largest integer: up to here each is recovered from its coordinate
POINTS = 100_000  # of a grid
NAME = re.compile(r"[A-Za-z_][\w.-]*|[^\s=|:]+(:[^\s=|:]+)?:[A-Za-z_][\w-]*")
KEYS = ("low", "high", "log", "int", "choices", "if")  # of a parameter in YAML
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Parameter:
    """One coordinate of a space. kind: choice, float or int. choices: texts to choose from. low, high: inclusive ends.
    condition (name, text): the parameter is active only if the choice `name` has this text; None: always active."""

    name: str
    kind: str = "choice"
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    condition: tuple[str, str] | None = None

    def value(self, u: float) -> str | int | float:
        """Return the value at coordinate u in [0, 1)."""
        if self.kind == "choice":
            return self.choices[min(int(u * len(self.choices)), len(self.choices) - 1)]
        if self.kind == "int" and not self.log:
            return min(int(self.low) + int(u * (self.high - self.low + 1)), int(self.high))
        low, high = self._ends()
        at = (1 - u) * low + u * high  # a difference high - low may overflow
        return self.bounded(math.exp(at) if self.log else at)

    def unit(self, value: Any) -> float:
        """Return a value's coordinate, the middle of those coordinates that give it; inverts `value` up to rounding."""
        if self.kind == "choice":
            return (self.choices.index(value) + 0.5) / len(self.choices)
        if self.kind == "int" and not self.log:
            return (value - self.low + 0.5) / (self.high - self.low + 1)
        low, high = self._ends()
        at = math.log(value) if self.log else value
        scale = max(abs(low), abs(high))  # so that no difference overflows
        return min(max((at / scale - low / scale) / (high / scale - low / scale), 0.0), math.nextafter(1.0, 0.0))

    def grid(self, points: int) -> list[Any]:
        """Return at most `points` values from low to high, evenly spaced (log: in ratio); one point: the middle.
        Inner values are rounded to 12 digits. Of a choice, all texts are returned."""
        if self.kind == "choice":
            return list(self.choices)
        low, high = (math.log(end) if self.log else end for end in (self.low, self.high))
        values = []
        for step in [at / (points - 1) for at in range(points)] if points > 1 else [0.5]:
            at = (1 - step) * low + step * high
            inner = float(f"{math.exp(at) if self.log else at:.12g}")
            values.append(self.bounded({0.0: self.low, 1.0: self.high}.get(step, inner)))
        return list(dict.fromkeys(values))

    def bounded(self, value: float) -> int | float:
        """Return the value clipped to low and high; rounded for an integer parameter."""
        value = min(max(value, self.low), self.high)
        return round(value) if self.kind == "int" else float(value)

    def described(self) -> str:
        """Return the parameter as a line that `Space.read` reads back."""
        ends = f"{int(self.low)}..{int(self.high)}" if self.kind == "int" else f"{self.low!r}..{self.high!r}"
        spec = f"int:{ends}{':log' * self.log}" if self.kind == "int" else f"{'log:' * self.log}{ends}"
        spec = "|".join(self.choices) if self.kind == "choice" else spec
        return f"{self.name}={spec}" + (f" if {self.condition[0]}={self.condition[1]}" if self.condition else "")

    def _ends(self) -> tuple[float, float]:
        half = 0.5 if self.kind == "int" else 0.0
        low, high = self.low - half, self.high + half
        return (math.log(low), math.log(high)) if self.log else (low, high)


@dataclass(frozen=True)
class Space:
    """The parameters of a search, in the order given. Raises UsageError if they do not fit together."""

    parameters: tuple[Parameter, ...]
    owners: dict[str, str] = field(init=False, compare=False, repr=False)  # by setting: the parameter it belongs to
    order: tuple[Parameter, ...] = field(init=False, compare=False, repr=False)  # conditions before dependents

    def __post_init__(self) -> None:
        if not self.parameters:
            raise UsageError("the space has no parameter: give one as in lr=log:0.001..0.5")
        seen: dict[str, str] = {}
        for each in self.parameters:
            if dashed(each.name) in seen:
                raise _refused(each.name, "it is given twice")
            seen[dashed(each.name)] = each.name
        owners: dict[str, str] = {}
        placed = tuple(_placed(each, self.parameters, owners) for each in self.parameters)
        object.__setattr__(self, "parameters", placed)
        object.__setattr__(self, "owners", owners)
        object.__setattr__(self, "order", tuple(_ordered(placed)))

    @classmethod
    def read(cls, lines: Sequence[str]) -> "Space":
        """Return the space of these lines, NAME=SPEC each. Raises UsageError."""
        return cls(tuple(map(read_parameter, lines)))

    @classmethod
    def from_yaml(cls, given: str | Mapping[str, Any]) -> "Space":
        """Return the space of a mapping or YAML text: name to SPEC, list of choices or mapping of KEYS. UsageError."""
        if isinstance(given, str):
            try:
                node = yaml.compose(given, yaml.BaseLoader)
                names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
                given = yaml.load(given, yaml.BaseLoader)  # texts, lists and dictionaries, nothing else
            except Exception as error:  # RecursionError, too
                raise UsageError(f"the space is not valid YAML: {' '.join(str(error).split())}") from None
            for name in {str(name) for name in names if names.count(name) > 1}:
                raise _refused(name, "it is given twice")
        if not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            raise UsageError("the space should be a mapping of lines NAME: SPEC, as in lr: log:0.001..0.5")
        return cls(tuple(_from_mapping(name, spec) for name, spec in given.items()))

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.parameters]

    def parameter(self, name: str) -> Parameter:
        return next(each for each in self.parameters if each.name == name)

    def values(self, unit: np.ndarray) -> Values:
        """Return the values of the active parameters at a point of the unit cube."""
        by_name = {each.name: each.value(float(u)) for each, u in zip(self.parameters, unit, strict=True)}
        active: Values = {}
        for each in self.order:
            if self.active(each, active):
                active[each.name] = by_name[each.name]
        return self.in_order(active)

    def unit(self, values: Values) -> np.ndarray:
        """Return the point of the unit cube for these values; 1/2 for an inactive parameter."""
        return np.array([each.unit(values[each.name]) if each.name in values else 0.5 for each in self.parameters])

    def active(self, parameter: Parameter, values: Values) -> bool:
        return parameter.condition is None or values.get(parameter.condition[0]) == parameter.condition[1]

    def in_order(self, values: Values) -> Values:
        return {each.name: values[each.name] for each in self.parameters if each.name in values}

    def grid(self, points: int) -> list[Values]:
        """Return all combinations of choices and `points` values per range. UsageError for more than POINTS of them."""
        if points < 1:
            raise UsageError(f"a grid needs at least 1 point per range, not {points}")
        combinations: list[Values] = [{}]
        for here in self.order:
            grid = here.grid(points)
            longer = (
                {**values, here.name: value} if active else values
                for values in combinations
                for active in [self.active(here, values)]
                for value in (grid if active else grid[:1])
            )
            combinations = list(itertools.islice(longer, POINTS + 1))
            if len(combinations) > POINTS:
                fewer = "give fewer choices, or fewer points per range"
                raise UsageError(f"the grid has more than {POINTS:,} points: {fewer}")
        return [self.in_order(values) for values in combinations]

    def texts(self, values: Values) -> dict[str, str]:
        """Return the values as options, by name with dashes; a setting is part of its option's text."""
        texts = {name: _text(value) for name, value in values.items() if name not in self.owners}
        for name, value in values.items():
            owner = self.owners.get(name)
            if owner in texts:
                head, _, setting = name.rpartition(":")
                mark = ":" if texts[owner] == head and ":" not in head else ","
                texts[owner] += f"{mark}{setting}={_text(value)}"
        return {dashed(name): text for name, text in texts.items()}

    def described(self) -> list[str]:
        """Return canonical lines, from which `read` makes the same space."""
        return [each.described() for each in self.parameters]


def read_parameter(text: str) -> Parameter:
    """Parse NAME=SPEC, optionally followed by ` if NAME=CHOICE`. Raises UsageError."""
    before, equals, spec = text.partition("=")
    name = before.strip()
    if not equals:
        raise UsageError(f"--space {line(text)}: write NAME=SPEC, as in lr=log:0.001..0.5 or optimizer=adam|momentum")
    spec, if_, wanted = spec.rpartition(" if ") if " if " in spec else (spec, "", "")
    condition = _condition(name, wanted) if if_ else None
    return _parameter(name, spec.strip(), condition)


def _condition(name: str, text: str) -> tuple[str, str]:
    other, equals, value = (each.strip() for each in text.partition("="))
    if not (equals and other and value):
        raise _refused(name, f"the condition {text.strip()!r} should be NAME=CHOICE, as in if optimizer=momentum")
    return other, value


def _parameter(name: str, spec: str, condition: tuple[str, str] | None) -> Parameter:
    if "|" not in spec and _is_range(spec):
        kind, _, rest = spec.partition(":") if spec.startswith(("log:", "int:")) else ("", "", spec)
        ends, colon, mark = rest.partition(":")
        if colon and not (kind == "int" and mark == "log"):
            known = "LOW..HIGH, log:LOW..HIGH, int:LOW..HIGH or int:LOW..HIGH:log"
            raise _refused(name, f"{spec!r} is no range: write {known}")
        low, dots, high = ends.partition("..")
        if not dots:
            raise _refused(name, f"{spec!r} is no range: write {kind}:LOW..HIGH")
        return _range(name, low.strip(), high.strip(), kind == "int", "log" in (kind, mark), condition)
    return _choices(name, [each.strip() for each in spec.split("|")], condition)


def _is_range(spec: str) -> bool:
    """True for the text of a range; paths such as ../a.h5 are not ranges."""
    return spec.startswith(("log:", "int:")) or (".." in spec and "/" not in spec)


def _choices(name: str, choices: list[str], condition: tuple[str, str] | None) -> Parameter:
    _check_name(name)
    if not choices or not all(choices):
        raise _refused(name, "a choice is empty: write choices as in adam|momentum")
    for each in choices:
        low, dots, high = each.partition("..")
        numbers = dots and NUMBER.fullmatch(low) and NUMBER.fullmatch(high)
        if numbers or each.startswith(("log:", "int:")) or (len(choices) == 1 and _is_range(each)):
            raise _refused(name, f"{each!r} is a range, and a parameter has either a range or choices")
        if "|" in each or " if " in each or line(each) != each or each != each.strip():
            raise _refused(name, f"{line(repr(each))} can be no choice: it has |, ' if ', a line break or outer blanks")
        if choices.count(each) > 1:
            raise _refused(name, f"the choice {each!r} is given twice")
    return Parameter(name, "choice", tuple(choices), condition=condition)


def _range(name: str, low: Any, high: Any, whole: bool, log: bool, condition: tuple[str, str] | None) -> Parameter:
    _check_name(name)
    first, last = (_number(name, end, whole) for end in (low, high))
    if first >= last:
        said = "is empty" if first > last else "has one value only: leave the parameter out, and give the option"
        raise _refused(name, f"the range from {low} to {high} {said}")
    if log and first <= 0:
        raise _refused(name, f"a logarithmic range begins above 0, not at {low}")
    return Parameter(name, "int" if whole else "float", (), first, last, log, condition)


def _number(name: str, given: Any, whole: bool) -> float:
    text = str(given)
    if not NUMBER.fullmatch(text):
        raise _refused(name, f"{line(repr(text))} is no number: a range is LOW..HIGH, as in 0.1..0.9")
    value = float(text)
    if whole and value != round(min(max(value, -LARGEST), LARGEST)):
        raise _refused(name, f"{text} is no integer, as both ends of int:LOW..HIGH should be")
    if abs(value) > (WHOLE if whole else LARGEST):
        raise _refused(name, f"{text} is too large: at most {WHOLE if whole else LARGEST:,}")
    return value


def _from_mapping(name: str, spec: Any) -> Parameter:
    _check_name(name)
    if isinstance(spec, str):
        return read_parameter(f"{name}={spec}")
    if not isinstance(spec, Mapping):
        return _choices(name, [_text(each) for each in spec] if isinstance(spec, list) else [_text(spec)], None)
    for key in spec:
        if key not in KEYS:
            raise _refused(name, f"unknown key {line(repr(key))}{nearest(str(key), KEYS)}; known: {', '.join(KEYS)}")
    wanted = spec.get("if")
    if isinstance(wanted, Mapping) and len(wanted) == 1:
        wanted = "=".join(map(_text, *wanted.items()))
    condition = _condition(name, _text(wanted)) if wanted is not None else None
    if "choices" in spec:
        if not isinstance(spec["choices"], list) or set(spec) - {"choices", "if"}:
            raise _refused(name, "choices are a list, beside which only `if` may stand")
        return _choices(name, [_text(each) for each in spec["choices"]], condition)
    if "low" not in spec or "high" not in spec:
        raise _refused(name, "give low and high, or choices")
    whole, log = (_yes(name, key, spec.get(key, False)) for key in ("int", "log"))
    return _range(name, _text(spec["low"]), _text(spec["high"]), whole, log, condition)


def _yes(name: str, key: str, value: Any) -> bool:
    known = yaml.SafeLoader.bool_values
    if _text(value).lower() not in known:
        raise _refused(name, f"{key} should be true or false, not {line(repr(value))}")
    return known[_text(value).lower()]


def _text(value: Any) -> str:
    """Return a value as on a command line; floats with all digits, so that training uses exactly this value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    return repr(value.item() if isinstance(value, np.generic) else value)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        hint = "; leave out the dashes" if name.startswith("-") else ""
        raise UsageError(f"{line(repr(name))} can be no parameter's name: write lr, batch-size or momentum:beta{hint}")


def _placed(each: Parameter, parameters: tuple[Parameter, ...], owners: dict[str, str]) -> Parameter:
    """Return the parameter with a checked condition; a setting depends on its choice, as `owners` notes. UsageError."""
    condition = each.condition
    if condition:
        other = next((other for other in parameters if dashed(other.name) == dashed(condition[0])), None)
        if other is None or other.kind != "choice":
            what = "has a range instead of choices" if other else "is not in the space"
            raise _refused(each.name, f"its condition is on {condition[0]!r}, which {what}")
        if condition[1] not in other.choices:
            near = nearest(condition[1], other.choices)
            raise _refused(each.name, f"{other.name} has no choice {condition[1]!r}, so it would never be active{near}")
        condition = other.name, condition[1]
    if head := each.name.rpartition(":")[0]:
        choices = [(other.name, choice) for other in parameters for choice in other.choices]
        chosen = [each for each in choices if each[1] == head or each[1].startswith((f"{head}:", f"{head},"))]
        if not chosen:
            raise _refused(each.name, f"it is a setting of {head}, which no parameter has among its choices")
        if condition is None and len(chosen) > 1:
            several = " or ".join(f"if {name}={choice}" for name, choice in chosen)
            raise _refused(each.name, f"several choices have this setting: add {several}")
        if condition is not None and condition not in chosen:
            raise _refused(each.name, f"it is a setting of {head}, so it needs if {chosen[0][0]}={chosen[0][1]}")
        condition = condition or chosen[0]
        owners[each.name] = condition[0]
    return replace(each, condition=condition)


def _ordered(parameters: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """Yield each parameter after the one its condition names. Raises UsageError for a cycle of conditions."""
    done: set[str] = set()
    left = list(parameters)
    while left:
        ready = next((each for each in left if each.condition is None or each.condition[0] in done), None)
        if ready is None:
            raise _refused(left[0].name, "its condition depends on itself")
        left.remove(ready)
        done.add(ready.name)
        yield ready


def _refused(name: str, why: str) -> UsageError:
    return UsageError(f"--space {line(name)}: {why}")
