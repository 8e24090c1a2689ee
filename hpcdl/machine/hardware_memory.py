"""Bandwidth of each cache level and of memory: loops over arrays that fit there.

    read     sum of a              b bytes an element
    copy     a <- b                2 b
    triad    a <- b + factor c     3 b, the STREAM benchmark's (McCalpin, 1995)

Bytes are counted as in STREAM: those named in the loop, without write-allocate reads. The arrays of a loop together
fill half of the cache, or a thread's share of that half in a shared cache; for memory, four times the capacity of all
last-level caches. A thread touches its arrays first, on its own processor, so that they lie in its node's memory; for
remote memory a thread of the other node does.

Narrow types: the kernel into <- into + values with values of 64, 32 and 16 bits; bytes bound its speed, not elements.
"""

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
    """Return the name of each cache of the first processor and of memory, with the bytes for each thread."""
    sizes = []
    for cache in found.caches_of(cpus[0]):
        sharing = sum(number in cache.shared for number in cpus)
        sizes.append((f"L{cache.level}", cache.size // 2 // max(1, sharing)))
    return [*sizes, ("memory", memory_size(found) // len(cpus))]


def memory_size(found: MachineTopology) -> int:
    """Return bytes beyond all caches: four times the last level, 64 MiB to 1 GiB, at most 1/4 of free memory."""
    last = max((cache.level for cache in found.caches), default=0)
    held = sum(cache.size for cache in found.caches if cache.level == last)
    size = min(max(LEAST, 4 * held), MOST)
    return min(size, available() // 4)


def memory(found: MachineTopology, seconds: float) -> list[dict]:
    """Return rows for each loop, cache level and number of threads."""
    cores, siblings = found.one_per_core(), found.siblings()
    teams = [(cores[:count], "cores") for count in thread_counts(len(cores))] + [
        (siblings, "siblings of one core")
    ] * bool(siblings)
    rows = []
    for cpus, kind in teams:
        for place, size in places(found, cpus):
            for loop in LOOPS:
                speed = bandwidth(loop, "float32", size, cpus, cpus, seconds)
                about = {"what": "bandwidth", "place": place, "loop": loop, "dtype": "float32", "on": kind}
                sized = {"threads": len(cpus), "working_set_bytes_per_thread": size}
                rows.append({**about, **sized, **speed})
    return rows


def bandwidth(loop: str, dtype: str, size: int, cpus: list[int], first_touch: list[int], seconds: float) -> dict:
    """Return GB/s of threads on `cpus`, each with `size` bytes that a thread on its CPU of `first_touch` allocated."""
    count, moved, call = LOOPS[loop]
    elements = max(2, size // count // np.dtype(dtype).itemsize // 2 * 2)
    if count * elements * np.dtype(dtype).itemsize * len(cpus) > available():
        raise UsageError(f"there is no room for {len(cpus)} times {size} bytes")
    arrays: list[list[np.ndarray]] = [[] for _ in cpus]

    def fill(i: int) -> None:
        arrays[i] = [CPU.empty(elements, dtype) for _ in range(count)]
        for array in arrays[i]:
            array[:] = 1

    run_threads(first_touch, lambda i: None, fill)
    taken = per_round(lambda rounds: run_threads(cpus, lambda i: call(arrays[i], rounds)), seconds)
    return taken.rate("gigabytes_per_second", 1e-9 * moved * elements * np.dtype(dtype).itemsize * len(cpus))


def remote(found: MachineTopology, seconds: float) -> list[dict]:
    """Return rows of one thread that reads the memory of each node; none if there is one node."""
    nodes = found.nodes()
    if len(nodes) < 2:
        return []
    here, rows = min(nodes), []
    for there in sorted(nodes):
        size = memory_size(found)
        speed = bandwidth("read", "float32", size, nodes[here][:1], nodes[there][:1], seconds)
        about = {"what": "numa", "from_node": here, "of_node": there, "working_set_bytes_per_thread": size}
        rows.append(about | speed)
    return rows


def divided(found: MachineTopology, seconds: float) -> list[dict]:
    """Return a row for a working set that fits the private caches together, but none alone: one thread, then all.

    It is three quarters of the sum of the largest private caches, so that n threads gain more than n times. None if
    there is one core, or no private cache.
    """
    cpus = found.one_per_core()
    own = [cache for cache in found.caches_of(cpus[0]) if not cache.shared & set(cpus[1:])]
    if len(cpus) < 2 or not own:
        return []
    each = own[-1].size * 3 // 4
    alone = bandwidth("read", "float32", each * len(cpus), cpus[:1], cpus[:1], seconds)
    all_of = bandwidth("read", "float32", each, cpus, cpus, seconds)
    gain = {
        name: all_of[f"gigabytes_per_second{name}"] / alone[f"gigabytes_per_second{name}"] for name in ("", "_best")
    }
    about = {"what": "divided", "cache": f"L{own[-1].level}", "bytes": each * len(cpus), "threads": len(cpus)}
    about |= {f"one_thread_{name}": value for name, value in alone.items()} | all_of
    return [about | {f"speed_up{name}": value for name, value in gain.items()}]


def narrow(found: MachineTopology, seconds: float) -> list[dict]:
    """Return rows of additions of 64, 32 and 16-bit numbers, in the L2 cache, if there is one, and in memory."""
    cpus, rows = found.one_per_core()[:1], []
    sized = places(found, cpus)
    for place, size in [*sized[1:-1][:1], sized[-1]]:
        for kind, (kernel, own, other) in NARROW.items():
            elements = size // (np.dtype(own).itemsize + np.dtype(other).itemsize)
            run = repeated(kernel, (CPU.zeros(elements, own), CPU.zeros(elements, other)), cpus)
            speed = per_round(run, seconds).rate("gigaelements_per_second", 1e-9 * elements)
            rows.append({"what": "types", "place": place, "dtype": kind, **speed})
    return rows


def repeated(kernel: Callable, arguments: tuple, cpus: list[int]) -> Callable[[int], float]:
    """Return a function: number of calls on one processor -> seconds."""

    def calls(rounds: int) -> None:
        for _ in range(rounds):
            kernel(*arguments)

    return lambda rounds: run_threads(cpus, lambda i: calls(rounds))
