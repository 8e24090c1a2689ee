"""What comes out of a search, from its journal alone: rows, the tables in its folder, the best and how to train it on.

    trials.csv    a row for each trial that has begun, in the order of their numbers
    best.yaml     the options of the best trial, of which `--config` makes the same training again

Both are written anew whenever they are asked for; what was killed in between has the journal.
"""

import contextlib
import csv
import io
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.files import atomic_write
from hpcdl.launch.command_lines import DECIDED, PLACED
from hpcdl.plugins import names_in
from hpcdl.runs.options import read_file
from hpcdl.search.search_log_reader import TrialRow, Trials, best, read, score_text
from hpcdl.search.space import Space

TABLE, BEST = "trials.csv", "best.yaml"
COLUMNS = ("trial", "status", "score", "spread", "rung", "amount", "seconds", "steps", "parent", "folder", "reason")
PROGRAM = "train-allreduce"  # of a line that names none
LONGER = 2  # times as many epochs for the best


def write_tables(folder: Path, trials: Trials | None = None) -> TrialRow | None:
    """Write trials.csv and, where a trial has a score, best.yaml into the folder of a search; returns the best row.

    trials: what the journal tells, where that is known. Raises UsageError where it cannot be read, or they be written.
    """
    trials = trials or read(folder)
    of = trials.rows()
    with blamed_on(f"{folder / TABLE} cannot be written"), atomic_write(folder / TABLE) as file:
        file.write(table(trials, of).encode())
    top = next(iter(best(of, 1)), None)
    if top is not None:
        with blamed_on(f"{folder / BEST} cannot be written"), atomic_write(folder / BEST) as file:
            file.write(best_file(folder, trials, top).encode())
    return top


def table(trials: Trials, of: list[TrialRow]) -> str:
    """trials.csv: what each trial was and has reached, then its values; those of a name that is ours with dashes."""
    names = list(dict.fromkeys([*(axis.name for axis in trials.axes()), *(name for row in of for name in row.values)]))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *(printable(f"--{name}" if name in COLUMNS else name, kept="") for name in names)])
    for row in of:
        about = {name: getattr(row, name, None) for name in COLUMNS} | {"reason": row.failed}
        values = [*about.values(), *(row.values.get(name) for name in names)]
        writer.writerow(["" if each is None else printable(each, kept="") for each in values])
    return file.getvalue()


def best_file(folder: Path, trials: Trials, row: TrialRow) -> str:
    """best.yaml: what it is in comments, then the options; of a search over a function its values alone."""
    command = training_command(folder, trials, row)
    score = f"{trials.objective} {score_text(trials, row.score, row.spread)}" + (
        f", mean of {trials.seeds} seeds" if trials.seeds > 1 else ""
    )
    told = {"search": folder, "method": trials.settings.get("method"), "trial": f"{row.trial}, in {row.folder}"}
    told |= {"score": score, "train it longer": command}
    header = "".join(f"# {name}: {printable(said, kept='')}\n" for name, said in told.items() if said)
    if not trials.settings.get("program"):
        return header + yaml.safe_dump(dict(row.values), sort_keys=False, allow_unicode=True)
    return header + yaml.safe_dump(options_of(trials, row.values), sort_keys=False, allow_unicode=True)


def options_of(trials: Trials, values: Mapping[str, Any]) -> dict[str, str]:
    """The options of a training with these values, as texts by their names: those of all trials, and the trial's."""
    found = common(line_of(trials))
    texts: dict[str, str] = {name: value if isinstance(value, str) else repr(value) for name, value in values.items()}
    described = trials.settings.get("space")
    with contextlib.suppress(UsageError):
        if isinstance(described, list) and all(isinstance(each, str) for each in described):
            space = Space.read(described)
            inside = {name: value for name, value in values.items() if name in space.names}
            texts = {name: text for name, text in texts.items() if name not in inside} | space.texts(inside)
    return found | {name.replace("-", "_"): text for name, text in texts.items()}


def line_of(trials: Trials) -> list[str]:
    """The words of the training's line: a program, and its options."""
    text = str(trials.settings.get("program") or "")
    placed = PLACED.fullmatch(text)
    try:
        words = shlex.split(placed[2] if placed else text)
    except ValueError:  # a quotation that is not closed
        words = []
    return words if words and not words[0].startswith("-") else [PROGRAM, *words]


def common(words: list[str]) -> dict[str, str]:
    """The options of a line, as texts by their names; of a file that it names those, too; without what each run has."""
    found: dict[str, str] = {}
    at = 1
    while at < len(words):
        option, equals, value = words[at].partition("=")
        at += 1
        if not option.startswith("--"):
            continue
        if not equals:
            follows = at < len(words) and not words[at].startswith("--")
            value, at = (words[at], at + 1) if follows else ("true", at)
        found[option[2:].replace("-", "_")] = value
    file = found.pop("config", None)
    if file is not None:
        with contextlib.suppress(UsageError):
            found = read_file(file, file) | found
    return {name: value for name, value in found.items() if name not in (*DECIDED, "progress", "trust")}


def training_command(folder: Path, trials: Trials, row: TrialRow) -> str | None:
    """How the best trial is trained anew, and for longer: the command line; None for a search over a function."""
    if not trials.settings.get("program"):
        return None
    ranks = trials.settings.get("ranks_per_trial")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else 1
    words = ["mpiexec", "-n", str(ranks), "hpcdl", line_of(trials)[0], "--config", str(folder / BEST)]
    options = options_of(trials, row.values)
    for name, known in (("steps", [options.get("steps")]), ("epochs", [options.get("epochs"), *epochs_of(row)])):
        much = next((number for each in known if (number := count(each))), None)
        if much:
            words += [f"--{name}", str(math.ceil(LONGER * much))]
            break
    words += [f"--{name}={text}" for name, text in options.items() if names_in(name, text)]  # who runs it sees the code
    return shlex.join([*words, "--out", f"{folder}-best"])


def epochs_of(row: TrialRow) -> list[Any]:
    """How many epochs a trial had, as far as it tells."""
    return [*(more.get("epochs") for piece in row.pieces[-1:] for more in piece.more.values()), row.amount]


def count(value: Any) -> float:
    """The positive number that an option's text, or a number, says; 0 where it says none."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return found if math.isfinite(found) and 0 < found < 1e15 else 0.0
