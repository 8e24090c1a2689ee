"""Bandwidth of each cache level and of memory: loops over arrays that fit there.

    read     sum of a              b bytes an element
    copy     a <- b                2 b
    triad    a <- b + factor c     3 b, the STREAM benchmark's (McCalpin, 1995)

Bytes are counted as in STREAM: arrays named in the loop, without write-allocate reads. The arrays of a loop together
fill half of the cache, or a thread's share of that half. A thread touches its arrays first, so that they lie in its
node's memory; remote memory is touched by a thread of the other node."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.convert import add_bfloat16, add_float16
from hpcdl.kernels.device import CPU
from hpcdl.kernels.probes import copy_stream, read_stream, triad_stream
from hpcdl.kernels.reduce import add_into
from hpcdl.machine.hardware_threads import per_round, run_threads, thread_counts
from hpcdl.machine.topology import MachineTopology
from hpcdl.memory import available

LOOPS: dict[str, tuple[int, int, Callable]] = {  # number of arrays, bytes per element in units of its size, loop
    "read": (1, 1, lambda arrays, rounds: read_stream(arrays[0], rounds)),
    "copy": (2, 2, lambda arrays, rounds: copy_stream(*arrays, rounds)),
    "triad": (3, 3, lambda arrays, rounds: triad_stream(*arrays, arrays[0].dtype.type(0.5), rounds)),
}
LEAST, MOST = 64 << 20, 1 << 30  # bytes of arrays in memory
NARROW: dict[str, tuple[Any, str, str]] = {  # kernel, types of `into` and `values`
    "float64": (add_into, "float64", "float64"),
    "float32": (add_into, "float32", "float32"),
    "bfloat16": (add_bfloat16, "float32", "uint16"),
    "float16": (add_float16, "float32", "uint16"),
}


def places(found: MachineTopology, cpus: list[int]) -> list[tuple[str, int]]:
    """Return (name, bytes of a thread's arrays) of each cache of the first processor, and of memory."""
    sharing = {cache: max(1, len(cache.shared & {*cpus})) for cache in found.caches_of(cpus[0])}
    sizes = [(f"L{cache.level}", cache.size // 2 // threads) for cache, threads in sharing.items()]
    return [*sizes, ("memory", memory_size(found) // len(cpus))]


def memory_size(found: MachineTopology) -> int:
    """Return bytes beyond all caches: four times the last level, 64 MiB to 1 GiB, at most 1/4 of available memory."""
    last = max((cache.level for cache in found.caches), default=0)
    held = sum(cache.size for cache in found.caches if cache.level == last)
    return min(max(LEAST, 4 * held), MOST, available() // 4)


def memory(found: MachineTopology, seconds: float) -> list[dict]:
    """Return a row for each loop, place (cache level or memory) and number of threads. seconds: of each measurement."""
    cores, siblings = found.one_per_core(), found.siblings()
    teams = [(cores[:count], "cores") for count in thread_counts(len(cores))]
    teams += [(siblings, "siblings of one core")] * bool(siblings)
    rows = []
    for cpus, kind in teams:
        for place, size in places(found, cpus):
            for loop in LOOPS:
                row: dict = {"what": "bandwidth", "place": place, "loop": loop, "dtype": "float32", "on": kind}
                row |= {"threads": len(cpus), "working_set_bytes_per_thread": size}
                rows.append(row | bandwidth(loop, "float32", size, cpus, cpus, seconds))
    return rows


def bandwidth(loop: str, dtype: str, size: int, cpus: list[int], first_touch: list[int], seconds: float) -> dict:
    """Return GB/s of threads on `cpus`, each with `size` bytes that a thread on its CPU of `first_touch` allocated."""
    count, moved, call = LOOPS[loop]
    elements = max(2, size // count // np.dtype(dtype).itemsize // 2 * 2)
    if count * elements * np.dtype(dtype).itemsize * len(cpus) > available():
        raise UsageError(f"the bandwidth test has no room for {len(cpus)} times {size} bytes; free some memory")
    arrays: list[list[np.ndarray]] = [[] for _ in cpus]

    def fill(i: int) -> None:
        arrays[i] = [CPU.empty(elements, dtype) for _ in range(count)]
        for array in arrays[i]:
            array[:] = 1

    run_threads(first_touch, lambda i: None, fill)
    taken = per_round(lambda rounds: run_threads(cpus, lambda i: call(arrays[i], rounds)), seconds)
    return taken.rate("gigabytes_per_second", 1e-9 * moved * elements * np.dtype(dtype).itemsize * len(cpus))


def remote(found: MachineTopology, seconds: float) -> list[dict]:
    """Return rows of one thread that reads the memory of each node; no rows for a single node."""
    nodes, rows = found.nodes(), []
    here, size = min(nodes), memory_size(found)
    for there in sorted(nodes) if len(nodes) > 1 else ():
        speed = bandwidth("read", "float32", size, nodes[here][:1], nodes[there][:1], seconds)
        about = {"what": "numa", "from_node": here, "of_node": there, "working_set_bytes_per_thread": size}
        rows.append(about | speed)
    return rows


def divided(found: MachineTopology, seconds: float) -> list[dict]:
    """Return a row for a working set of 3/4 of the private caches' sum, read by one thread, then divided among all.
    It fits into the caches only if divided, so n threads gain more than n times. [] without several such caches."""
    cpus = found.one_per_core()
    own = [cache for cache in found.caches_of(cpus[0]) if not cache.shared & set(cpus[1:])]
    if len(cpus) < 2 or not own:
        return []
    each = own[-1].size * 3 // 4
    alone = bandwidth("read", "float32", each * len(cpus), cpus[:1], cpus[:1], seconds)
    all_of = bandwidth("read", "float32", each, cpus, cpus, seconds)
    about = {"what": "divided", "cache": f"L{own[-1].level}", "bytes": each * len(cpus), "threads": len(cpus)}
    about |= {f"one_thread_{name}": value for name, value in alone.items()} | all_of
    speed = "gigabytes_per_second"
    return [about | {f"speed_up{each}": all_of[speed + each] / alone[speed + each] for each in ("", "_best")}]


def narrow(found: MachineTopology, seconds: float) -> list[dict]:
    """Return rows of into <- into + values of 64, 32 and 16 bits, in the L2 cache, if any, and in memory."""
    cpus, rows = found.one_per_core()[:1], []
    sized = places(found, cpus)
    for place, size in [*sized[1:-1][:1], sized[-1]]:
        for kind, (kernel, own, other) in NARROW.items():
            elements = size // (np.dtype(own).itemsize + np.dtype(other).itemsize)
            arguments = CPU.zeros(elements, own), CPU.zeros(elements, other)
            run = functools.partial(repeated, kernel, arguments, cpus)
            speed = per_round(run, seconds).rate("gigaelements_per_second", 1e-9 * elements)
            rows.append({"what": "types", "place": place, "dtype": kind, **speed})
    return rows


def repeated(kernel: Callable, arguments: tuple, cpus: list[int], rounds: int) -> float:
    """Return the seconds of `rounds` calls of `kernel` on one processor, cpus[0]."""

    def calls(_: int) -> None:
        for _ in range(rounds):
            kernel(*arguments)

    return run_threads(cpus, calls)
