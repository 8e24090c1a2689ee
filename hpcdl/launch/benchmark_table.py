"""Parts of all benchmarks: how they start and time, a training of theirs, their table, and the file of their numbers.

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

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint import export
from hpcdl.checkpoint.export import check_output_file, output_file
from hpcdl.comm import Communicator
from hpcdl.data import Data
from hpcdl.errors import UsageError
from hpcdl.launch.launch_consistency import reading
from hpcdl.launch.program import ended
from hpcdl.models import for_data
from hpcdl.runs import Options, Run
from hpcdl.runs.folder import environment, launch_line

SCHEMA_VERSION = 1
UNITS = ("KiB", "MiB", "GiB")


@contextlib.contextmanager
def benchmark(
    name: str,
    options_class: type,
    description: str,
    arguments: list[str] | None,
    prepare: Callable[[Any, int], Any] | None = None,
    one_rank: str = "",
) -> Iterator[tuple[MPI.Intracomm, Any, Any]]:
    """Start a benchmark: yields (all ranks, its options, what `prepare` makes of them) before anything is measured.

    prepare(options, ranks): raises UsageError where these do not go together. one_rank: the refusal of several ranks.
    """
    world = MPI.COMM_WORLD
    with ended(name, world.rank):
        with reading(world) as parse:
            options = parse(options_class, name, description, arguments)
            if one_rank and world.size > 1:
                raise UsageError(one_rank)
            check_files(options, world.rank)
            prepared = None if prepare is None else prepare(options, world.size)
        yield world, options, prepared


def trained(
    comm: Communicator,
    train: Callable,
    settings: Options,
    data: Data,
    made: Callable[[Communicator, Options], Run] = Run,
    model: Any = None,
    **how: Any,
) -> Run:
    """Train on the ranks of `comm`, which is then freed; returns the run. made: makes the run; how: of the strategy."""
    model = model or for_data(settings.model, data, settings.dtype)
    with made(comm, settings) as run:
        train(comm, model, data, run.make_optimizer(model, data), run, **how)
    comm.free()
    return run


class Contender(NamedTuple):
    """A call that is timed; prepare: what comes before it each time, and is not timed."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def race(
    world: MPI.Intracomm, contenders: dict[str, Contender], seconds: float, seed: int, calls: int = 1
) -> dict[str, list[float]]:
    """Microseconds of a call in each turn by contender, the slowest rank's; on all ranks. All take turns.

    seconds: that all turns of a contender take, but for 5 turns at least; calls: in a row, of each turn. The order of
    each turn is drawn by lot: each finds the caches as another one left them.
    """

    def turn(each: Contender) -> float:
        each.prepare()
        world.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            each.call()
        return float(world.allreduce(time.perf_counter() - start, MPI.MAX) / calls)

    for each in contenders.values():  # compile, and touch the memory
        turn(each)
    slowest = max(map(turn, contenders.values())) * calls
    turns = int(min(1000, max(5, seconds / max(1e-7, slowest))))
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    order = np.random.default_rng(seed)  # the same on all ranks
    for _ in range(turns):
        for name in order.permutation(list(contenders)):
            taken[name].append(1e6 * turn(contenders[name]))
    return taken


def bytes_of(text: str) -> int:
    """Read 64KiB, 4MiB, 1GiB or a number of bytes."""
    for power, unit in enumerate(UNITS, 1):
        if text.endswith(unit) and text.removesuffix(unit).isdecimal():
            return int(text.removesuffix(unit)) << (10 * power)
    if not text.isdecimal():
        raise UsageError(f"--sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not {text!r}")
    return int(text)


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
    print_table(rows)
    write_json(benchmark, options, records)


def print_table(rows: list[dict[str, str]], first: bool = True) -> None:
    """Print rows, cells by column, as a table of Markdown; first: with its head."""
    if first:
        print("| " + " | ".join(rows[0]) + " |")
        print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(row.values()) + " |", flush=True)


def save(picture: Any, path: str) -> None:
    """Write a picture of --plot."""
    with output_file(Path(path)) as file:
        picture.savefig(file, format=Path(path).suffix[1:], dpi=120)


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


def quartile_text(values: Iterable[float]) -> str:
    """1.00 (0.90 to 1.10): the median, and the first and the third quartile."""
    middle, low, high = np.percentile(list(values), (50, 25, 75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def spread(values: list[float], form: str) -> str:
    """Median (lowest to highest), or the one value."""
    middle, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
