"""Parts that all benchmarks share: start, timing, training, table. They write the file of --json, which is one object:

schema_version   1
benchmark        the program's name
command          how it was started, on how many ranks
environment      git commit, versions, MPI library, machine
options          all options of the benchmark
rows             flat records, for pandas.DataFrame: docs/benchmarks.md"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcdl import runs
from hpcdl.checkpoint import export
from hpcdl.checkpoint.export import check_output_file, output_file
from hpcdl.errors import UsageError, unknown
from hpcdl.files import json_value
from hpcdl.formatting import dashed
from hpcdl.launch.start import Program
from hpcdl.models import for_data

if TYPE_CHECKING:
    from mpi4py import MPI  # its import would start MPI

    from hpcdl.comm import Communicator
    from hpcdl.data import Data

SCHEMA_VERSION = 1
UNITS = ("KiB", "MiB", "GiB")


def benchmark(
    name: str,
    options_class: type,
    description: str,
    measure: Callable[[Any, Any, Any], tuple[str, list[dict], list[dict]] | None],
    prepare: Callable[[Any, int], Any] = lambda options, ranks: None,
    one_rank: bool = False,
    stoppable: bool = False,
) -> Program:
    """Return the program of a benchmark. measure(world, options, prepared): called on all ranks; rank 0's result goes
    to `report` unless it is None. prepare(options, ranks): called first, returns `prepared`; raises UsageError if
    options do not fit together. one_rank: True if several ranks are an error. stoppable: see `Program`."""

    def body(world: "MPI.Intracomm", arguments: list[str]) -> None:
        from hpcdl.launch.launch_consistency import reading

        with reading(world) as parse:
            options = parse(options_class, name, description, arguments)
            if one_rank and world.size > 1:
                raise UsageError(f"{name} runs on 1 rank, not on {world.size}: start it without mpiexec")
            check_files(options, world.rank)
            prepared = prepare(options, world.size)
        found = measure(world, options, prepared)
        if world.rank == 0 and found is not None:
            report(name, options, *found)

    return Program(name, options_class, description, body, stoppable)


def training_options(options: Any, **more: Any) -> "runs.Options":
    """Return the options of a training: the benchmark's options that a training has, and `more`."""
    there = {field.name for field in dataclasses.fields(options)}
    same = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(runs.Options) if field.name in there
    }
    return runs.Options(**{"progress": "none"} | same | more)


def trained(
    comm: "Communicator",
    train: Callable,
    settings: "runs.Options",
    data: "Data",
    made: Callable[["Communicator", "runs.Options"], "runs.Run"] | None = None,
    model: Any = None,
    **how: Any,
) -> "runs.Run":
    """Train on the ranks of `comm`, then free it; return the run. made: makes the run. how: arguments for `train`."""
    model = model or for_data(settings.model, data, settings.dtype)
    with (made or runs.Run)(comm, settings) as run:
        train(comm, model, data, run.make_optimizer(model, data), run, **how)
    comm.free()
    return run


def in_turns(repeats: int, ways: dict[str, Callable[[int], Any]]) -> dict[str, list]:
    """Return, by name of each way, its results way(turn). The ways alternate: the machine is the same for all."""
    found: dict[str, list] = {name: [] for name in ways}
    for turn in range(repeats):
        for name, way in ways.items():
            found[name].append(way(turn))
    return found


def find_torch(option: str = "") -> Any:
    """Return PyTorch. Raises UsageError, whose message begins with `option`, if it is not installed."""
    try:
        import torch
    except ImportError:
        raise UsageError(f"{option}PyTorch is not installed; pip install 'hpcdl[torch]'") from None
    return torch


