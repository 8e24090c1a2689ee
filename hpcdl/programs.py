"""The programs of hpcdl, and the help in the first lines of their files. A script opens with:

    '''Train by gossip on a sparse graph: mpiexec -n 4 hpcdl train-gossip --topology ring

    More of it ...'''

A strategy needs no script: its file, which opens in the same way, is the program that its `STRATEGY` names."""

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
    """A program's docstring: its first sentence, the example commands that run it, and the rest."""

    sentence: str
    commands: list[str]
    rest: str


def about(docstring: str) -> About:
    """Split a program's docstring; `commands` is empty if the first paragraph has no command."""
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


def folder_of(package: str) -> Path:
    """Return the folder of a package, in a clone or installed."""
    return Path(find_spec(package).origin).parent  # type: ignore[union-attr, arg-type]


@functools.cache
def files() -> dict[str, Path]:
    """Return the files of programs by name (with dashes): the scripts, and the strategies without a script."""
    scripts = {path.stem.replace("_", "-"): path for path in sorted(folder_of("hpcdl.scripts").glob("[a-z]*.py"))}
    strategies = {
        found[1]: path
        for path in sorted(folder_of("hpcdl.strategies").glob("*.py"))
        if (found := STRATEGY.search(path.read_text()))
    }
    return scripts | {name: path for name, path in strategies.items() if name not in scripts}


@functools.cache
def programs() -> dict[str, About]:
    """Return the docstrings of all programs, by name."""
    return {name: about(docstring(path)) for name, path in files().items()}


def docstring(path: Path) -> str:
    """Return the docstring at the beginning of a file, else "". It must have no indentation and no escapes."""
    opening = DOCSTRING.match(path.read_text())
    return opening[1].strip() if opening else ""


def script(name: str) -> ModuleType | SimpleNamespace:
    """Return the module of a script, or a namespace for a strategy without a script; `main` in it runs the program."""
    path = files()[name]
    if path.parent == folder_of("hpcdl.scripts"):
        return importlib.import_module(f"hpcdl.scripts.{path.stem}")
    strategy = importlib.import_module(f"hpcdl.strategies.{path.stem}").STRATEGY
    start = importlib.import_module("hpcdl.launch.start")
    return SimpleNamespace(main=start.TrainingProgram(strategy, docstring(path)))


@functools.cache
def own_options() -> dict[str, dict[str, type]]:
    """Return, by name of a program that trains, the type of each option that it adds to the common ones."""
    return {name: script(name).main.own_options for name in files() if name.startswith(TRAINS)}


def of_strategy(strategy: str) -> str | None:
    """Return the program that trains by a strategy, as train-allreduce for all_reduce; None: there is no program."""

    def letters(name: str) -> str:
        return "".join(filter(str.isalnum, name))

    return next((name for name in files() if letters(name) == letters(TRAINS + strategy)), None)


def writes_folder(program: str) -> bool:
    """True if a program can be resumed from its folder: those that train (not k-means), search, compare."""
    return program in ("search", "compare") or (program.startswith(TRAINS) and program != "train-kmeans")


def first_process() -> bool:
    """True on rank 0, which prints for all. Read from a launcher's variables, before MPI starts; without any, True."""
    ranks = [os.environ.get(key) for key in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")]
    return next((rank for rank in ranks if rank is not None), "0") == "0"


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Context for output to a reader, such as `head`, that may close the pipe early."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
