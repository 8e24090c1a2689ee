"""Doctor: checks of the environment for problems of a run, judged from the facts of all ranks.

A check is a function of the facts of all ranks that returns rows (what, found, verdict, advice). A verdict is `ok`,
`note` (worth knowing) or `hurts`: the run would fail, or waste most of its resources. `hpcdl doctor` prints all rows;
at its start a training run warns of the rows of cheap checks that hurt."""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import h5py
from mpi4py import MPI

from hpcdl import shared_memory
from hpcdl.formatting import counted
from hpcdl.kernels.shared import BYTES
from hpcdl.machine import world as launched
from hpcdl.machine.facts import Facts, all_facts, quick_facts
from hpcdl.machine.load import SPARE
from hpcdl.machine.network import VECTOR, LinkSpeed, bandwidth_share, measure_all_reduce, measure_links

log = logging.getLogger("hpcdl")
OK, NOTE, HURTS = "ok", "note", "hurts"
MPI_ROOM = {launched.OPEN_MPI: 16 << 20}  # bytes of /dev/shm that the library needs for each rank
OTHER_ROOM = 2 << 20  # MPICH: 1.1 MB measured
SMALL_MODEL = 10_000_000  # parameters; room for less of them is worth a note
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "afs", "panfs", "wekafs", "pvfs2", "9p", "fuse.")
SHARED = 0.5  # of the cores: a larger load hurts
SLOWER = "ranks wait for cores and use fewer BLAS threads: wait until the other processes end, or use other cores"
APART = 1.0  # seconds between two hosts' clocks that are worth a note
ETHERNET = 1e9  # bytes per second between hosts: slower is not a fast network
SLOW = 0.5  # of the median bandwidth: the advice names slower links


class CheckRow(NamedTuple):
    what: str
    found: str
    verdict: str = OK
    advice: str = ""


def each_host(judge: Callable[..., CheckRow | None]) -> Callable[..., list[CheckRow]]:
    """Return a check that calls judge(facts of one host, number of hosts, ...) for each host; equal rows become one."""

    @functools.wraps(judge)
    def check(facts: list[Facts], *more: Any) -> list[CheckRow]:
        nodes, said = group_by_node(facts), dict[CheckRow, list[str]]()
        for ranks in nodes:
            row = judge(ranks, len(nodes), *more)
            if row is not None:
                said.setdefault(row, []).append(ranks[0].host)
        return [
            row if len(where) == len(nodes) else row._replace(found=f"{format_hosts(where)}: {row.found}")
            for row, where in said.items()
        ]

    return check


def mpi(facts: list[Facts]) -> list[CheckRow]:
    """Check for one MPI library, and one set of versions, on all ranks; different ones hurt."""
    rows = []
    for what, each in {
        "MPI": [f"{f.library}, by mpi4py {f.versions.get('mpi4py', '')}" for f in facts],
        "versions": [", ".join(f"{name} {v}" for name, v in f.versions.items() if name != "mpi4py") for f in facts],
    }.items():
        if len(set(each)) == 1:
            rows.append(CheckRow(what, each[0]))
        else:
            other = next(i for i, text in enumerate(each) if text != each[0])
            found = f"rank 0: {each[0]}; rank {other} on {facts[other].host}: {each[other]}"
            rows.append(CheckRow(what, found, HURTS, "start all ranks from one environment that all hosts share"))
    return rows


def mpiexec(size: int, library: str, found: list[tuple[str, str | None]]) -> list[CheckRow]:
    """Check that the first of the mpiexecs `found` fits `library`; a wrong one hurts only a rank that is alone."""
    if not found:
        advice = launched.launch_advice(library, os.environ)
        return [CheckRow("mpiexec", "no mpiexec on the PATH or beside Python", NOTE, advice)]
    path, other = found[0]
    text = f"{path} ({other or 'MPI library unknown'})"
    if launched.compatible(library, other):
        return [CheckRow("mpiexec", text)]
    own = next((path for path, other in found if other and launched.compatible(library, other)), None)
    advice = f"this Python's MPI is {library}: " + (f"start with {own}" if own else f"install {library}'s mpiexec")
    return [CheckRow("mpiexec", text, NOTE if size > 1 else HURTS, advice)]


def world(size: int, library: str, environ: Mapping[str, str] = os.environ) -> list[CheckRow]:
    """Compare the size of the world with the launcher's number of processes; several worlds of one rank hurt."""
    if problem := launched.split_world(size, environ, library):
        return [CheckRow("world", problem[0], HURTS, problem[1])]
    if aside := launched.alone_in_allocation(size, environ, library):
        return [CheckRow("world", aside[0], NOTE, aside[1])]
    found = launched.launch(environ, library)
    if found is None:
        return [CheckRow("world", counted(size, "rank") + ", started alone" * (size == 1))]
    text = f"{counted(size, 'rank')}, started by {found.by}"
    if found.ranks == size or found.variable == "MPI_LOCALNRANKS":
        return [CheckRow("world", text)]
    text = f"{text}, whose job has {counted(found.ranks, 'rank')} ({found.variable})"
    return [CheckRow("world", text, NOTE, "make sure that this world is meant to be a part of a larger job")]