class Contender(NamedTuple):
    """A call to be timed. prepare: called before each timing, not timed itself."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def race(
    world: "MPI.Intracomm", contenders: dict[str, Contender], seconds: float, seed: int, calls: int = 1
) -> dict[str, list[float]]:
    """Return by contender the microseconds per call of the slowest rank in each turn; equal on all ranks. seconds: time
    for all turns of one contender, of which there are 5 at least. calls: calls in a row per turn. Contenders take turns
    in random order, so that each finds the caches as another one left them."""

    from mpi4py import MPI

    def turn(each: Contender) -> float:
        each.prepare()
        world.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            each.call()
        return float(world.allreduce(time.perf_counter() - start, MPI.MAX) / calls)

    for each in contenders.values():  # compiles, and touches the memory
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
    """Parse a size as 64KiB, 4MiB, 1GiB or a number of bytes. Raises UsageError."""
    for power, unit in enumerate(UNITS, 1):
        if text.endswith(unit) and text.removesuffix(unit).isdecimal():
            return int(text.removesuffix(unit)) << (10 * power)
    if not text.isdecimal():
        raise UsageError(f"--sizes: write 64KiB, 4MiB, 1GiB or a number of bytes, not {text!r}")
    return int(text)


def whole_numbers(name: str, text: str) -> list[int]:
    """Parse the value of an option like "1,4,16". Raises UsageError unless all are whole numbers above 0."""
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise UsageError(f"--{dashed(name)}: whole numbers above 0 with commas between, not {text!r}")
    return [int(word) for word in text.split(",")]


def several(options: Any, *names: str) -> None:
    """Replace options `names`, like "1,4,16", by sorted lists. UsageError unless all are whole numbers above 0."""
    for name in names:
        setattr(options, name, sorted(whole_numbers(name, getattr(options, name))))


def chosen(kind: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names in a text with commas between. Raises UsageError for an unknown name of this `kind`."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)
    return names


def check_files(options: Any, rank: int) -> None:
    """Raise UsageError, on rank 0, if the file of --json or --plot cannot be written; called before measuring."""
    if rank == 0:
        check_output_file("--json", options.json)
        if getattr(options, "plot", ""):
            check_picture("--plot", options.plot)


def check_picture(option: str, path: str) -> None:
    """Raise UsageError if `path`, the value of `option`, has no ending of a picture, or cannot be written."""
    kinds = figure(option).canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in kinds:
        raise UsageError(f"{option} {path}: the name should end in .png, .svg or .pdf")
    check_output_file(option, path)


def figure(option: str, **how: Any) -> Any:
    """Return an empty figure of matplotlib, which needs no screen. Raises UsageError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"{option} needs matplotlib: pip install 'hpcdl[report]'") from None
    return Figure(**how)


def subplot(**labels: str) -> Any:
    """Return the axes of a new picture of --plot. labels: as for Axes.set of matplotlib, like xlabel."""
    axes = figure("--plot", figsize=(7, 4.2), layout="constrained").subplots()
    axes.set(**labels)
    return axes


def report(benchmark: str, options: Any, title: str, rows: list[dict], records: list[dict]) -> None:
    """Print the title, the launch, and `rows` (cells by column) as a table; write `records` into the file of --json."""
    from hpcdl.runs.folder import environment, launch_line

    about = environment()
    print(f"{title}\n{launch_line()}; {about['mpi']}; {about['machine']}\n")
    print_table(rows)
    write_json(benchmark, options, records)


def print_table(rows: list[dict[str, str]], first: bool = True) -> None:
    """Print rows (cells by column) as a Markdown table. first: True prints the table's head before the rows."""
    if first:
        print("| " + " | ".join(rows[0]) + " |")
        print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(row.values()) + " |", flush=True)


def save(axes: Any, path: str) -> None:
    """Write the picture that has these axes into `path`, the file of --plot."""
    with output_file(Path(path)) as file:
        axes.figure.savefig(file, format=Path(path).suffix[1:], dpi=120)


def write_json(
    benchmark: str, options: Any, rows: Iterable[dict], versions: dict[str, str] | None = None, **more: Any
) -> None:
    """Write the file of --json, if requested. versions: for the entry `environment`. more: more entries of the file."""
    from hpcdl.runs.folder import environment, launch_line

    if not options.json:
        return
    about = {name: text for name, text in environment().items() if name != "launch"} | (versions or {})
    result = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "command": launch_line(),
        "environment": about,
        "options": dataclasses.asdict(options),
        **more,
        "rows": list(rows),
    }
    export.write_json(json_value(result), Path(options.json))


def quartiles(name: str, values: list[float]) -> dict:
    """Return a record's entries for `values`, one of each turn: NAME_median, the quartiles, and NAME_per_turn."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    cells = {f"{name}_median": middle, f"{name}_first_quartile": low, f"{name}_third_quartile": high}
    return cells | {f"{name}_per_turn": list(values)}


def quartile_text(values: Iterable[float]) -> str:
    """Return "1.00 (0.90 to 1.10)": the median, and the first and the third quartile."""
    middle, low, high = np.percentile(list(values), (50, 25, 75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def spread(values: list[float], form: str) -> str:
    """Return "median (lowest to highest)", or one number if all are equal in this format."""
    middle, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
