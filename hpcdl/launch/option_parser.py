"""Options from the command line and from YAML files, as one dataclass.

A value in a file is read as if it stood on the command line: its text becomes a value of its option's type.
"""

import contextlib
import os
import reprlib
import sys
from collections.abc import Callable, Iterator
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

LARGEST = 1_000_000  # bytes of a file of options


@dataclass(frozen=True)
class CommandLine:
    """A command line: the options that it and its files give, and where they come from.

    told: names of the options that the line itself gives. given: those that the line or a file gives. before: program
    and step of the run that this one goes on with, if of another strategy. trust: the values of --trust. origin: the
    file of each option that a file gives.
    """

    options: Any
    told: frozenset[str]
    given: frozenset[str]
    before: str
    trust: tuple[str, ...]
    origin: dict[str, str]


def parse(options_class: type, program: str, description: str, arguments: list[str] | None = None) -> Any:
    """The options of a command line, as `parse_command_line` reads it."""
    return parse_command_line(options_class, program, description, arguments).options


def parse_command_line(
    options_class: type, program: str, description: str, arguments: list[str] | None = None
) -> CommandLine:
    """Read the command line into an `options_class`; a field without a default is a positional argument, or several.

    description: the script's docstring. Files of --config give values that the command line does not; with --resume the
    options of that run do so for what is left. Both may be of another program that trains, whose own options are then
    left out, of which a line says so.

    Raises UsageError, one line, for an unknown option, a bad value or a file that is missing.
    """
    kinds = kinds_of(options_class)
    defaults = program_defaults(kinds)
    texts = vars(parser(options_class, kinds, defaults, program, description).parse_args(arguments))
    files, trust = texts.pop("config", []), texts.pop("trust", [])
    if strange := [each for each in trust if ":" not in each and not os.path.exists(each)]:
        raise UsageError(f"--trust {strange[0]}: there is no such file, and a name is written package.module:name")
    given = {name: value_of(kinds[name], text, "--" + dashed(name)) for name, text in texts.items()}
    found: dict[str, Any] = {}
    origin, remarks = dict[str, str](), list[str]()  # of each value its file
    for path in files:
        texts, left = taken(read_file(path, f"--config {path}"), kinds, COMMON, f"--config {path}")
        idle = [name for name in getattr(options_class, "unused", ()) if name in texts]
        left += [name for name in idle if texts.pop(name) != str(getattr(Options, name))]
        if left:
            remarks.append(f"warning: --config {path}: left out, of another strategy: {', '.join(left)}")
        found |= values_of(texts, kinds, path)
        origin |= dict.fromkeys(texts, path)
    found |= given
    before = predecessor(found["resume"], program) if found.get("resume") else ""
    if before:
        note(program, f"goes on from a run of {before}")
    with remarked(before):
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
                found[instead] = 0  # what a file says of it holds no longer
        made = options_class(**found)
        if {"initial", "resume"} <= {*given}:
            raise UsageError("--initial is where a run begins, and --resume goes on with one: give one of them")
    for text in remarks:  # of options that are refused, the refusal is what counts
        note(program, text)
    cleared = {name for name in INSTEAD.values() if not found.get(name)}
    return CommandLine(made, frozenset(given), frozenset(found) - cleared - {"out"}, before, tuple(trust), origin)


def program_defaults(kinds: dict[str, Any]) -> dict[str, str]:
    """Defaults of a program that differ from its options class's: its run has a folder, a library user's none."""
    return {"out": "auto"} if "resume" in kinds else {}


def note(program: str, text: str) -> None:
    """Say something in a line that is no error; where several ranks read the same, `quiet` silences all but one."""
    print(f"{program}: {line(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def remarked(before: str) -> Iterator[None]:
    """A refusal in the body says, too, of which program the run is that was to be gone on with; "": of this one."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{error}{remark(before)}") from None


def remark(before: str) -> str:
    """What the refusal of a run says that was to go on with one of another program, at a step."""
    return f"; this was to go on from a run of {before}" if before else ""


def read_file(path: str | Path, told: str) -> dict[str, Any]:
    """The values of a YAML file as texts, by the names of fields; `told`: the option that names the file."""
    with blamed_on(f"{told} cannot be read"), open(path, "rb") as file:
        text = file.read(LARGEST + 1)  # a device may have no end
    if len(text) > LARGEST:
        raise UsageError(f"{told} has more than {LARGEST:,} bytes, and should be a few lines")
    try:
        found = yaml.load(text.decode(), yaml.BaseLoader)  # texts, lists and dictionaries, nothing else
    except Exception as error:  # RecursionError, too
        raise UsageError(f"{told}: this is no YAML: {' '.join(str(error).split())}") from None
    if not (isinstance(found, dict) and all(isinstance(name, str) for name in found)):
        raise UsageError(f"{told}: a line should be NAME: VALUE, with the name of an option")
    return {name.replace("-", "_"): value for name, value in found.items()}


def resumed(run: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """The options of the run in a folder, or in that of a checkpoint file; those that this program has."""
    told, config = f"--resume {run}", config_of(run)
    if not os.path.isfile(config):
        where = "beside that file" if os.path.isfile(run) else "in that folder"
        raise UsageError(f"{told}: there is no run {where} (config.yaml is missing)")
    texts, _ = taken(read_file(config, f"{told}: config.yaml"), kinds, COMMON)
    return values_of(texts, kinds, config) | {"out": os.path.dirname(config) or "."}


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
