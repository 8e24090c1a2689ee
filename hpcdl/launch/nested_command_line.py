"""A command line of two programs: that of one which runs trainings, and that of what it runs.

    hpcdl search train-gossip --topology ring --space lr=log:0.001..0.5 --trials 64
                 ------------------------------                                 the training: a line of command_lines.py
                                              ----------------------------------     options of the search

An option belongs to who runs the trainings if that has one of its name, else to the training. Where both have it, the
training's goes with its program, in quotes: "train-gossip --method dpsgd".
"""

import shlex
from typing import Any, NamedTuple

from hpcdl.errors import UsageError
from hpcdl.formatting import dashed
from hpcdl.launch.help import refuse_empty


class Words(NamedTuple):
    """own: for the parser of who runs trainings; line: the training, "" where there is none; several: the values of
    options that may be given several times, by name."""

    own: list[str]
    line: str
    several: dict[str, list[str]]


def divided(arguments: list[str], kinds: dict[str, Any], several: tuple[str, ...] = ()) -> Words:
    """Divide the words of a command line. kinds: the types of one's own options; several: what may be given again.

    Raises UsageError for one's own option without its value.
    """
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
    return Words(own, " ".join(line), found)
