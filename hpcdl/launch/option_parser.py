"""Options from the command line and from YAML files, as one dataclass; values of both are parsed alike."""

import contextlib
import os
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from hpcdl.errors import UsageError, blamed_on, line, nearest, parse_finite, parse_integer
from hpcdl.formatting import dashed
from hpcdl.launch.config_migration import config_of, predecessor, taken
from hpcdl.launch.help import parser
from hpcdl.plugins import names_of, refuse_untrusted
from hpcdl.runs.options import COMMON, INSTEAD, Options, kinds_of

LARGEST = 1_000_000  # most bytes of a file of options


@dataclass(frozen=True)
class CommandLine:
    """A command line that was read. told: names of options on the line. given: names of options on the line or in a
    file. before: "PROGRAM (step N)" of the run that is continued, if another program trained it; else "". trust: values
    of --trust. origin: for each option whose value comes from a file, that file."""

    options: Any
    told: frozenset[str]
    given: frozenset[str]
    before: str
    trust: tuple[str, ...]
    origin: dict[str, str]


def parse(options_class: type, program: str, description: str, arguments: list[str] | None = None) -> Any:
    """Return the options of a command line; arguments as of `parse_command_line`."""
    return parse_command_line(options_class, program, description, arguments).options


def parse_command_line(
    options_class: type, program: str, description: str, arguments: list[str] | None = None
) -> CommandLine:
    """Read the command line into an `options_class`; a field without a default is a positional argument, or several.
    description: the script's docstring. The command line's values win over those of --config, and these over the run's
    of --resume. Both files may be of another program that trains: its own options are left out; for --config, a line on
    stderr tells which. Raises UsageError, one line, for an unknown option, a bad value or a missing file."""
    kinds = kinds_of(options_class)
    defaults = program_defaults(kinds)
    texts = vars(parser(options_class, kinds, defaults, program, description).parse_args(arguments))
    files, trust = texts.pop("config", []), texts.pop("trust", [])
    if strange := [each for each in trust if ":" not in each and not os.path.exists(each)]:
        raise UsageError(f"--trust {strange[0]}: there is no such file; a name of code is written package.module:name")
    given = {name: value_of(kinds[name], text, "--" + dashed(name)) for name, text in texts.items()}
    found: dict[str, Any] = {}
    origin, remarks = dict[str, str](), list[str]()  # origin: the file of each value
    for path in files:
        texts, left = taken(read_file(path, f"--config {path}"), kinds, COMMON, f"--config {path}")
        idle = [name for name in getattr(options_class, "unused", ()) if name in texts]
        left += [name for name in idle if texts.pop(name) != str(getattr(Options, name))]
        if left:
            remarks.append(f"warning: --config {path}: options of another strategy are left out: {', '.join(left)}")
        found |= values_of(texts, kinds, path)
        origin |= dict.fromkeys(texts, path)
    found |= given
    before = predecessor(found["resume"], program) if found.get("resume") else ""
    if before:
        note(program, f"goes on from a run of {before}")
    try:
        old = resumed(found["resume"], kinds) if found.get("resume") else {}
        origin = dict.fromkeys(old, str(config_of(found.get("resume", "")))) | origin
        origin = {name: file for name, file in origin.items() if name not in given}
        for name, file in origin.items():
            refuse_untrusted(names_of(name, (old | found)[name]), file, trust)
        found = (old or defaults) | found
        for name, instead in INSTEAD.items():
            if name in given and instead in kinds:
                if instead in given:
                    raise UsageError(f"give --{dashed(name)} or --{dashed(instead)}, not both")
                found[instead] = 0  # replaces a file's value
        made = options_class(**found)
        if {"initial", "resume"} <= {*given}:
            raise UsageError("--initial is for a new run, and --resume continues a run: give one of them")
    except UsageError as error:
        raise UsageError(f"{error}{remark(before)}") from None
    for text in remarks:  # not for refused options
        note(program, text)
    cleared = {name for name in INSTEAD.values() if not found.get(name)}
    return CommandLine(made, frozenset(given), frozenset(found) - cleared - {"out"}, before, tuple(trust), origin)


def program_defaults(kinds: dict[str, Any]) -> dict[str, str]:
    """Return a program's defaults unlike those of the options class: its run has a folder, a library user's none."""
    return {"out": "auto"} if "resume" in kinds else {}


