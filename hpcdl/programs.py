"""What programs there are, and what each says of itself in the first lines of its file.

A script opens with a sentence, the command that runs it, and what else there is to say:

    '''Train by gossip on a sparse graph: mpiexec -n 4 python scripts/train_gossip.py --topology ring

    More of it ...'''

Its `main` knows its options (hpcdl/launch/start.py). A strategy needs no script: its file, which opens in the same way,
is the program that its `STRATEGY` names.
"""

import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

COMMAND = re.compile(r":\s+((?:mpiexec|mpirun|srun|python|hpcdl) [^\n]*)")
SENTENCE = re.compile(r"(.*?)(?:\.(?=\s|$)|$)", re.DOTALL)
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
STRATEGY = re.compile(r'^STRATEGY = Strategy\(\s*"([\w-]+)"', re.MULTILINE)
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
    """The files of programs by their names, which have dashes: the scripts, and strategies without a script."""
    scripts = {path.stem.replace("_", "-"): path for path in sorted(folder().glob("[a-z]*.py"))}
    strategies = {
        found[1]: path
        for path in sorted(folder_of("hpcdl.strategies").glob("*.py"))
        if (found := STRATEGY.search(path.read_text()))
    }
    return scripts | {name: path for name, path in strategies.items() if name not in scripts}


@functools.cache
def programs() -> dict[str, About]:
    """All programs, by name, as the first lines of their files say."""
    return {name: about(docstring(path)) for name, path in files().items()}


def docstring(path: Path) -> str:
    """That of a script, which opens with it; its lines are not indented, and it holds no escapes."""
    opening = DOCSTRING.match(path.read_text())
    return opening[1].strip() if opening else ""


def script(name: str) -> ModuleType | SimpleNamespace:
    """The module of a program, or what stands for it, with its `main`; its import starts nothing."""
    path = files()[name]
    if path.parent == folder():
        return importlib.import_module(f"hpcdl.scripts.{path.stem}")
    strategy = importlib.import_module(f"hpcdl.strategies.{path.stem}").STRATEGY
    start = importlib.import_module("hpcdl.launch.start")
    return SimpleNamespace(main=start.TrainingProgram(strategy, docstring(path)))


@functools.cache
def own_options() -> dict[str, dict[str, type]]:
    """For each program that trains, the types of the defaults of the options that it adds to the common ones."""
    return {name: script(name).main.own_options for name in files() if name.startswith(TRAINS)}


def of_strategy(strategy: str) -> str | None:
    """The program that trains by a strategy, as a run calls it: train-allreduce for all_reduce; None: there is none."""

    def letters(name: str) -> str:
        return "".join(filter(str.isalnum, name))

    return next((name for name in files() if letters(name) == letters(TRAINS + strategy)), None)


def first_process() -> bool:
    """True for the process that prints for all that a launcher has started; before MPI is, its variables tell."""
    ranks = [os.environ.get(key) for key in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")]
    return next((rank for rank in ranks if rank is not None), "0") == "0"


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """What the body prints is for a reader that may have seen enough: as `head` has, it then closes the pipe."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
