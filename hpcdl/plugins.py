"""Plugins: user code named package.module:name, with settings as in package.module:Class,width=3.

    --allreduce my_ring:ring      --model shapes.net:Net,width=3      --data tables:prices,year=2020

The current folder is importable, as for `python -m`. Code named on the command line is trusted. A name in a file (a
checkpoint, the options of a run) may come from anywhere: readers of such files call `refuse_untrusted`."""

import ast
import importlib
import inspect
import itertools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcdl.errors import UsageError, reason

TORCH = "torch:"  # prefix of PyTorch names
MIXTURE = "mix:"
NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)((?:,.*)?)", re.DOTALL)
OPTIONS = ("data", "source", "model", "env", "allreduce", "algorithms", "roofline")  # options that may name code
STARTED = ("launcher", "trust")  # options whose whole value counts as a name of code


def of_torch(spec: str) -> bool:
    """True if a spec names PyTorch code, as in torch:package.module:function or torch:AdamW."""
    return spec.startswith(TORCH)


def is_plugin(text: str) -> bool:
    """True if a text has the form package.module:name or package.module:name,setting=value,..."""
    return NAMED.fullmatch(text) is not None and not is_mixture(text)


def is_mixture(text: str) -> bool:
    """True if a text names a mixture of data sets, as mix:A=0.7,B=0.3 (hpcdl/data/mixture.py)."""
    return text.startswith(MIXTURE)


def names_in(option: str, text: str) -> list[str]:
    """Return the names of code, without settings, in an option's value `text`, or in several values separated by |.

    >>> names_in("model", "torch:nets:cnn,width=3"), names_in("model", "gpt:layers=2"), names_in("schedule", "a:b")
    (['nets:cnn'], [], [])"""
    if option in STARTED:
        return [text] if text else []
    if option not in OPTIONS:
        return []
    items = [each.strip() for each in text.split("," if option == "algorithms" else "|")]
    if option == "env":  # gymnasium imports package:Name-v0
        items = [each for each in items if ":" in each.removeprefix("minatar:")]
    else:
        items = [each for each in items if is_plugin(each.removeprefix(TORCH))]
    ours = "mlp:" if option == "model" else "\0"  # mlp:dueling
    return [each.removeprefix(TORCH).partition(",")[0] for each in items if not each.startswith(ours)]


def names_in_line(text: str) -> list[tuple[str, str]]:
    """Return (option, name of code) for each name of code in a command line."""
    try:
        words = shlex.split(text)
    except ValueError:  # unbalanced quotes: no program accepts such a line
        return []
    found = []
    for word, following in itertools.pairwise([*words, ""]):
        option, equals, value = word.removeprefix("--").partition("=")
        found += [(option, name) for name in names_in(option, value if equals else following)]
    return found


def names_of(option: str, value: Any) -> list[tuple[str, str]]:
    """Return (option, name of code) for each name in an option's value; `line` and `lines` hold command lines."""
    if option in ("line", "lines"):
        return [name for text in (*value, " ".join(value)) for name in names_in_line(text)]
    return [(option, name) for name in names_in(option, value)] if isinstance(value, str) else []


def refuse_untrusted(names: Iterable[tuple[str, str]], file: str, trust: Iterable[str]) -> None:
    """Raise UsageError if a file names code, and the command line trusts neither that name nor the file. names: pairs
    of an option and a name in its value. trust: the values of --trust: names of code, files, and folders."""
    trust, where = tuple(trust), os.path.realpath(file)
    known = {each.removeprefix(TORCH).partition(",")[0] for each in trust}
    places = [os.path.realpath(each).rstrip(os.sep) for each in trust]
    if any(where == place or where.startswith(f"{place}{os.sep}") for place in places):
        return
    for option, name in names:
        if name not in known:
            raise UsageError(
                f"{file} names {name} ({option}), code that is called only if the command line trusts it: "
                f"add --trust {shlex.quote(name)}, or --trust {shlex.quote(file)} for all names in that file"
            )


def load_plugin(text: str, option: str) -> tuple[Any, dict[str, Any]]:
    """Return the object that `text` names, and its settings. Raises UsageError; its message begins with `option`."""
    named = NAMED.fullmatch(text)
    if named is None:
        raise UsageError(f"{option} should be an importable package.module:name, with settings as in :name,width=3")
    module, name, rest = named.groups()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with plugin_errors(f"{option} should be an importable package.module:name"):
        plugin = getattr(importlib.import_module(module), name)
    return plugin, settings_of(rest, option)


def settings_of(text: str, option: str) -> dict[str, Any]:
    """Parse settings, as width=3,betas=(0.9,0.95); commas in brackets do not separate. Raises UsageError."""
    items, depth = [""], 0
    for each in text:
        depth += (each in "([{") - (each in ")]}")
        if each == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += each
    return dict(setting(item, option) for item in items if item)


def call_plugin(function: Any, settings: dict[str, Any], offered: dict[str, Any], option: str) -> Any:
    """Return `function`, called with the settings and the values of `offered` that it accepts. Raises UsageError."""
    if not callable(function):
        raise UsageError(f"{option} should name a function or a class, not an object of type {type(function).__name__}")
    try:
        takes = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(
            f"{option}: its arguments cannot be inspected; wrap it in a function of Python that names them"
        ) from None
    any_name = any(each.kind is each.VAR_KEYWORD for each in takes)
    known = [each.name for each in takes if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for name in settings:
        if name not in known and not any_name:
            raise UsageError(f"{option}: there is no setting {name!r}; it takes {', '.join(known) or 'none'}")
    arguments = {name: value for name, value in offered.items() if name in known} | settings
    needed = [each.name for each in takes if each.default is each.empty and each.name in known]
    if missing := [name for name in needed if name not in arguments]:
        raise UsageError(f"{option}: settings missing: {', '.join(missing)}; write them as in NAME,{missing[0]}=VALUE")
    with plugin_errors(option):
        return function(**arguments)


def takes(function: Any, name: str) -> bool:
    """True if `function`, or a class, has a parameter of this name; False, too, if its parameters are unknown."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


@contextmanager
def plugin_errors(option: str) -> Iterator[None]:
    """Context that turns an error of user code into a UsageError, which names the option, and the line of that code."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # an exit of one rank would leave the others waiting
        raise UsageError(f"{option}: {located(error)}") from error


def located(error: BaseException) -> str:
    """Return an error of user code as one line of text: its type, its reason, and the file and line of that code."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not _is_import_machinery(each.filename)]
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SystemExit):
        return f"it leaves the program, with status {error.code}{where}"
    kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
    return f"{kind}{reason(error)}{where}"


def _is_import_machinery(path: str) -> bool:
    return path in (__file__, importlib.__file__) or path.startswith("<frozen")


def setting(item: str, option: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; the value is a Python literal, or else text. Raises UsageError."""
    name, equals, text = item.partition("=")
    if not (equals and name.isidentifier()):
        raise UsageError(f"{option}: a setting is written NAME=VALUE, not {item!r}")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, text
