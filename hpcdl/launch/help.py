"""The text of --help, and the hints for an unknown option or choice."""

import argparse
import dataclasses
import re
import shutil
import textwrap
from typing import Any, Literal, NoReturn, get_args, get_origin

from hpcdl.errors import UsageError, nearest
from hpcdl.formatting import dashed
from hpcdl.programs import about, own_options

GROUPS = ("data", "model", "optimization", "run")  # of the options common to all programs that train
READ = ("cluster", "config", "data", "from", "initial", "like", "machine", "matrix", "source", "space_file", "test")
FOLDERS = ("folder", "folders", "resume", "run", "runs", "trust")
WRITTEN = ("draw", "export", "json", "measure", "out", "picture", "pictures", "plot", "predict", "render")
MOST_USED = {  # common options that --help shows; --help-all shows all
    *("data", "model", "optimizer", "lr", "batch_size", "epochs", "device", "out", "resume", "progress")
}
PLACES = {*READ, *FOLDERS, *WRITTEN}  # options of any program that name a file or a folder
SYNONYMS = {  # of options: other programs' names for them, or names of their settings
    "lr": "learning-rate",
    "schedule": "lr-scheduler scheduler warmup",
    "optimizer": "momentum",
    "batch-size": "batch",
    "data": "dataset",
    "model": "layers hidden",
    "dtype": "precision",
    "device": "gpu cuda",
    "steps": "iterations max-steps",
    "out": "output output-dir",
    "clip-norm": "grad-clip clip-grad-norm",
    "accumulate": "gradient-accumulation grad-accum",
    "patience": "early-stopping",
    "progress": "log-level quiet",
}
OTHERS_SAY = {other: option for option, others in SYNONYMS.items() for other in others.split()}
LEAST = 40  # fewest columns for wrapped text
HELP, HELP_ALL = ("-h", "--help"), "--help-all"


class Help(argparse.Action):
    """Prints the help and exits: --help without the options that few need, --help-all with all."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        common = [each for group in parser._action_groups if group.title in GROUPS for each in group._group_actions]
        rest = [each for each in common if each.dest not in (*MOST_USED, "help") and each.help != argparse.SUPPRESS]
        if rest and option_string != HELP_ALL:
            for each in rest:
                each.help = argparse.SUPPRESS
            parser.epilog = f"{HELP_ALL} shows {len(rest)} more options, of data, model, optimization and run."
        parser.print_help()
        parser.exit()


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description as it is, and words with hyphens, such as options and their values, whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class OptionParser(argparse.ArgumentParser):
    """A parser that raises UsageError for a bad option: one line, as for other bad input, with the nearest option."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        if found := re.match(r"unrecognized arguments: (\S+)", line):
            line += suggested(found[1], self.names())
        elif found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", line):
            line += nearest(found[1], re.findall(r"[^\s',]+", found[2]))
        raise UsageError(line)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse as argparse does. Raises UsageError also for an empty name of a file or folder."""
        found = super().parse_args(args, namespace)
        for name, text in vars(found).items():
            refuse_empty(name, text, f"--{dashed(name)}" if f"--{dashed(name)}" in self.names() else name.upper())
        return found

    def names(self) -> list[str]:
        """Return the names of all options, as --out; those of subcommands, too."""
        found = [*self._option_string_actions]
        for action in self._actions:
            if isinstance(action.choices, dict):
                found += [name for each in action.choices.values() for name in each.names()]
        return found


def refuse_empty(name: str, texts: Any, told: str) -> None:
    """Raise UsageError if `name` is an option of files or folders with an empty text, as of an unset shell variable."""
    if name in PLACES and any(not each.strip() for each in ([texts] if isinstance(texts, str) else texts or ())):
        raise UsageError(f"{told} is empty: name a file or a folder, or leave the option out")


def suggested(option: str, known: list[str]) -> str:
    """Return a hint for an unknown option: the programs that have it, else the nearest of `known`, else ""."""
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
    """Return the parser of a script's command line; the values that it returns are texts. kinds: types of the fields of
    `options_class`. defaults: values that replace the fields' defaults. text: the script's docstring."""
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
        if name in getattr(options_class, "unused", ()):  # options without a meaning here are refused, not listed
            how["help"] = argparse.SUPPRESS
        if "bare" in field.metadata:
            how |= {"nargs": "?", "const": field.metadata["bare"]}
        option = name if field.default is dataclasses.MISSING else "--" + dashed(name)
        groups[field.metadata["group"]].add_argument(option, **how)
    files = "YAML file with options, as a run writes it into its folder, also one of another strategy"
    last.add_argument("--config", action="append", metavar="FILE", help=files if trains else "YAML file with options")
    trusted = "call code that files name: its name, or a file or folder that may name any; may be given several times"
    last.add_argument("--trust", action="append", metavar="FILE", help=trusted)
    shows = "show the options that most need, or all" if trains else "show this help"
    last.add_argument(*HELP, *[HELP_ALL] * trains, action=Help, nargs=0, dest="help", help=shows)
    if not trains:  # --help shows all already
        last.add_argument(HELP_ALL, action=Help, nargs=0, dest="help", help=argparse.SUPPRESS)
    return made


def described(docstring: str, columns: int) -> str:
    """Return a docstring for --help: first sentence, a line for each command, and the rest, with tables as they are."""
    said = about(docstring)
    parts = [textwrap.fill(f"{said.sentence}." if said.sentence else "", columns)]
    parts.append("\n".join(f"    {command}" for command in said.commands))
    for part in said.rest.split("\n\n"):
        plain = not any(line.startswith(" ") for line in part.splitlines())
        parts.append(textwrap.fill(part, columns, break_on_hyphens=False) if plain else part)
    return "\n\n".join(filter(None, parts))


def width() -> int:
    """Return the number of columns for help: those of the terminal less 2, as in argparse, but at least LEAST."""
    return max(LEAST, shutil.get_terminal_size().columns - 2)
