"""Autotuned all-reduce: the fastest algorithm for the vector's length, from a table measured once per machine.

    bytes of the vector     up to 2 KiB     up to 16 KiB    up to 128 KiB   up to 1 MiB     longer
    measured at             1 KiB           8 KiB           64 KiB          512 KiB         4 MiB
    algorithm               the fastest of shared (one node) or hierarchical (several), ring, tree, double_tree, mpi,
                            and recursive (2^h ranks) or circulant

The candidates take turns of up to 20 calls. A call costs what a blocking call of a communicator does: with counts of
messages, and for mpi with the wait in which the ranks compare their calls. A turn's time is that of the slowest rank,
and the first quartile of the turns counts, because other load only makes turns longer. A candidate, except mpi and
those in shared memory, is dropped if its best of three trial turns is more than three times as long as the best turn of
all. If the fastest takes more than 20 ms, longer vectors get the same: on a slow link their turns would take minutes.
Between nodes mpi has to be 5 % faster than the others, as its waits keep the core. Algorithms in shared memory are
timed with vectors from `comm.empty`, and are chosen only if they keep up with mpi for other vectors, too. A file in
$HPCDL_CACHE or the user's cache folder (hpcdl/files.py) keeps the table of each MPI library, processor, number of
cores, nodes and ranks per node. Delete it to measure again. The order of additions depends on the algorithm: name one
for equal bits on all machines."""

import bisect
import functools
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce import circulant, double_tree, hierarchical, mpi, recursive, ring, shared, tree
from hpcdl.comm.allreduce.record import Algorithm
from hpcdl.comm.call_matching import CallComparison
from hpcdl.comm.collective_schedule import Step
from hpcdl.comm.compiled_schedule import ScheduleRunner, functions, schedule_of
from hpcdl.comm.counting import CountingIntracomm
from hpcdl.comm.node_memory import NodeMemory, node_memory
from hpcdl.comm.operations import SUM, Reduction
from hpcdl.comm.progress import activity, attribute_key
from hpcdl.files import atomic_write, cache_folder, parse_json

log = logging.getLogger("hpcdl")
SIZES = [1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20]  # bytes
LIMITS = [2 * size for size in SIZES[:-1]]  # upper limit of the lengths that each size stands for
FILES = shared, hierarchical, recursive, circulant, ring, tree, double_tree, mpi
CANDIDATES = {each.ALGORITHM.name: each.ALGORITHM for each in FILES}
SHARING = ("shared", "hierarchical")  # algorithms in shared memory
SECONDS = 0.04  # for the turns of a candidate at one size
TRIAL, MIN_TURNS, MAX_TURNS = 3, 9, 100
CALLS, CALLS_BYTES = 20, 64 << 10  # calls of a turn, at most, and their bytes: a barrier makes a single call longer
SLOW = 0.02  # seconds of the fastest at one size from which on longer ones are not measured: the links decide
HOPELESS = 3.0  # times the best trial turn of all candidates
ALWAYS_RACED = ("mpi", "elsewhere", *SHARING)  # never dropped: they are compared with each other
AHEAD = 1.05  # times faster than the others, between nodes, is the library's own if it is taken
MAX_LAG = 1.25  # times the library's time, for vectors outside of shared memory

TABLE = "table of algorithms"  # attribute of a communicator
tables: dict[str, list[str]] = {}  # of this process, by key: the algorithm for each size


def steps(comm: MPI.Intracomm, vector: np.ndarray, op: Reduction = SUM) -> Iterator[Step]:
    """Yield the steps of the algorithm for this vector."""
    yield from choose(comm, vector).steps(comm, vector, op)  # type: ignore[misc]  # all candidates have steps


def choose(comm: MPI.Intracomm, vector: np.ndarray) -> Algorithm:
    """Return the algorithm for this vector; equal on all ranks, as it depends on the length alone."""
    return CANDIDATES[table(comm)[bisect.bisect_left(LIMITS, vector.nbytes)]]


def table(comm: MPI.Intracomm) -> list[str]:
    """Return the name of the algorithm for each of SIZES. The first call on a communicator is collective."""
    if comm.Get_attr(attribute_key(TABLE)) is None:
        prepare(comm)
    return comm.Get_attr(attribute_key(TABLE))  # type: ignore[return-value]


def prepare(comm: MPI.Intracomm) -> NodeMemory:
    """Make the shared memory of the node, and return it; read or measure the table of algorithms. Collective."""
    memory = node_memory(comm)
    if comm.Get_size() == 1:
        comm.Set_attr(attribute_key(TABLE), ["ring"] * len(SIZES))  # any: a single rank sends nothing
        return memory
    with activity.inside("measuring all-reduce algorithms"):
        about = description(comm, memory)
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        path = cache_folder() / f"allreduce-{key}.json"
        known = tables.get(key) or (read(path, about) if comm.Get_rank() == 0 else None)
        known = comm.bcast(known)
        if known is None:
            known = measure_and_keep(comm, path, about)
    tables[key] = known
    comm.Set_attr(attribute_key(TABLE), known)
    return memory


def description(comm: MPI.Intracomm, memory: NodeMemory) -> dict:
    """Return the properties of rank 0's machine that the table depends on; collective."""
    about: dict = {"mpi": MPI.Get_library_version().strip("\0").split("\n")[0], "processor": processor()}
    about |= {"cores": os.cpu_count(), "nodes": memory.nodes, "ranks": comm.Get_size()}
    about |= {"ranks_per_node": memory.ranks_per_node, "shared_memory": bool(memory.usable), "sizes": SIZES}
    about["compiled"] = functions() is not None
    about["candidates"], about["calls"] = list(CANDIDATES), CALLS
    return comm.bcast(about)


