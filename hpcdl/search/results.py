"""Results of a search, from its journal alone: rows, the tables in its folder, the best trial and how to retrain it.

trials.csv    a row for each trial that has begun, in the order of their numbers
best.yaml     the options of the best trial; `--config` repeats its training with them"""

import contextlib
import csv
import io
import itertools
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.files import atomic_write
from hpcdl.launch.command_lines import DECIDED, PLACED
from hpcdl.launch.option_parser import read_file
from hpcdl.plugins import names_in
from hpcdl.search.search_log_reader import TrialRow, Trials, best, read, score_text
from hpcdl.search.space import Space

TABLE, BEST = "trials.csv", "best.yaml"
COLUMNS = ("trial", "status", "score", "spread", "rung", "amount", "seconds", "steps", "parent", "folder", "reason")
PROGRAM = "train-allreduce"  # program of a command line that names none
LONGER = 2  # factor for the epochs of the best trial


def write_tables(folder: Path, trials: Trials | None = None) -> TrialRow | None:
    """Write trials.csv and, if a trial has a score, best.yaml into a search's folder; return the best row or None.
    trials: contents of the journal, if already read. Raises UsageError if reading or writing fails."""
    trials = trials or read(folder)
    rows = trials.rows()
    with blamed_on(f"{folder / TABLE} cannot be written"), atomic_write(folder / TABLE) as file:
        file.write(table(trials, rows).encode())
    top = next(iter(best(rows, 1)), None)
    if top is not None:
        with blamed_on(f"{folder / BEST} cannot be written"), atomic_write(folder / BEST) as file:
            file.write(best_file(folder, trials, top).encode())
    return top


def table(trials: Trials, rows: list[TrialRow]) -> str:
    """Return trials.csv: status, score and values of each trial. A parameter named like a column gets dashes."""
    names = dict.fromkeys([*(axis.name for axis in trials.axes()), *(name for row in rows for name in row.values)])
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *(printable(f"--{name}" if name in COLUMNS else name, allowed="") for name in names)])
    for row in rows:
        fields = {name: getattr(row, name, None) for name in COLUMNS} | {"reason": row.failed}
        values = [*fields.values(), *(row.values.get(name) for name in names)]
        writer.writerow(["" if each is None else printable(each, allowed="") for each in values])
    return file.getvalue()


def best_file(folder: Path, trials: Trials, row: TrialRow) -> str:
    """Return best.yaml: a description in comments, then the options; for a search over a function, the values alone."""
    command = training_command(folder, trials, row)
    mean = f", mean of {trials.seeds} seeds" if trials.seeds > 1 else ""
    score = f"{trials.objective} {score_text(trials, row.score, row.spread)}{mean}"
    comments = {"search": folder, "method": trials.settings.get("method"), "trial": f"{row.trial}, in {row.folder}"}
    comments |= {"score": score, "train it longer": command}
    header = "".join(f"# {name}: {printable(text, allowed='')}\n" for name, text in comments.items() if text)
    options = options_of(trials, row.values) if trials.settings.get("program") else dict(row.values)
    return header + yaml.safe_dump(options, sort_keys=False, allow_unicode=True)


def options_of(trials: Trials, values: Mapping[str, Any]) -> dict[str, str]:
    """Return a training's options, as texts by name: the command line's options, replaced and joined by the values."""
    options = common(line_of(trials))
    texts: dict[str, str] = {name: value if isinstance(value, str) else repr(value) for name, value in values.items()}
    space_lines = trials.settings.get("space")
    with contextlib.suppress(UsageError):
        if isinstance(space_lines, list) and all(isinstance(each, str) for each in space_lines):
            space = Space.read(space_lines)
            inside = {name: value for name, value in values.items() if name in space.names}
            texts = {name: text for name, text in texts.items() if name not in inside} | space.texts(inside)
    return options | {name.replace("-", "_"): text for name, text in texts.items()}


def line_of(trials: Trials) -> list[str]:
    """Return the words of the training's command line: a program, and its options."""
    text = str(trials.settings.get("program") or "")
    placed = PLACED.fullmatch(text)
    try:
        words = shlex.split(placed[2] if placed else text)
    except ValueError:  # an unclosed quotation
        words = []
    return words if words and not words[0].startswith("-") else [PROGRAM, *words]


def common(words: list[str]) -> dict[str, str]:
    """Return the options of a command line and its --config, as texts by name, without DECIDED, progress and trust."""
    options: dict[str, str] = {}
    for word, following in itertools.pairwise([*words[1:], "--"]):
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            value = value if equals else "true" if following.startswith("--") else following
            options[option[2:].replace("-", "_")] = value
    file = options.pop("config", None)
    if file is not None:
        with contextlib.suppress(UsageError):
            options = read_file(file, file) | options
    return {name: value for name, value in options.items() if name not in (*DECIDED, "progress", "trust")}


def training_command(folder: Path, trials: Trials, row: TrialRow) -> str | None:
    """Return the command that retrains the best trial for longer; None for a search over a function."""
    if not trials.settings.get("program"):
        return None
    ranks = trials.settings.get("ranks_per_trial")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else 1
    words = ["mpiexec", "-n", str(ranks), "hpcdl", line_of(trials)[0], "--config", str(folder / BEST)]
    options = options_of(trials, row.values)
    ended = [more.get("epochs") for piece in row.pieces[-1:] for more in piece.more.values()]
    epochs = [options.get("epochs"), *ended, row.amount]
    for name, candidates in (("steps", [options.get("steps")]), ("epochs", epochs)):
        amount = next((number for each in candidates if (number := count(each))), None)
        if amount:
            words += [f"--{name}", str(math.ceil(LONGER * amount))]
            break
    words += [f"--{name}={text}" for name, text in options.items() if names_in(name, text)]  # the user sees the code
    return shlex.join([*words, "--out", f"{folder}-best"])


def count(value: Any) -> float:
    """Return an option's text or a number as a float; 0 unless it is a positive number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return number if math.isfinite(number) and 0 < number < 1e15 else 0.0
