"""Hardware report: topology, arithmetic, memory bandwidth and synchronization costs of this machine.

Each part (topology.py, hardware_*.py) returns flat rows of numbers for --json; `tables` arranges them for people."""

from collections.abc import Callable
from typing import NamedTuple

from hpcdl.formatting import counted
from hpcdl.machine.doctor import format_bytes
from hpcdl.machine.hardware_arithmetic import CHAINS, arithmetic
from hpcdl.machine.hardware_memory import LOOPS, divided, memory, narrow, remote
from hpcdl.machine.hardware_threads import between_cores
from hpcdl.machine.topology import MachineTopology

FAR = 0.8  # of the best value: a median below it counts as disturbed


class ReportTable(NamedTuple):
    """A table of the report; the first line of cells is the header."""

    title: str
    cells: list[list[str]]


def machine_rows(found: MachineTopology) -> list[dict]:
    """Return the rows of the machine's topology."""
    cores, siblings = found.cores(), found.siblings()
    rows: list[dict] = [{"what": "processor", "name": found.model, "source": found.source}]
    rows += [{"what": "processors", "usable": len(found.usable), "known": len(found.processors)}]
    packages = len({each.package for each in found.processors})
    rows += [{"what": "cores", "usable": len(cores), "packages": packages, "threads_per_core": len(siblings) or 1}]
    for level in sorted({cache.level for cache in found.caches}):
        alike = [cache for cache in found.caches if cache.level == level]
        shared = max(len(cache.shared) for cache in alike)
        size = max(cache.size for cache in alike)
        rows += [{"what": "cache", "level": level, "size_bytes": size, "count": len(alike), "processors": shared}]
    for node, numbers in sorted(found.nodes().items()):
        rows += [{"what": "node", "node": node, "processors": len(numbers), "bytes": found.memory.get(node)}]
    return rows


PARTS: dict[str, Callable[[MachineTopology, float], list[dict]]] = {
    "machine": lambda found, seconds: machine_rows(found),
    "arithmetic": arithmetic,
    "memory": lambda found, s: memory(found, s) + remote(found, s) + divided(found, s) + narrow(found, s),
    "cores": between_cores,
}


def peak(rows: list[dict], dtype: str = "float32") -> float:
    """Return the best GFLOP/s of one thread at any width; 0 without a measurement."""
    one = [row for row in rows_of_kind(rows, "arithmetic") if row["dtype"] == dtype and row["threads"] == 1]
    return max((row["gflops_best"] for row in one), default=0.0)


def bandwidths(rows: list[dict]) -> dict[str, float]:
    """Return the best GB/s of one thread in each cache and in memory, over all loops."""
    found: dict[str, float] = {}
    for row in rows_of_kind(rows, "bandwidth"):
        if row["threads"] == 1:
            found[row["place"]] = max(found.get(row["place"], 0.0), row["gigabytes_per_second_best"])
    return found


def rows_of_kind(rows: list[dict], what: str) -> list[dict]:
    """Return the rows of one kind."""
    return [row for row in rows if row["what"] == what]


def disturbed_count(rows: list[dict]) -> tuple[int, int]:
    """Return the number of values whose median is far from their best (other work disturbed it), and of all values."""
    pairs = [(row[name.removesuffix("_best")], row[name]) for row in rows for name in row if name.endswith("_best")]
    return sum(not FAR <= median / best <= 1 / FAR for median, best in pairs), len(pairs)


def best_values(rows: list[dict]) -> list[dict]:
    """Return the rows with best values in the place of medians, except of nanoseconds, whose table shows both."""
    return [
        row if "nanoseconds" in row else row | {name[:-5]: row[name] for name in row if name.endswith("_best")}
        for row in rows
    ]


def tables(rows: list[dict]) -> list[ReportTable]:
    """Return the report's tables; empty ones are left out."""
    made = [machine_table(rows), arithmetic_table(rows), memory_table(rows), divided_table(rows)]
    made += [types_table(rows), cores_table(rows)]
    return [table for table in made if len(table.cells) > 1]


def machine_table(rows: list[dict]) -> ReportTable:
    """Return the table of the topology."""
    cells = [["machine", "found"]]
    for row in rows_of_kind(rows, "processor"):
        cells.append(["processor", f"{row['name'] or 'unnamed'}, according to {row['source']}"])
    for row in rows_of_kind(rows, "cores"):
        each = row["threads_per_core"]
        smt = f"{each} SMT siblings each" if each > 1 else "no visible SMT siblings"
        cells.append(["cores", f"{row['usable']} in {counted(row['packages'], 'package')}, {smt}"])
    for row in rows_of_kind(rows, "cache"):
        shared = f"shared by {row['processors']} processors" if row["processors"] > 1 else "for each processor"
        cells.append([f"L{row['level']} cache", f"{format_bytes(row['size_bytes'])}, {shared}"])
    for row in rows_of_kind(rows, "node"):
        about = f", {format_bytes(row['bytes'])}" if row["bytes"] else ""
        cells.append([f"NUMA node {max(0, row['node'])}", f"{counted(row['processors'], 'processor')}{about}"])
    return ReportTable("", cells)


