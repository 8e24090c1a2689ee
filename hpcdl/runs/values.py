"""The text of an option, on a command line or in a file, as a value of its type."""

import contextlib
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from hpcdl.errors import UsageError, nearest, parse_finite, parse_integer


def values_of(texts: dict[str, Any], kinds: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The values that a file holds as texts."""
    return {name: value_of(kinds[name], text, f"{name} in {path}") for name, text in texts.items()}


def value_of(kind: Any, text: Any, where: str) -> Any:
    """The text as a value of this type: str, int, float, bool, a Literal, or the first that fits of a union.

    Of a list, a list of them. Raises UsageError, which begins with `where`.
    """
    if get_origin(kind) is list:
        return [value_of(get_args(kind)[0], each, where) for each in (text if isinstance(text, list) else [text])]
    for each in [kind] if kind in READ or get_origin(kind) is Literal else get_args(kind):
        choices = {str(value): value for value in get_args(each)}  # of a Literal
        if {"yes", "no"} <= set(choices):  # as YAML has them, and older files
            choices |= {name: "yes" if value else "no" for name, value in yaml.SafeLoader.bool_values.items()}
            text = text.lower() if isinstance(text, str) else text
        read: Callable[[str], Any] = choices.__getitem__ if choices else READ[each][0]
        with contextlib.suppress(ValueError, KeyError):
            if isinstance(text, str):
                return read(text)
    wanted = READ[kind][1] if kind in READ else "one of " + ", ".join(map(repr, get_args(kind)))
    if READ.get(kind) == READ[int] and isinstance(text, str) and text.lstrip("+-").isdecimal():
        wanted += " of 64 bits"
    said = text if isinstance(text, str) else reprlib.repr(text)  # of lists in lists in lists, the beginning
    near = nearest(said, map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    raise UsageError(f"{where}: expected {wanted}, not {' '.join(said.split())}{near}")


def without_zeros(text: str) -> str:
    """A text in which no character is 0, which a file's name cannot hold."""
    if "\0" in text:
        raise ValueError
    return text


def boolean(text: str) -> bool:
    """YAML's true and false, yes and no, on and off."""
    return yaml.SafeLoader.bool_values[text.lower()]


READ: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (without_zeros, "a text"),
    int: (parse_integer, "a whole number"),
    float: (parse_finite, "a number"),
    bool: (boolean, "true or false"),
}
