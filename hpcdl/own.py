"""What users bring: package.module:name, with settings behind it, as package.module:Class,width=3.

    --allreduce my_ring:ring      --model shapes.net:Net,width=3      --data tables:prices,year=2020

The current folder is importable for it, as for `python -m`. A name that stands in a file (a checkpoint, the options of
a run) may come from anywhere. A function that it names is called only where it is the user's own, neither the standard
library's nor an installed one: shutil:rmtree must not be called because a file says so. A model that it names may be
installed, too, for only a class that has a model's members is made.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcdl.errors import UsageError, reason

TORCH = "torch:"  # begins it
NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)((?:,.*)?)", re.DOTALL)


def of_torch(spec: str) -> bool:
    """Whether a spec names something of PyTorch's, as torch:package.module:function or torch:AdamW."""
    return spec.startswith(TORCH)


def is_own(text: str) -> bool:
    """Whether a text has the form package.module:name or package.module:name,setting=value,..."""
    return NAMED.fullmatch(text) is not None


def own(text: str, told: str, from_file: bool = False, installed: bool = False) -> tuple[Any, dict[str, Any]]:
    """What the text names, and its settings; `told` begins a refusal, as "--model text".

    from_file: the name stands in a file. installed: it may name what is installed even so, for who asks looks at what
    that is before it is called. Raises UsageError, one line.
    """
    named = NAMED.fullmatch(text)
    if named is None:
        raise UsageError(f"{told} should be an importable package.module:name, with settings as in :name,width=3")
    module, name, rest = named.groups()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with blamed_on_own(f"{told} should be an importable package.module:name"):
        if from_file and not _users(module, installed):
            raise UsageError(f"{told} stands in a file, and is no module of yours: name it on the command line")
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


def _users(module: str, installed: bool) -> bool:
    """Whether a module is not the standard library's, nor, unless it may be, installed; nothing of it is imported."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "hpcdl":
        return False
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {top!r}")
    if installed:
        return True
    folders = [os.path.realpath(sysconfig.get_path(each)) for each in ("purelib", "platlib", "stdlib")]
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    return all(not os.path.realpath(place).startswith(f"{folder}{os.sep}") for place in places for folder in folders)


def _ours(path: str) -> bool:
    return path == __file__ or path.startswith("<frozen")