def processor() -> str:
    """Return the processor's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read(path: Path, about: dict) -> list[str] | None:
    """Return the table in file `path`; None if the file has no valid one, or is of another machine than `about`."""
    try:
        found = parse_json(path.read_text())
        table = found["table"]
        usable = found["about"] == about and len(table) == len(SIZES) and set(table) <= set(CANDIDATES)
        return table if usable else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measure_and_keep(comm: MPI.Intracomm, path: Path, about: dict) -> list[str]:
    """Measure the table on all ranks and return it. Rank 0 writes it to `path`, if it can, with `about`."""
    start, own = time.perf_counter(), comm.Dup()
    fastest, times = measure(own)
    node_memory(own).free()
    own.Free()
    if comm.Get_rank() == 0:
        where = f"kept in {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(json.dumps({"about": about, "table": fastest, "microseconds": times}, indent=1).encode())
        except OSError as error:
            where = f"not kept: {path.parent}: {error.strerror}"
        names = ", ".join(f"{size >> 10} KiB {name}" for size, name in zip(SIZES, fastest, strict=True))
        seconds = time.perf_counter() - start
        log.info("all-reduce measured on %d ranks in %.1f s: %s; %s", comm.Get_size(), seconds, names, where)
    return fastest


def measure(comm: MPI.Intracomm) -> tuple[list[str], list[dict[str, float]]]:
    """Return, for each size, the fastest algorithm's name and each candidate's microseconds. Equal on all ranks."""
    memory = node_memory(comm)
    sharing = ["shared" if memory.nodes == 1 else "hierarchical"] if memory.usable and memory.ranks_per_node > 1 else []
    fastest, microseconds = list[str](), list[dict[str, float]]()
    window = None if not sharing else memory.empty(SIZES[-1] // 4, np.dtype(np.float32))
    plain, ranks = np.ones(SIZES[-1] // 4, np.float32), comm.Get_size()
    halving = "circulant" if ranks & (ranks - 1) else "recursive"  # which then takes the same steps
    for size in SIZES:
        if microseconds and min(microseconds[-1].values()) > 1e6 * SLOW:
            fastest.append(fastest[-1])
            continue
        length = size // 4
        vectors = {name: (CANDIDATES[name], plain[:length]) for name in (halving, "ring", "tree", "double_tree", "mpi")}
        for name in sharing:
            vectors["elsewhere"] = (CANDIDATES[name], plain[:length])
            vectors[name] = (CANDIDATES[name], plain[:length] if window is None else window[:length])
        found = race(comm, vectors)
        behind = found.pop("elsewhere", 0) > MAX_LAG * found["mpi"]
        choice = {name: value for name, value in found.items() if not (behind and name in SHARING)}
        choice["mpi"] *= AHEAD if memory.nodes > 1 else 1.0
        fastest.append(min(choice, key=choice.__getitem__))
        microseconds.append({name: round(value, 2) for name, value in found.items()})
    return fastest, microseconds


def race(comm: MPI.Intracomm, vectors: dict[str, tuple[Algorithm, np.ndarray]]) -> dict[str, float]:
    """Time each algorithm on its vector; return its microseconds on the slowest rank, by name, unless it is dropped."""
    runs = {name: blocking(comm, *each) for name, each in vectors.items()}
    for name, run in runs.items():  # warm-up: compile, touch the memory
        run(vectors[name][1])
    taken: dict[str, list[float]] = {name: [] for name in vectors}
    turn, turns = 0, MAX_TURNS
    while turn < turns:
        for name, times in taken.items():
            vector, run = vectors[name][1], runs[name]
            calls = max(1, min(CALLS, CALLS_BYTES // vector.nbytes))
            vector[:] = 1
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                run(vector)
            times.append(comm.allreduce((time.perf_counter() - start) / calls, MPI.MAX))
        turn += 1
        if turn == TRIAL:
            most = HOPELESS * min(min(times) for times in taken.values())
            taken = {name: times for name, times in taken.items() if min(times) <= most or name in ALWAYS_RACED}
            longest = max(min(times) for times in taken.values())
            turns = int(min(MAX_TURNS, max(MIN_TURNS, SECONDS / longest))) if longest < SECONDS else TRIAL
    return {name: float(1e6 * np.percentile(times, 25)) for name, times in taken.items()}


def blocking(comm: MPI.Intracomm, algorithm: Algorithm, vector: np.ndarray) -> Callable[[np.ndarray], object]:
    """Return the sum of vectors like this one, at the cost of a communicator's blocking call (collectives.py)."""
    bound = algorithm.bind(comm, vector, SUM) if algorithm.bind is not None else None
    if bound is not None:
        return bound
    schedule = schedule_of(algorithm, comm, vector, SUM)
    if schedule is not None:
        replay = ScheduleRunner(comm).counted(schedule, vector, SUM)
        counting = CountingIntracomm(comm)
        return lambda vector: replay(vector, counting)
    if not algorithm.meets:
        return functools.partial(algorithm, comm)
    same = CallComparison(comm, vector, SUM)

    def after_comparison(vector: np.ndarray) -> None:
        with same:
            algorithm(comm, vector)

    return after_comparison


ALGORITHM = Algorithm("auto", steps, lambda comm, x, op=SUM: choose(comm, x)(comm, x, op), prepare, choose)
