"""What users bring: package.module:name, with settings behind it, as package.module:Class,width=3.

    --allreduce my_ring:ring      --model shapes.net:Net,width=3      --data tables:prices,year=2020

The current folder is importable for it, as for `python -m`. What a command line names is called. A name that stands in
a file (a checkpoint, the options of a run) may come from anywhere: who reads such a file calls `refuse_untrusted`,
which lets a name pass only where the command line has --trust with that name, or with the file or a folder around it.
"""

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

TORCH = "torch:"  # begins it
NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)((?:,.*)?)", re.DOTALL)
OPTIONS = ("data", "source", "model", "env", "allreduce", "algorithms", "roofline")  # their values may name code
STARTED = ("launcher", "trust")  # what these name is started, or is trusted itself


def of_torch(spec: str) -> bool:
    """Whether a spec names something of PyTorch's, as torch:package.module:function or torch:AdamW."""
    return spec.startswith(TORCH)


def is_own(text: str) -> bool:
    """Whether a text has the form package.module:name or package.module:name,setting=value,..."""
    return NAMED.fullmatch(text) is not None


def names_in(option: str, text: str) -> list[str]:
    """The names of code in the value of an option, or in several with | between, without settings.

    >>> names_in("model", "torch:nets:cnn,width=3"), names_in("model", "gpt:layers=2"), names_in("schedule", "a:b")
    (['nets:cnn'], [], [])
    """
    if option in STARTED:
        return [text] if text else []
    if option not in OPTIONS:
        return []
    items = [each.strip() for each in text.split("," if option == "algorithms" else "|")]
    if option == "env":  # gymnasium imports package:Name-v0
        items = [each for each in items if ":" in each.removeprefix("minatar:")]
    else:
        items = [each for each in items if is_own(each.removeprefix(TORCH))]
    ours = "mlp:" if option == "model" else "\0"  # mlp:dueling
    return [each.removeprefix(TORCH).partition(",")[0] for each in items if not each.startswith(ours)]


def names_in_line(text: str) -> list[tuple[str, str]]:
    """The names of code in a line of a program and its options, each with its option."""
    try:
        words = shlex.split(text)
    except ValueError:  # quotes that do not close: no program reads such a line
        return []
    found = []
    for word, following in itertools.pairwise([*words, ""]):
        option, equals, value = word.removeprefix("--").partition("=")
        found += [(option, name) for name in names_in(option, value if equals else following)]
    return found


def names_of(option: str, value: Any) -> list[tuple[str, str]]:
    """The names of code in an option's value, each with its option; `line` and `lines` are those of other programs."""
    if option in ("line", "lines"):
        return [name for text in (*value, " ".join(value)) for name in names_in_line(text)]
    return [(option, name) for name in names_in(option, value)] if isinstance(value, str) else []


def refuse_untrusted(names: Iterable[tuple[str, str]], file: str, trust: Iterable[str]) -> None:
    """Raise UsageError for a name of code that stands in a file, where the command line trusts neither of them.

    names: pairs of an option and a name in its value, as of `names_in`. trust: the values of --trust, each a name of
    code, a file, or a folder with all that is below it.
    """
    trust, where = tuple(trust), os.path.realpath(file)
    known = {each.removeprefix(TORCH).partition(",")[0] for each in trust}
    places = [os.path.realpath(each).rstrip(os.sep) for each in trust]
    if any(where == place or where.startswith(f"{place}{os.sep}") for place in places):
        return
    for option, name in names:
        if name not in known:
            raise UsageError(
                f"{file} names {name} ({option}), and code that a file names is called only where the command line "
                f"allows it: add --trust {shlex.quote(name)}, or --trust {shlex.quote(file)} for all names in it"
            )


def own(text: str, told: str) -> tuple[Any, dict[str, Any]]:
    """What the text names, and its settings; `told` begins a refusal, as "--model text". Raises UsageError."""
    named = NAMED.fullmatch(text)
    if named is None:
        raise UsageError(f"{told} should be an importable package.module:name, with settings as in :name,width=3")
    module, name, rest = named.groups()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with blamed_on_own(f"{told} should be an importable package.module:name"):
        found = getattr(importlib.import_module(module), name)
    return found, settings_of(rest, told)


def settings_of(text: str, told: str) -> dict[str, Any]:
    """The settings width=3,betas=(0.9,0.95) by name; a comma in brackets parts none. Raises UsageError."""
    items, depth = [""], 0
    for each in text:
        depth += (each in "([{") - (each in ")]}")
        if each == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += each
    return dict(setting(item, told) for item in items if item)


def made(found: Any, settings: dict[str, Any], offered: dict[str, Any], told: str) -> Any:
    """found(...), with the settings and what it takes of `offered`, by name. Raises UsageError, one line."""
    if not callable(found):
        raise UsageError(f"{told}: it is no function and no class, but {type(found).__name__}")
    try:
        takes = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(f"{told}: it does not say which arguments it takes; wrap it in a function that does") from None
    any_name = any(each.kind is each.VAR_KEYWORD for each in takes)
    known = [each.name for each in takes if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for name in settings:
        if name not in known and not any_name:
            raise UsageError(f"{told}: there is no setting {name!r}; it takes {', '.join(known) or 'none'}")
    given = {name: value for name, value in offered.items() if name in known} | settings
    needed = [each.name for each in takes if each.default is each.empty and each.name in known]
    if missing := [name for name in needed if name not in given]:
        raise UsageError(f"{told}: it needs {', '.join(missing)}; write them as in :{missing[0]}=VALUE")
    with blamed_on_own(told):
        return found(**given)


@contextmanager
def blamed_on_own(told: str) -> Iterator[None]:
    """What code of a user's own raises becomes one line that says where in it."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # an exit of one rank would leave the others waiting
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not _ours(each.filename)]
        where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        said = (
            f"it leaves the program, with status {error.code}"
            if isinstance(error, SystemExit)
            else kind + reason(error)
        )
        raise UsageError(f"{told}: {said}{where}") from error


def setting(item: str, told: str) -> tuple[str, Any]:
    """NAME=VALUE as the name and the value: a number, true, ... as Python has it, or else a text. Raises UsageError."""
    name, equals, text = item.partition("=")
    if not (equals and name.isidentifier()):
        raise UsageError(f"{told}: a setting is written NAME=VALUE, not {item!r}")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, text


def _ours(path: str) -> bool:
    return path in (__file__, importlib.__file__) or path.startswith("<frozen")
