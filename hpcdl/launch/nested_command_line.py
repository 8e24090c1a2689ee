"""A command line of two programs: one that runs trainings, and the training.

    hpcdl search train-gossip --topology ring --space lr=log:0.001..0.5 --trials 64
                 ------------------------------                                 the training: a line of command_lines.py
                                              ----------------------------------     options of the search

An option belongs to the outer program if that program has it, else to the training. If both have it, the training's
option stands in quotes with its program: "train-gossip --method dpsgd"."""

import shlex
from typing import Any

from hpcdl.errors import UsageError
from hpcdl.formatting import dashed
from hpcdl.launch.help import refuse_empty


def divided(
    arguments: list[str], kinds: dict[str, Any], several: tuple[str, ...] = ()
) -> tuple[list[str], str, dict[str, list[str]]]:
    """Return the outer program's words, the line of the training ("": none), and the values of each of `several`.
    kinds: types of the outer program's options. several: options that may be repeated. Raises UsageError."""
    own: list[str] = []
    line: list[str] = []
    found: dict[str, list[str]] = {name: [] for name in several}
    known = {f"--{dashed(name)}": name for name in (*kinds, *several, "trust", "help")} | {"-h": "help"}
    at = 0
    while at < len(arguments):
        word, at = arguments[at], at + 1
        option, equals, value = word.partition("=")
        name = known.get(option)
        if name is None:
            line.append(word if not line and not word.startswith("-") else shlex.quote(word))
            continue
        if equals or name == "help" or kinds.get(name) is bool:
            value = value if equals else ""
        elif at < len(arguments):
            value, at = arguments[at], at + 1
            equals = "="
        else:
            raise UsageError(f"{option} needs a value")
        if name in found:
            refuse_empty(name, value, option)
            found[name].append(value)
        else:
            own.append(f"{option}{equals}{value}")
    return own, " ".join(line), found