def arithmetic_table(rows: list[dict]) -> ReportTable:
    """Return the table of GFLOP/s. Lines: width and type. Columns: one thread by chains, all threads, SMT siblings."""
    found = rows_of_kind(rows, "arithmetic")
    most = max((row["threads"] for row in found if row["on"] == "cores"), default=1)
    smt = any(row["on"] != "cores" for row in found)
    head = ["GFLOP/s", "type", *(counted(chains, "chain") for chains in CHAINS)]
    head += [f"{most} threads"] * (most > 1) + ["siblings, 1 chain", f"{CHAINS[-1]} chains"] * smt
    cells = [head]
    for level, dtype in dict.fromkeys((row["level"], row["dtype"]) for row in found):
        mine = [row for row in found if (row["level"], row["dtype"]) == (level, dtype)]
        speed = {(row["chains"], row["threads"], row["on"] == "cores"): row["gflops"] for row in mine}
        line = [speed[chains, 1, True] for chains in CHAINS] + [speed[CHAINS[-1], most, True]] * (most > 1)
        line += [row["gflops"] for row in mine if row["on"] != "cores"]
        cells.append([level, dtype, *(f"{value:.1f}" for value in line)])
    return ReportTable(f"peak arithmetic: multiply-add in dependent chains; several threads: {CHAINS[-1]} each", cells)


def memory_table(rows: list[dict]) -> ReportTable:
    """Return the table with a line for each number of threads and cache level, and one for each node's memory."""
    cells, speed = [["GB/s", "each thread", "threads", *LOOPS]], "gigabytes_per_second"
    found = rows_of_kind(rows, "bandwidth")
    for threads, on, place in dict.fromkeys((row["threads"], row["on"], row["place"]) for row in found):
        mine = {row["loop"]: row for row in found if (row["threads"], row["on"], row["place"]) == (threads, on, place)}
        size = format_bytes(mine["read"]["working_set_bytes_per_thread"])
        who = str(threads) if on == "cores" else f"{threads} {on}"
        cells.append([place, size, who, *(f"{mine[loop][speed]:.1f}" for loop in LOOPS)])
    for row in rows_of_kind(rows, "numa"):
        where = f"memory of node {row['of_node']}, from node {row['from_node']}"
        cells.append([where, format_bytes(row["working_set_bytes_per_thread"]), "1", f"{row[speed]:.1f}", "", ""])
    return ReportTable("bandwidth: arrays that fit into a cache, or into no cache (memory)", cells)


def divided_table(rows: list[dict]) -> ReportTable:
    """Return the table with a line for the divided working set."""
    cells = [["read, GB/s", "1 thread", "all threads", "speed-up", "best"]]
    for row in rows_of_kind(rows, "divided"):
        who = f"{format_bytes(row['bytes'])}, each of {row['threads']} threads has its part in its {row['cache']}"
        speed = [f"{row[name]:.1f}" for name in ("one_thread_gigabytes_per_second", "gigabytes_per_second")]
        cells.append([who, *speed, *(f"{row[name]:.2f}" for name in ("speed_up", "speed_up_best"))])
    return ReportTable("a working set that fits into the cores' own caches when it is divided among them", cells)


def types_table(rows: list[dict]) -> ReportTable:
    """Return the table with a line for each cache level, and a column for each type."""
    found = rows_of_kind(rows, "types")
    kinds = list(dict.fromkeys(row["dtype"] for row in found))
    cells = [["10^9 elements/s", *kinds]]
    for place in dict.fromkeys(row["place"] for row in found):
        speed = {row["dtype"]: row["gigaelements_per_second"] for row in found if row["place"] == place}
        cells.append([place, *(f"{speed[kind]:.2f}" for kind in kinds)])
    return ReportTable("additions of numbers of 64, 32 and 16 bits, one thread", cells)


def cores_table(rows: list[dict]) -> ReportTable:
    """Return the table with a line for each kind of synchronization."""
    cells = [["nanoseconds", "median", "shortest"]]
    for row in rows:
        if row["what"] in ("cache line", "barrier", "lock"):
            threads = counted(row.get("threads", 2), "thread")
            name = f"{row['what']} between {row['between']}" if "between" in row else f"{row['what']}, {threads}"
            best = f"{row['nanoseconds_best']:.1f}" if "nanoseconds_best" in row else "-"
            cells.append([name, f"{row['nanoseconds']:.1f}", best])
    return ReportTable("between cores", cells)
