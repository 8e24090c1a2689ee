"""What benchmarks share: their options, their table, and the file of their numbers.

The file of --json, of every benchmark and check, is one object:

    schema_version   1
    benchmark        the program's name
    command          how it was started, on how many ranks
    environment      git commit, versions, MPI library, machine
    options          all of them
    rows             records, one for each thing that was measured

A row is flat: a key with its unit (`seconds`, `moved_bytes`, `microseconds_median`), and a number, a text, true, false
or null; or a list of those with one for each rank or turn, whose key says so (`sent_bytes_per_rank`). So
`pandas.DataFrame(json.load(file)["rows"])` is a table.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.checkpoint import export
from hpcdl.checkpoint.export import check_output_file
from hpcdl.errors import UsageError
from hpcdl.runs.folder import environment, launch_line

SCHEMA_VERSION = 1


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


def check_files(options: Any, rank: int) -> None:
    """Raise UsageError where the file of --json, or the picture of --plot, cannot be written, before the measuring.

    On rank 0 alone, which writes them.
    """
    if rank == 0:
        check_output_file("--json", options.json)
        if getattr(options, "plot", ""):
            check_picture("--plot", options.plot)


def check_picture(option: str, path: str) -> None:
    """Raise UsageError where such a picture cannot be drawn, or not be written."""
    kinds = figure(option).canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in kinds:
        raise UsageError(f"{option} {path}: the name should end in .png, .svg or .pdf")
    check_output_file(option, path)


def figure(option: str, **how: Any) -> Any:
    """An empty picture of matplotlib's, which needs no screen; UsageError where that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"{option} needs matplotlib: pip install 'hpcdl[report]'") from None
    return Figure(**how)


def report(title: str, benchmark: str, options: Any, rows: list[dict], records: list[dict]) -> None:
    """Print what was measured, how it was started and the table of rows (cells by column); write the file of --json.

    records: the rows of that file.
    """
    about = environment()
    print(f"{title}\n{launch_line()}; {about['mpi']}; {about['machine']}\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    write_json(benchmark, options, records)


def write_json(
    benchmark: str, options: Any, rows: Iterable[dict], versions: dict[str, str] | None = None, **more: Any
) -> None:
    """Write the file of --json, if one was asked for.

    versions: beside those that a run depends on; more: what a program says of all rows.
    """
    if not options.json:
        return
    about = {name: text for name, text in environment().items() if name != "launch"} | (versions or {})
    result = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "command": launch_line(),
        "environment": about,
        "options": asdict(options),
        **more,
        "rows": list(rows),
    }
    export.write_json(plain(result), Path(options.json))


def plain(value: Any) -> Any:
    """The value in types that JSON has: what is no finite number is null."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def quartiles(name: str, values: list[float]) -> dict:
    """The cells of a row for what was measured in turns: its middle, its quartiles, and each turn."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    cells = {f"{name}_median": middle, f"{name}_first_quartile": low, f"{name}_third_quartile": high}
    return cells | {f"{name}_per_turn": list(values)}


def spread(values: list[float], form: str) -> str:
    """Median (lowest to highest), or the one value."""
    middle, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
