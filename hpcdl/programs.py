"""What programs there are, and what each says of itself: read from its file, not imported, for that would start MPI.

A script opens with a sentence, the command that runs it, and what else there is to say:

    '''Train by gossip on a sparse graph: mpiexec -n 4 python scripts/train_gossip.py --topology ring

    More of it ...'''

Its options are the fields `name: type = option(default, "help")` of its dataclasses and of those that they derive from,
also where they stand in an hpcdl/ROOM/options.py that it imports.
"""

import ast
import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

COMMAND = re.compile(r":\s+((?:mpiexec|mpirun|srun|python|hpcdl) [^\n]*)")
SENTENCE = re.compile(r"(.*?)(?:\.(?=\s|$)|$)", re.DOTALL)
TRAINS = "train-"  # begins the name of a program that trains


class About(NamedTuple):
    """A program's docstring: its first sentence, the commands that run it as examples, and the rest."""

    sentence: str
    commands: list[str]
    rest: str


def about(docstring: str) -> About:
    """Take a docstring apart; where it opens with no command, there are none."""
    first, _, rest = docstring.partition("\n\n")
    found = COMMAND.search(first)
    if found is not None:
        more, commands = first[found.end() :].strip(), found[1].split("; ")
        sentence = first[: found.start()]
    else:
        begun = SENTENCE.match(first)
        sentence, commands = begun[1] if begun else first, []
        more = first[len(sentence) + 1 :].strip()
    return About(" ".join(sentence.split()), commands, f"{more}\n\n{rest}".strip("\n"))


def folder() -> Path:
    """Where the scripts lie, in a clone or as installed."""
    return folder_of("hpcdl.scripts")


def folder_of(package: str) -> Path:
    """Where a package lies."""
    return Path(find_spec(package).origin).parent  # type: ignore[union-attr, arg-type]


@functools.cache
def files() -> dict[str, Path]:
    """The scripts by their names, which have dashes; not read yet, which takes a fifth of a second."""
    return {path.stem.replace("_", "-"): path for path in sorted(folder().glob("[a-z]*.py"))}


@functools.cache
def parsed() -> dict[str, ast.Module]:
    """What the scripts say, by their names."""
    return {name: ast.parse(path.read_text()) for name, path in files().items()}


@functools.cache
def programs() -> dict[str, About]:
    """All programs, by name."""
    return {name: about(ast.get_docstring(module) or "") for name, module in parsed().items()}


@functools.cache
def own_options() -> dict[str, dict[str, type]]:
    """For each program that trains, the types of the defaults of the options that it adds to the common ones."""
    modules = {name: module for name, module in parsed().items() if name.startswith(TRAINS)}
    classes = {
        name: [node for each in (*shared(module), module) for node in each.body if isinstance(node, ast.ClassDef)]
        for name, module in modules.items()
    }
    known = {node.name: node for nodes in classes.values() for node in nodes}

    def fields(node: ast.ClassDef) -> dict[str, type]:
        found: dict[str, type] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in known:
                found |= fields(known[base.id])
        for line in node.body:
            match line:
                case ast.AnnAssign(
                    target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="option"), args=[first, *_])
                ):
                    found[name] = type_of(first)
        return found

    return {
        name: {option: kind for node in nodes for option, kind in fields(node).items()}
        for name, nodes in classes.items()
    }


def shared(script: ast.Module) -> list[ast.Module]:
    """The modules from which a script takes options that several programs have, beside those that all have."""
    names = [node.module or "" for node in script.body if isinstance(node, ast.ImportFrom)]
    places = [name.split(".")[1:] for name in names if re.fullmatch(r"hpcdl\.(?!runs\.)\w+\.options", name)]
    return [ast.parse(folder_of("hpcdl").joinpath(*place).with_suffix(".py").read_text()) for place in places]


def type_of(default: ast.expr) -> type:
    """The type of a default: of a literal; object for what is none."""
    try:
        return type(ast.literal_eval(default))
    except ValueError:
        return object


def of_strategy(strategy: str) -> str | None:
    """The program that trains by a strategy, as a run calls it: train-allreduce for all_reduce; None: there is none."""

    def letters(name: str) -> str:
        return "".join(filter(str.isalnum, name))

    return next((name for name in files() if letters(name) == letters(TRAINS + strategy)), None)
