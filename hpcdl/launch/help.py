"""What a program says on --help, and of an option or a choice that it does not have."""

import argparse
import dataclasses
import re
import shutil
import textwrap
from typing import Any, Literal, NoReturn, get_args, get_origin

from hpcdl.errors import UsageError, nearest
from hpcdl.formatting import dashed
from hpcdl.programs import about, own_options

GROUPS = ("data", "model", "optimization", "run")  # of the options that all programs have that train
READ = ("cluster", "config", "data", "from", "initial", "like", "machine", "matrix", "source", "space_file", "test")
FOLDERS = ("folder", "folders", "resume", "run", "runs", "trust")
WRITTEN = ("draw", "export", "json", "measure", "out", "picture", "pictures", "plot", "predict", "render")
PLACES = {*READ, *FOLDERS, *WRITTEN}  # options of any program that name a file or a folder
OTHERS_SAY = {  # options as other programs call them, or their settings
    "learning-rate": "lr",
    "lr-scheduler": "schedule",
    "scheduler": "schedule",
    "warmup": "schedule",
    "momentum": "optimizer",
    "batch": "batch-size",
    "dataset": "data",
    "layers": "model",
    "hidden": "model",
    "precision": "dtype",
    "gpu": "device",
    "cuda": "device",
    "iterations": "steps",
    "max-steps": "steps",
    "output": "out",
    "output-dir": "out",
    "grad-clip": "clip-norm",
    "clip-grad-norm": "clip-norm",
    "gradient-accumulation": "accumulate",
    "grad-accum": "accumulate",
    "early-stopping": "patience",
    "log-level": "progress",
    "quiet": "progress",
}
LEAST = 40  # columns of a terminal for which a text is wrapped


class Formatter(argparse.RawDescriptionHelpFormatter):
    """The description as it is; words with hyphens, as options and their values are, whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class OptionParser(argparse.ArgumentParser):
    """Reports a bad option like any other bad input: in one line, with the nearest that there is."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage and the message."""
        line = " ".join(message.split())
        if found := re.match(r"unrecognized arguments: (\S+)", line):
            line += suggested(found[1], self.names())
        elif found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", line):
            line += nearest(found[1], re.findall(r"[^\s',]+", found[2]))
        raise UsageError(line)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse does; UsageError for a file or folder that is given and empty."""
        found = super().parse_args(args, namespace)
        for name, text in vars(found).items():
            refuse_empty(name, text, f"--{dashed(name)}" if f"--{dashed(name)}" in self.names() else name.upper())
        return found

    def names(self) -> list[str]:
        """The options, those of subcommands too."""
        found = [*self._option_string_actions]
        for action in self._actions:
            if isinstance(action.choices, dict):
                found += [name for each in action.choices.values() for name in each.names()]
        return found


def refuse_empty(name: str, texts: Any, told: str) -> None:
    """Raise UsageError where an option of a file or a folder is given and empty, as by a variable without value.

    texts: its value, or several; told: as a message calls the option.
    """
    if name in PLACES and any(not each.strip() for each in ([texts] if isinstance(texts, str) else texts or ())):
        raise UsageError(f"{told} is given and empty: name a file or a folder, or leave it out")


def suggested(option: str, known: list[str]) -> str:
    """What a message on an unknown option adds: whose it is, else the nearest one, else nothing."""
    name = option.partition("=")[0].replace("_", "-")
    field = name.lstrip("-").replace("-", "_")
    whose = [program for program, options in own_options().items() if field in options]
    if whose and name not in known:
        return f" (an option of {' and '.join(whose)})"
    said = f"--{OTHERS_SAY.get(name.lstrip('-'))}"
    return nearest(said if said in known and name not in known else name, known)


def parser(
    options_class: type, kinds: dict[str, Any], defaults: dict[str, Any], program: str, text: str
) -> OptionParser:
    """A script's command line, which gives texts.

    kinds: the fields' types; defaults: where not the fields' own; text: the script's docstring.
    """
    fields = dataclasses.fields(options_class)
    trains = any(field.metadata["group"] for field in fields)
    placed = [field.name for field in fields if field.default is dataclasses.MISSING]
    places = [name.upper() + "..." * (get_origin(kinds[name]) is list) for name in placed]
    made = OptionParser(
        prog=f"hpcdl {program}",
        usage=" ".join(["hpcdl", program, *places, "[OPTIONS]"]),
        description=described(text, width()),
        formatter_class=Formatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {"": made.add_argument_group(f"options of {program}" if trains else "options")}
    groups |= {name: made.add_argument_group(name) for name in GROUPS if trains}
    last = groups["run" if trains else ""]
    for field in fields:
        name, kind = field.name, kinds[field.name]
        default, help = defaults.get(name, field.default), field.metadata["help"]
        if not (default in ("", dataclasses.MISSING) or kind is bool):
            help += f" (default: {default})"
        how: dict[str, Any] = {"help": help.replace("%", "%%")}
        if kind is bool:
            how |= {"action": "store_const", "const": "true"}
        elif get_origin(kind) is Literal:
            how["metavar"] = "{" + ",".join(map(str, get_args(kind))) + "}"
        if get_origin(kind) is list:
            how["nargs"] = "+" if field.default_factory is dataclasses.MISSING else "*"
        if name in getattr(options_class, "unused", ()):  # what means nothing here is refused, not explained
            how["help"] = argparse.SUPPRESS
        if "bare" in field.metadata:
            how |= {"nargs": "?", "const": field.metadata["bare"]}
        option = name if field.default is dataclasses.MISSING else "--" + dashed(name)
        groups[field.metadata["group"]].add_argument(option, **how)
    files = "YAML file with options, as a run writes it into its folder, also one of another strategy"
    last.add_argument("--config", action="append", metavar="FILE", help=files if trains else "YAML file with options")
    trusted = "a file or a folder whose names of code may be called, or such a name; may be given several times"
    last.add_argument("--trust", action="append", metavar="FILE", help=trusted)
    last.add_argument("-h", "--help", action="help", help="show this")
    return made


def described(docstring: str, columns: int) -> str:
    """A docstring for people: its sentence, each command on a line of its own, and the rest, tables as they are."""
    said = about(docstring)
    parts = [textwrap.fill(f"{said.sentence}." if said.sentence else "", columns)]
    parts.append("\n".join(f"    {command}" for command in said.commands))
    for part in said.rest.split("\n\n"):
        plain = not any(line.startswith(" ") for line in part.splitlines())
        parts.append(textwrap.fill(part, columns, break_on_hyphens=False) if plain else part)
    return "\n\n".join(filter(None, parts))


def width() -> int:
    """Columns of the terminal, as argparse takes them."""
    return max(LEAST, shutil.get_terminal_size().columns - 2)