def hosts(facts: list[Facts]) -> list[CheckRow]:
    """Report the ranks per host; unequal numbers are a note."""
    sizes = [len(ranks) for ranks in group_by_node(facts)]
    if len(set(sizes)) == 1:
        named = format_hosts(ranks[0].host for ranks in group_by_node(facts))
        return [CheckRow("hosts", f"{named}, {counted(sizes[0], 'rank')}" + " each" * (len(sizes) > 1))]
    text = ", ".join(f"{ranks[0].host} {len(ranks)}" for ranks in group_by_node(facts)[:8])
    advice = "the host with the most ranks slows down all others: on equal hosts, start equal numbers of ranks"
    return [CheckRow("hosts", f"ranks per host: {text}" + ", ..." * (len(sizes) > 8), NOTE, advice)]


@each_host
def cores(ranks: list[Facts], hosts: int) -> CheckRow:
    """Compare the ranks' threads with their usable cores; too many hurt if due to a binding or OMP_NUM_THREADS."""
    usable, machine = set().union(*(f.cores for f in ranks)), max(f.machine for f in ranks)
    by = next((f" ({f.variable})" for f in ranks if f.variable), "")
    blas = f"BLAS threads per rank: {spread([f.blas for f in ranks])}{by}"
    text = f"{counted(len(ranks), 'rank')} on {len(usable)} of {counted(machine, 'core')}, {blas}"
    among, narrow = crowded_ranks(ranks)
    if not among:
        return CheckRow("cores", text)
    if len(among) < len(ranks):
        text += f"; {len(among)} of these ranks may use only {counted(len(narrow), 'core')}"
    fits, (most, variable) = max(1, len(narrow) // len(among)), max((f.blas, f.variable) for f in among)
    fewer = f"start at most {counted(len(narrow), 'rank')} on these cores" * (len(among) > len(narrow))
    if variable and most > fits:
        return CheckRow("cores", text, HURTS, f"export {variable}={fits}" + f", and {fewer}" * bool(fewer))
    if len(narrow) < machine:
        more = "request more cores (Slurm: --cpus-per-task), or do not bind ranks to cores (mpiexec: --bind-to none)"
        return CheckRow("cores", text, HURTS, more)
    return CheckRow("cores", text, NOTE, f"ranks share cores and wait for each other: {fewer}")


def crowded_ranks(ranks: list[Facts]) -> tuple[list[Facts], set[int]]:
    """Return the worst set of a host's ranks whose threads outnumber the cores that they may use, and these cores.
    By Hall's theorem each thread finds a core of its own if and only if no set of threads is larger than its set of
    cores. It suffices to check the ranks confined to each rank's cores, as core sets are equal, disjoint or nested."""
    worst: tuple[list[Facts], set[int]] = [], set()
    excess = 1.0
    for room in {frozenset(f.cores) for f in ranks}:
        among = [f for f in ranks if room.issuperset(f.cores)]
        if sum(f.blas for f in among) / len(room) > excess:
            worst, excess = (among, set(room)), sum(f.blas for f in among) / len(room)
    return worst


@each_host
def busy(ranks: list[Facts], hosts: int) -> CheckRow:
    """Report the cores that other processes have taken since the ranks started; half of the cores or more hurt."""
    usable = len(set().union(*(f.cores for f in ranks)))
    if any(f.spare is None for f in ranks):
        return CheckRow("load", "the load of other processes is unknown")
    others = max(0.0, usable - sum(f.spare for f in ranks if f.spare is not None))
    text = f"other processes use {others:.1f} of {counted(usable, 'core')}"
    if others < SPARE:
        return CheckRow("load", text)
    return CheckRow("load", text, HURTS if others >= SHARED * usable else NOTE, SLOWER)


@each_host
def pools(ranks: list[Facts], hosts: int) -> CheckRow:
    """Report the libraries' default thread pools; a run sets BLAS to its share of cores, and kernels to one thread."""
    return CheckRow("threads", f"{ranks[0].pools} (defaults; a run sets its own numbers)")


@each_host
def room(ranks: list[Facts], hosts: int, library: str) -> CheckRow:
    """Check the room in /dev/shm; too little for MPI and scratch blocks hurts, for large models it is a note."""
    n = ranks[0].machine if hosts == len(ranks) == 1 else len(ranks)  # run alone: assume a rank for each core
    need, have = n * (MPI_ROOM.get(library, OTHER_ROOM) + BYTES), ranks[0].room
    if have is None:
        advice = "mount a tmpfs at /dev/shm; in a container, bind the host's /dev/shm"
        return CheckRow("/dev/shm", "there is no /dev/shm", HURTS, advice)
    takes = f"{counted(n, 'rank')} would need {format_bytes(need)}, and 8 bytes per rank and parameter"
    text = f"{format_bytes(have)} free; {takes}"
    if have < need:
        return CheckRow("/dev/shm", text, HURTS, launched.ENLARGE)
    largest = (have - need) // (8 * n)
    if largest < SMALL_MODEL:
        text += f": enough for {largest:,} parameters; ranks of larger models exchange messages instead"
        return CheckRow("/dev/shm", text, NOTE, launched.ENLARGE)
    return CheckRow("/dev/shm", text)


@each_host
def tight(ranks: list[Facts], hosts: int) -> CheckRow | None:
    """Return a row if a host's /dev/shm has no room even for the scratch blocks of its ranks, which hurts."""
    have, need = ranks[0].room or 0, len(ranks) * BYTES
    if len(ranks) == 1 or have >= need:
        return None
    text = f"{format_bytes(have)} free, but {len(ranks)} ranks need {format_bytes(need)}"
    return CheckRow("/dev/shm", text, HURTS, launched.ENLARGE)


@each_host
def leftovers(ranks: list[Facts], hosts: int) -> CheckRow | None:
    """Report files of killed jobs in /dev/shm."""
    if not (left := ranks[0].leftovers):
        return None
    paths = " ".join(f"{shared_memory.FOLDER}/{pattern}" for pattern in left)
    text = f"{format_bytes(sum(left.values()))} in files of killed MPI jobs, older than an hour"
    return CheckRow("left behind", text, NOTE, f"if no MPI program is running on that host: rm {paths}")


def hdf5(facts: list[Facts]) -> list[CheckRow]:
    """Report HDF5's features; parallel HDF5 is not needed, as each rank reads by itself and rank 0 writes."""
    parallel = "parallel" if h5py.get_config().mpi else "not parallel (hpcdl needs no parallel HDF5)"
    return [CheckRow("HDF5", f"{h5py.version.hdf5_version}, by h5py {h5py.__version__}, {parallel}")]


@each_host
def host_gpus(ranks: list[Facts], hosts: int) -> CheckRow:
    """Compare the GPUs of a host with its ranks."""
    seen = {gpu for f in ranks for gpu in f.gpus}
    if not seen and ranks[0].no_gpu:
        return CheckRow("GPUs", "this host has a GPU, but hpcdl cannot use it", NOTE, ranks[0].no_gpu)
    if not seen:
        return CheckRow("GPUs", "none: runs use --device cpu", NOTE)
    text = f"{counted(len(seen), 'GPU')} for {counted(len(ranks), 'rank')}"
    advice = "ranks share GPUs and wait for each other: start one rank for each GPU"
    return CheckRow("GPUs", text, NOTE, advice) if len(seen) < len(ranks) else CheckRow("GPUs", text)


def gpus(facts: list[Facts]) -> list[CheckRow]:
    """Compare the GPUs of each host with its ranks; report whether MPI is CUDA-aware."""
    rows = host_gpus(facts)
    if any(f.gpus for f in facts):
        aware = all(f.cuda_aware for f in facts)
        text = "yes" if aware else "no: messages from a GPU pass through the host's memory"
        advice = "if the site has an MPI made for its GPUs, build mpi4py for it (make install MPI=site)"
        rows.append(CheckRow("CUDA-aware MPI", text, *((OK, "") if aware else (NOTE, advice))))
    return rows


@each_host
def cache(ranks: list[Facts], hosts: int) -> CheckRow:
    """Check that the compile cache is writable, and not shared by several hosts over a network; else it hurts."""
    folder, kind, problem = ranks[0].cache
    text = f"{folder} ({kind or 'unknown file system'})"
    advice = "export NUMBA_CACHE_DIR=/tmp/$USER-numba, or another folder on each host's own disk"
    if problem:
        return CheckRow("compile cache", f"{text}: {problem}", HURTS, advice)
    if kind.startswith(NETWORK):
        text += ": on a network file system, where hosts that compile at the same time can damage the cache"
        return CheckRow("compile cache", text, HURTS if hosts > 1 else NOTE, advice)
    return CheckRow("compile cache", text)


def clocks(facts: list[Facts]) -> list[CheckRow]:
    """Report the largest offset between the clocks of hosts; no row for a single host."""
    if len(group_by_node(facts)) == 1:
        return []
    first, last = min(facts, key=lambda f: f.clock), max(facts, key=lambda f: f.clock)
    apart = last.clock - first.clock
    text = f"{apart:.6f} s apart at most ({first.host}, {last.host})"
    advice = "times in files and logs of different hosts disagree: set the clocks (chrony, ntp); traces are corrected"
    return [CheckRow("clocks", text, *((NOTE, advice) if apart > APART else ()))]


def network(facts: list[Facts], links: list[LinkSpeed], seconds: dict[str, float]) -> list[CheckRow]:
    """Report latency and bandwidth of links, and the share of the slowest link that all-reduces (by name) reach."""
    if not links:
        return []
    host, within = {f.rank: f.host for f in facts}, len(group_by_node(facts)) == 1
    where = "within the host" if within else "between hosts"
    bandwidths = sorted(link.bandwidth for link in links)
    least, middle = bandwidths[0], bandwidths[len(links) // 2]
    verdict, advice = OK, ""
    slow = [f"{host[link.a]} to {host[link.b]}" for link in links if link.bandwidth < SLOW * middle]
    if slow:
        verdict, advice = NOTE, f"links below half the median: {', '.join(slow[:4])}" + ", ..." * (len(slow) > 4)
    elif not within and middle < ETHERNET:
        verdict = NOTE
        advice = "if the hosts have a faster network, this MPI does not use it: use the site's (make install MPI=site)"
    parts = {name: bandwidth_share(least, len(facts), taken) for name, taken in seconds.items()}
    each = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms ({parts[name]:.0%} of the bandwidth)" for name in seconds)
    return [
        CheckRow("latency", f"{spread([1e6 * link.latency for link in links])} us {where}"),
        CheckRow("bandwidth", f"{spread([each / 1e9 for each in bandwidths])} GB/s {where}", verdict, advice),
        CheckRow("all-reduce", f"of {VECTOR >> 20} MiB on {len(facts)} ranks: {each}"),
    ]


def examine(comm: MPI.Intracomm, quick: bool = False) -> list[CheckRow]:
    """Return all rows on rank 0, no rows on other ranks; collective. quick: True to leave out the network."""
    seen = comm.gather(all_facts(comm))
    links, seconds = [], {}
    if comm.size > 1 and not quick:
        players = comm.bcast(None if seen is None else leaders(seen))
        links = measure_links(comm, players)
        seconds = {name: measure_all_reduce(comm, name) for name in ("ring", "mpi")}
    if seen is None:
        return []
    library = launched.library()
    rows = [*mpi(seen), *mpiexec(comm.size, library, launched.mpiexecs()), *world(comm.size, library), *hosts(seen)]
    rows += [*cores(seen), *busy(seen), *pools(seen), *room(seen, library), *leftovers(seen), *hdf5(seen)]
    return [*rows, *gpus(seen), *cache(seen), *clocks(seen), *network(seen, links, seconds)]


def leaders(facts: list[Facts]) -> list[int]:
    """Return the first rank of each host, or the first two ranks of a single host."""
    nodes = group_by_node(facts)
    return [ranks[0].rank for ranks in nodes] if len(nodes) > 1 else [f.rank for f in nodes[0][:2]]


def warn(comm: MPI.Intracomm, several: bool = True, quiet: bool = False) -> None:
    """Warn on rank 0 of the problems of a training run that cheap checks find, a line for each; collective. several:
    True if the strategy runs on any number of ranks, so that a single rank may be a mistake. quiet: True to leave out
    what passes, the load of others."""
    seen = comm.gather(quick_facts(comm))
    if seen is None:
        return
    aside = launched.alone_in_allocation(comm.size, os.environ, launched.library()) if several else None
    rows = [CheckRow("world", aside[0], NOTE, aside[1])] if aside else []
    load = [] if quiet else busy(seen)
    rows += [row for row in [*cores(seen), *load] if row.verdict == HURTS] + tight(seen)
    for row in rows:
        log.warning("%s: %s; %s (hpcdl doctor says more)", row.what, row.found, row.advice)


def group_by_node(facts: Iterable[Facts]) -> list[list[Facts]]:
    """Group the facts by host."""
    nodes: dict[int, list[Facts]] = {}
    for each in facts:
        nodes.setdefault(each.node, []).append(each)
    return list(nodes.values())


def format_hosts(of_hosts: Iterable[str]) -> str:
    """Return a few hosts by name, many by their number."""
    found = list(of_hosts)
    return ", ".join(found) if len(found) <= 4 else f"{len(found)} hosts ({found[0]}, {found[1]}, ...)"


def spread(values: list[float]) -> str:
    """Return the smallest and the largest value in three digits, or one value if both look equal."""
    return " to ".join(dict.fromkeys(f"{float(f'{value:.3g}'):g}" for value in (min(values), max(values))))


def format_bytes(size: int) -> str:
    """Return bytes as text, such as 1.5 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return counted(size, "byte")