def note(program: str, text: str) -> None:
    """Print a note, which is no error, on stderr. Programs silence all ranks but one (`quiet` in launch/program.py)."""
    print(f"{program}: {line(text)}", file=sys.stderr, flush=True)


def remark(before: str) -> str:
    """Return an addition to a refusal: which run of another program was to be continued; "" if there is none."""
    return f"; --resume names a run of {before}" if before else ""


def read_file(path: str | Path, told: str) -> dict[str, Any]:
    """Return a YAML file's values as texts, by names of fields. told: the option with the file. Raises UsageError."""
    with blamed_on(f"{told} cannot be read"), open(path, "rb") as file:
        text = file.read(LARGEST + 1)  # a device may have no end
    if len(text) > LARGEST:
        raise UsageError(f"{told} has more than {LARGEST:,} bytes; a file of options has a few lines")
    try:
        found = yaml.load(text.decode(), yaml.BaseLoader)  # texts, lists and dictionaries, nothing else
    except Exception as error:  # RecursionError, too
        raise UsageError(f"{told}: the file is not valid YAML: {' '.join(str(error).split())}") from None
    if not (isinstance(found, dict) and all(isinstance(name, str) for name in found)):
        raise UsageError(f"{told}: a line should be NAME: VALUE, with the name of an option")
    return {name.replace("-", "_"): value for name, value in found.items()}


def resumed(run: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run that this program has. run: its folder or a checkpoint file. Raises UsageError."""
    told, config = f"--resume {run}", config_of(run)
    if not os.path.isfile(config):
        where = "beside that file" if os.path.isfile(run) else "in that folder"
        raise UsageError(f"{told}: there is no run {where} (config.yaml is missing)")
    texts, _ = taken(read_file(config, f"{told}: config.yaml"), kinds, COMMON)
    return values_of(texts, kinds, config) | {"out": os.path.dirname(config) or "."}


def values_of(texts: dict[str, Any], kinds: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return a file's texts as values of the types in `kinds`. path: of the file, for messages. Raises UsageError."""
    return {name: value_of(kinds[name], text, f"{name} in {path}") for name, text in texts.items()}


def value_of(kind: Any, text: Any, where: str) -> Any:
    """Return the text as a value of this type: str, int, float, bool, a Literal, or the first fitting type of a union.
    A list type gives a list of values. Raises UsageError, which begins with `where`."""
    if get_origin(kind) is list:
        return [value_of(get_args(kind)[0], each, where) for each in (text if isinstance(text, list) else [text])]
    for each in [kind] if kind in READ or get_origin(kind) is Literal else get_args(kind):
        choices = {str(value): value for value in get_args(each)}  # of a Literal
        if {"yes", "no"} <= set(choices):  # YAML's spellings of them, which older files have, too
            choices |= {name: "yes" if value else "no" for name, value in yaml.SafeLoader.bool_values.items()}
            text = text.lower() if isinstance(text, str) else text
        read: Callable[[str], Any] = choices.__getitem__ if choices else READ[each][0]
        with contextlib.suppress(ValueError, KeyError):
            if isinstance(text, str):
                return read(text)
    wanted = READ[kind][1] if kind in READ else "one of " + ", ".join(map(repr, get_args(kind)))
    if READ.get(kind) == READ[int] and isinstance(text, str) and text.lstrip("+-").isdecimal():
        wanted += " of 64 bits"
    said = text if isinstance(text, str) else reprlib.repr(text)  # shortens nested lists
    near = nearest(said, map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    raise UsageError(f"{where}: expected {wanted}, not {' '.join(said.split())}{near}")


def without_zeros(text: str) -> str:
    """Return the text. Raises ValueError if it has a null character, which a file's name cannot have."""
    if "\0" in text:
        raise ValueError
    return text


def boolean(text: str) -> bool:
    """Return the bool that YAML reads in a text: true or false, yes or no, on or off. Raises KeyError."""
    return yaml.SafeLoader.bool_values[text.lower()]


READ: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (without_zeros, "a text"),
    int: (parse_integer, "a whole number"),
    float: (parse_finite, "a number"),
    bool: (boolean, "true or false"),
}
