"""What benchmarks that compare whole runs share: their options, their table, and the file of their numbers."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcdl.errors import UsageError
from hpcdl.runs.export import written
from hpcdl.runs.folder import environment


def several(options: Any, *names: str) -> None:
    """Turn options like "1,4,16" into sorted lists; UsageError where one is no list of whole numbers above 0."""
    for name in names:
        words = getattr(options, name).split(",")
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise UsageError(f"--{name.replace('_', '-')}: numbers above 0 with commas between, not {','.join(words)}")
        setattr(options, name, sorted(map(int, words)))


def positive(options: Any, *names: str) -> None:
    """Raise UsageError unless these options are above 0."""
    for name in names:
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {getattr(options, name)}")


def report(title: str, options: Any, results: dict, rows: list[dict]) -> None:
    """Print what was measured, how it was started and the table of rows (cells by column); write the file of --json."""
    about = environment()
    print(f"{title}\n{about['launch']}; {about['mpi']}; {about['machine']}\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    if options.json:
        text = json.dumps({"options": asdict(options), "results": results}, indent=2)
        with written(Path(options.json)) as file:
            file.write(text.encode())


def spread(values: list[float], form: str) -> str:
    """Median (lowest to highest), or the one value."""
    middle, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
