"""Measure this machine, and draw the roofline over a model's layers: hpcdl hardware --roofline mlp:256,128

Cores, caches and NUMA nodes; GFLOP/s with one chain of dependent steps and with many, scalar, SSE, AVX2 and AVX-512, by
threads; bandwidth of each cache and of the memory; what a cache line, a barrier and a lock cost between cores; with
--device cuda the GPU (docs/hardware.md). Numbers are medians; they are of use only if the machine is else idle.
--roofline puts our kernels and the layers of a model under the roofs, as NAME.png and NAME.svg; --run sets a run's
compute : communication ratio beside the machine's. One process; it takes half a minute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpi4py import MPI
from rich.table import Table
from rich.text import Text

from hpcdl.checkpoint.export import check_output_file
from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError
from hpcdl.kernels.device import open_device
from hpcdl.launch.benchmark_table import bytes_of, check_picture, chosen, write_json
from hpcdl.launch.option_parser import parse
from hpcdl.launch.program import ended, quiet
from hpcdl.machine import hardware, hardware_gpu
from hpcdl.machine.display import console
from hpcdl.machine.topology import topology
from hpcdl.reports.roofline import attainable, balance, points_of, prepare, told, write
from hpcdl.runs.options import option, positive


@dataclass
class HardwareOptions:
    """Options of hardware: what is measured, and for how long."""

    parts: str = option("machine,arithmetic,memory,cores", "parts to measure, with commas between")
    seconds: float = option(0.1, "seconds to spend on each number")
    show: Literal["median", "best"] = option(
        "median", "what the tables show of a number's repetitions; best: if other programs disturb them"
    )
    device: Literal["cpu", "cuda"] = option("cpu", "cuda: measure the GPU, too")
    roofline: str = option("", "draw the layers of a model, as mlp:256,128 or gpt, and hpcdl's kernels under the roofs")
    data: str = option("", "data set that the model of --roofline is for (default: digits; of a gpt: text)")
    batch_size: int = option(256, "examples in a batch of --roofline")
    size: str = option("64MiB", "bytes of a kernel's first array in --roofline")
    plot: str = option("roofline", "the pictures of --roofline are PLOT.png and PLOT.svg")
    run: str = option("", "folder of a run, whose compute : communication ratio is set beside the machine's")
    json: str = option("", "file for the rows")


def main(arguments=None):
    world = MPI.COMM_WORLD
    with ended("hardware", world.rank):
        with refuse_together(world), quiet(world.rank > 0):
            options = parse(HardwareOptions, "hardware", __doc__, arguments)
            if world.size > 1:
                raise UsageError("hardware measures one machine; start it without mpiexec")
            parts = checked(options)
            ready = prepare(options.roofline, options.data, options.batch_size) if options.roofline else None
            device = open_device(options.device)
            found = topology()
            rows = [row for part in parts for row in hardware.PARTS[part](found, options.seconds)]
            if options.device == "cuda":
                rows += hardware_gpu.gpu(device)
            shown = hardware.best_values(rows) if options.show == "best" else rows
            gpu = hardware_gpu.cells(shown)
            for table in [*hardware.tables(shown), *[hardware.ReportTable("", gpu)] * (len(gpu) > 1)]:
                print_table(table)
            far, of_all = hardware.disturbed_count(rows)
            if far:
                print(f"\n{far} of {of_all} medians are far from the best: another program runs, and slows them")
            rows += under_the_roofs(options, ready, rows) + beside(options, rows)
        write_json("hardware", options, rows)


def checked(options) -> list[str]:
    """Return the chosen parts in the order of hardware.PARTS; UsageError for options that make no sense."""
    parts = chosen("part", options.parts, hardware.PARTS)
    positive(options, "seconds", "batch_size")
    if bytes_of(options.size) < 1024:
        raise UsageError(f"--size is 1KiB or more, not {options.size}")
    check_output_file("--json", options.json, (".json",))
    if options.roofline:
        for ending in ("png", "svg"):
            check_picture("--plot", f"{options.plot}.{ending}")
    if (options.roofline or options.run) and not {"arithmetic", "memory"} <= set(parts):
        raise UsageError("--roofline and --run need the parts arithmetic and memory")
    if options.run:
        balance(Path(options.run), 1.0, 1.0)  # refuses a folder that holds no run
    return [name for name in hardware.PARTS if name in parts]


def under_the_roofs(options, ready, rows: list[dict]) -> list[dict]:
    if ready is None:
        return []
    points = points_of(ready, bytes_of(options.size), options.seconds)
    peak, roofs = hardware.peak(rows), hardware.bandwidths(rows)
    cells = [["flops, bytes", "", "flops/byte", "GFLOP/s", "of its roof"]]
    for each in points:
        roof = attainable(each.intensity, peak, roofs["memory"])
        line = f"{each.intensity:.2f}", f"{each.gflops:.1f}", f"{100 * each.gflops / roof:.0f}%"
        cells.append([each.name, each.kind, *line])
    title = f"{options.roofline} on the roofline, one thread, float32; roof: min(peak, flops/byte x memory bandwidth)"
    print_table(hardware.ReportTable(title, cells))
    named = f"{options.roofline}, batches of {options.batch_size}: one thread, peak {peak:.0f} GFLOP/s"
    written = write(points, peak, roofs, named, Path(options.plot))
    print("\nwritten: " + ", ".join(map(str, written)))
    return [each.row() for each in points]


def beside(options, rows: list[dict]) -> list[dict]:
    if not options.run:
        return []
    memory = (row for row in hardware.rows_of_kind(rows, "bandwidth") if row["place"] == "memory")
    copied = next(row["gigabytes_per_second_best"] for row in memory if row["loop"] == "copy")
    row = balance(Path(options.run), hardware.peak(rows), copied)
    console().print("\n" + told(row), highlight=False)
    return [row]


def print_table(made: hardware.ReportTable) -> None:
    """Print a table of texts, with columns of numbers to the right."""
    head, *lines = made.cells
    table = Table(box=None, pad_edge=False)
    numbers = [all(map(is_number, column)) for column in zip(*lines, strict=True)]
    for name, right in zip(head, numbers, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    shown = console()
    shown.print("\n" + made.title if made.title else "", highlight=False, soft_wrap=True)
    shown.print(table)


def is_number(cell: str) -> bool:
    return cell == "-" or (cell[:1].isdigit() and cell[-1:] in "0123456789%")


if __name__ == "__main__":
    main()
