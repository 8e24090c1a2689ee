"""What would hurt a run on these ranks: each rank looks around itself, and checks judge what all have seen.

A check is a function of the facts of all ranks that returns rows (what, found, verdict, advice). A verdict is `ok`,
`note` (worth knowing) or `hurts`: the run would fail, or would waste most of what it was given. `hpcdl doctor` prints
all rows; a training run warns at its start of what hurts among those that cost nothing to find.

    check        hurts when
    mpi          ranks have different libraries, or different versions of hpcdl and what it stands on
    mpiexec      run alone: the mpiexec that a shell finds starts programs of another library
    world        a world of one where a launcher has started several (world.py)
    hosts        never
    cores        the threads of ranks outnumber the cores that these ranks may use, by OMP_NUM_THREADS or by binding
    load         others take half of the ranks' cores, or more
    room         /dev/shm has less room than MPI and the scratch blocks of all ranks take
    hdf5         never
    gpus         never
    cache        the compile cache cannot be written, or several hosts share it over a network
    clocks       never
    network      never
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import h5py
from mpi4py import MPI

from hpcdl import shared_memory
from hpcdl.formatting import counted
from hpcdl.kernels.shared import BYTES
from hpcdl.machine import world as launched
from hpcdl.machine.facts import Facts, all_facts, quick_facts
from hpcdl.machine.network import VECTOR, LinkSpeed, bandwidth_share, measure_all_reduce, measure_links

log = logging.getLogger("hpcdl")
OK, NOTE, HURTS = "ok", "note", "hurts"
MPI_ROOM = {launched.OPEN_MPI: 16 << 20}  # bytes of /dev/shm that the library takes for each rank
OTHER_ROOM = 2 << 20  # MPICH: 1.1 MB seen
SMALL_MODEL = 10_000_000  # parameters: where there is no room for so many, that is worth knowing
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "afs", "panfs", "wekafs", "pvfs2", "9p", "fuse.")
SPARE = 0.25  # of a core, that others may take unnoticed
SHARED = 0.5  # of the cores
SLOWER = "ranks wait for cores, and take fewer BLAS threads: wait, or take other cores"
APART = 1.0  # seconds between the clocks of two hosts that are worth knowing
ETHERNET = 1e9  # bytes per second between hosts below which it is no fast network
SLOW = 0.5  # of the median bandwidth: a link worth naming


class CheckRow(NamedTuple):
    what: str
    found: str
    verdict: str = OK
    advice: str = ""


# -- judging ---------------------------------------------------------------------------------------------------------


def mpi(facts: list[Facts]) -> list[CheckRow]:
    """One library, and one set of versions, on all ranks."""
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
            rows.append(CheckRow(what, found, HURTS, "start all ranks from one environment, which all hosts see"))
    return rows


def mpiexec(size: int, library: str, found: list[tuple[str, str | None]]) -> list[CheckRow]:
    """Whether the launcher at hand is of the library that Python uses; found: as `launched.mpiexecs` gives it."""
    if not found:
        return [
            CheckRow("mpiexec", "none on the PATH or beside Python", NOTE, launched.launch_advice(library, os.environ))
        ]
    path, other = found[0]
    text = f"{path} ({other or 'does not say of which MPI'})"
    if launched.compatible(library, other):
        return [CheckRow("mpiexec", text)]
    own = next((path for path, other in found if other and launched.compatible(library, other)), None)
    advice = f"this Python's MPI is {library}: " + (f"start with {own}" if own else f"get {library}'s mpiexec")
    return [CheckRow("mpiexec", text, NOTE if size > 1 else HURTS, advice)]


def world(size: int, library: str, environ: Mapping[str, str] = os.environ) -> list[CheckRow]:
    """The size of the world against what the launcher says."""
    problem = launched.split_world(size, environ, library)
    if problem is not None:
        return [CheckRow("world", problem[0], HURTS, problem[1])]
    aside = launched.alone_in_allocation(size, environ, library)
    if aside is not None:
        return [CheckRow("world", aside[0], NOTE, aside[1])]
    found = launched.launch(environ, library)
    if found is None:
        return [CheckRow("world", counted(size, "rank") + ", started alone" * (size == 1))]
    text = f"{counted(size, 'rank')}, started by {found.by}"
    if found.ranks != size and found.variable != "MPI_LOCALNRANKS":
        return [
            CheckRow("world", f"{text}, which says {found.ranks} ({found.variable})", NOTE, "a part of a larger job?")
        ]
    return [CheckRow("world", text)]


def hosts(facts: list[Facts]) -> list[CheckRow]:
    """Ranks per host."""
    sizes = [len(ranks) for ranks in group_by_node(facts)]
    if len(set(sizes)) == 1:
        each = f", {counted(sizes[0], 'rank')} each" if len(sizes) > 1 else f", {counted(sizes[0], 'rank')}"
        return [CheckRow("hosts", f"{format_hosts(ranks[0].host for ranks in group_by_node(facts))}{each}")]
    text = ", ".join(f"{ranks[0].host} {len(ranks)}" for ranks in group_by_node(facts)[:8])
    advice = "the host with most ranks sets the pace: as many on each, if all hosts are alike"
    return [CheckRow("hosts", f"ranks per host: {text}" + ", ..." * (len(sizes) > 8), NOTE, advice)]


def cores(facts: list[Facts]) -> list[CheckRow]:
    """Threads of ranks against the cores that they may use."""

    def judge(ranks: list[Facts]) -> CheckRow:
        usable, machine = set().union(*(f.cores for f in ranks)), max(f.machine for f in ranks)
        by = next((f" ({f.variable})" for f in ranks if f.variable), "")
        blas = f"BLAS threads per rank: {spread([f.blas for f in ranks])}{by}"
        text = f"{counted(len(ranks), 'rank')} on {len(usable)} of {counted(machine, 'core')}, {blas}"
        among, narrow = crowded_ranks(ranks)
        if not among:
            return CheckRow("cores", text)
        if len(among) < len(ranks):
            text += f"; {len(among)} of them have {counted(len(narrow), 'core')} only"
        fits, (most, variable) = max(1, len(narrow) // len(among)), max((f.blas, f.variable) for f in among)
        fewer = f"start at most {counted(len(narrow), 'rank')} there" * (len(among) > len(narrow))
        if variable and most > fits:
            return CheckRow("cores", text, HURTS, f"export {variable}={fits}" + f", and {fewer}" * bool(fewer))
        if len(narrow) < machine:
            more = "ask for more cores (--cpus-per-task), or have the launcher bind ranks otherwise (--bind-to none)"
            return CheckRow("cores", text, HURTS, more)
        return CheckRow("cores", text, NOTE, f"ranks wait for each other's core: {fewer}")

    return per_host(facts, judge)


def crowded_ranks(ranks: list[Facts]) -> tuple[list[Facts], set[int]]:
    """Ranks of a host whose threads outnumber all the cores that they may use, and these cores: the worst such set.

    By Hall's theorem threads find a core each if, and only if, no set of them is larger than the cores it may use; it
    suffices to look at the ranks confined to one rank's cores, where two ranks' cores are the same, apart or nested.
    """
    worst: tuple[list[Facts], set[int]] = [], set()
    excess = 1.0
    for room in {frozenset(f.cores) for f in ranks}:
        among = [f for f in ranks if room.issuperset(f.cores)]
        if sum(f.blas for f in among) / len(room) > excess:
            worst, excess = (among, set(room)), sum(f.blas for f in among) / len(room)
    return worst


def busy(facts: list[Facts]) -> list[CheckRow]:
    """Cores that others have taken since the ranks began to start."""

    def judge(ranks: list[Facts]) -> CheckRow:
        usable = len(set().union(*(f.cores for f in ranks)))
        if any(f.spare is None for f in ranks):
            return CheckRow("load", "not known")
        others = max(0.0, usable - sum(f.spare for f in ranks if f.spare is not None))
        text = f"others take {others:.1f} of {counted(usable, 'core')}"
        if others < SPARE:
            return CheckRow("load", text)
        return CheckRow("load", text, HURTS if others >= SHARED * usable else NOTE, SLOWER)

    return per_host(facts, judge)


def pools(facts: list[Facts]) -> list[CheckRow]:
    """What thread pools the libraries have made; a run gives BLAS the number above, and kernels use one thread."""
    return per_host(facts, lambda ranks: CheckRow("threads", f"{ranks[0].pools} before a run sets them"))


def room(facts: list[Facts], library: str) -> list[CheckRow]:
    """Room in /dev/shm for MPI, scratch blocks, parameters and gradients."""

    def judge(ranks: list[Facts]) -> CheckRow:
        n = ranks[0].machine if len(facts) == 1 else len(ranks)  # run alone: as if there were a rank for each core
        need, have = n * (MPI_ROOM.get(library, OTHER_ROOM) + BYTES), ranks[0].room
        if have is None:
            return CheckRow("/dev/shm", "there is none", HURTS, "mount a tmpfs there; a container takes the host's")
        text = f"{format_bytes(have)} free; {counted(n, 'rank')} would take {format_bytes(need)}"
        text += " and 8 bytes for each parameter"
        if have < need:
            return CheckRow("/dev/shm", text, HURTS, launched.ENLARGE)
        largest = (have - need) // (8 * n)
        if largest < SMALL_MODEL:
            text += f": models of up to {largest:,} parameters; larger ones exchange messages instead"
            return CheckRow("/dev/shm", text, NOTE, launched.ENLARGE)
        return CheckRow("/dev/shm", text)

    return per_host(facts, judge)


def tight(ranks: list[Facts]) -> CheckRow | None:
    """Whether a host has no room for the scratch blocks of its ranks alone."""
    have, need = ranks[0].room or 0, len(ranks) * BYTES
    if len(ranks) == 1 or have >= need:
        return None
    return CheckRow(
        "/dev/shm",
        f"{format_bytes(have)} free, where {len(ranks)} ranks want {format_bytes(need)}",
        HURTS,
        launched.ENLARGE,
    )


def leftovers(facts: list[Facts]) -> list[CheckRow]:
    """What ended jobs have left in /dev/shm."""

    def judge(ranks: list[Facts]) -> CheckRow | None:
        if not (left := ranks[0].leftovers):
            return None
        paths = " ".join(f"{shared_memory.FOLDER}/{pattern}" for pattern in left)
        text = f"{format_bytes(sum(left.values()))} older than an hour, of MPI jobs that were killed"
        return CheckRow("left behind", text, NOTE, f"if no MPI program runs there: rm {paths}")

    return per_host(facts, judge)


def hdf5(facts: list[Facts]) -> list[CheckRow]:
    """What HDF5 can do: hpcdl needs no parallel one, for each rank reads by itself and rank 0 writes."""
    parallel = "parallel" if h5py.get_config().mpi else "not parallel, which is enough here"
    return [CheckRow("HDF5", f"{h5py.version.hdf5_version}, by h5py {h5py.__version__}, {parallel}")]


def gpus(facts: list[Facts]) -> list[CheckRow]:
    """GPUs of each host against its ranks; whether MPI takes arrays on them."""

    def judge(ranks: list[Facts]) -> CheckRow:
        seen = {gpu for f in ranks for gpu in f.gpus}
        if not seen and ranks[0].no_gpu:
            return CheckRow("GPUs", "there is one, which hpcdl cannot use", NOTE, ranks[0].no_gpu)
        if not seen:
            return CheckRow("GPUs", "none: runs take --device cpu", NOTE)
        text = f"{counted(len(seen), 'GPU')} for {counted(len(ranks), 'rank')}"
        if len(seen) < len(ranks):
            return CheckRow(
                "GPUs", text, NOTE, "ranks share them, and wait for each other: a rank for each GPU is best"
            )
        return CheckRow("GPUs", text)

    rows = per_host(facts, judge)
    if any(f.gpus for f in facts):
        aware = all(f.cuda_aware for f in facts)
        text = "yes" if aware else "no: messages from a GPU pass through the host's memory"
        advice = (
            "" if aware else "if the site has an MPI made for its GPUs, build mpi4py for it (make install MPI=site)"
        )
        rows.append(CheckRow("CUDA-aware MPI", text, OK if aware else NOTE, advice))
    return rows


def cache(facts: list[Facts]) -> list[CheckRow]:
    """The compile cache: written by this user, and on a disk of the host."""
    several = len(group_by_node(facts)) > 1

    def judge(ranks: list[Facts]) -> CheckRow:
        folder, kind, problem = ranks[0].cache
        text = f"{folder} ({kind or 'unknown file system'})"
        advice = "export NUMBA_CACHE_DIR=/tmp/$USER-numba, or another folder on a disk of each host"
        if problem:
            return CheckRow("compile cache", f"{text}: {problem}", HURTS, advice)
        if kind.startswith(NETWORK):
            text += ": over a network, where hosts that compile at once can spoil it"
            return CheckRow("compile cache", text, HURTS if several else NOTE, advice)
        return CheckRow("compile cache", text)

    return per_host(facts, judge)


def clocks(facts: list[Facts]) -> list[CheckRow]:
    """How far the clocks of hosts are apart."""
    if len(group_by_node(facts)) == 1:
        return []
    first, last = min(facts, key=lambda f: f.clock), max(facts, key=lambda f: f.clock)
    apart = last.clock - first.clock
    text = f"{apart:.6f} s apart at most ({first.host}, {last.host})"
    if apart > APART:
        advice = "times of files and logs do not fit together: have the clocks set (chrony, ntp); traces are corrected"
        return [CheckRow("clocks", text, NOTE, advice)]
    return [CheckRow("clocks", text)]


def network(facts: list[Facts], links: list[LinkSpeed], seconds: dict[str, float]) -> list[CheckRow]:
    """Latency and bandwidth of links; the all-reduce (seconds by algorithm) as a part of the slowest bandwidth."""
    if not links:
        return []
    host, within = {f.rank: f.host for f in facts}, len(group_by_node(facts)) == 1
    where = "within the host" if within else "between hosts"
    bandwidths = sorted(link.bandwidth for link in links)
    least, middle = bandwidths[0], bandwidths[len(links) // 2]
    verdict, advice = OK, ""
    slow = [f"{host[link.a]} to {host[link.b]}" for link in links if link.bandwidth < SLOW * middle]
    if slow:
        verdict, advice = NOTE, f"slower than the others: {', '.join(slow[:4])}" + ", ..." * (len(slow) > 4)
    elif not within and middle < ETHERNET:
        verdict = NOTE
        advice = "if the hosts have a faster network, this MPI does not use it: take the site's (make install MPI=site)"
    parts = {name: bandwidth_share(least, len(facts), taken) for name, taken in seconds.items()}
    each = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms ({parts[name]:.0%} of the bandwidth)" for name in seconds)
    return [
        CheckRow("latency", f"{spread([1e6 * link.latency for link in links])} us {where}"),
        CheckRow("bandwidth", f"{spread([each / 1e9 for each in bandwidths])} GB/s {where}", verdict, advice),
        CheckRow("all-reduce", f"of {VECTOR >> 20} MiB on {len(facts)} ranks: {each}"),
    ]


# -- all together ----------------------------------------------------------------------------------------------------


def examine(comm: MPI.Intracomm, quick: bool = False) -> list[CheckRow]:
    """All rows, on rank 0; nothing on the others. Collective. quick: without the network."""
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
    rows += [
        *cores(seen),
        *busy(seen),
        *pools(seen),
        *room(seen, library),
        *leftovers(seen),
        *hdf5(seen),
        *gpus(seen),
        *cache(seen),
    ]
    return [*rows, *clocks(seen), *network(seen, links, seconds)]


def leaders(facts: list[Facts]) -> list[int]:
    """The first rank of each host; the first two of a single one."""
    nodes = group_by_node(facts)
    return [ranks[0].rank for ranks in nodes] if len(nodes) > 1 else [f.rank for f in nodes[0][:2]]


def warn(comm: MPI.Intracomm, several: bool = True) -> None:
    """Warn, on rank 0 and in a line each, of what would hurt a training run and costs nothing to find; collective.

    several: the strategy works on any number of ranks, so that one alone may be a mistake.
    """
    seen = comm.gather(quick_facts(comm))
    if seen is None:
        return
    aside = launched.alone_in_allocation(comm.size, os.environ, launched.library()) if several else None
    rows = [CheckRow("world", aside[0], NOTE, aside[1])] if aside else []
    rows += [row for row in [*cores(seen), *busy(seen)] if row.verdict == HURTS] + per_host(seen, tight)
    for row in rows:
        log.warning("%s: %s; %s (hpcdl doctor says more)", row.what, row.found, row.advice)


def group_by_node(facts: Iterable[Facts]) -> list[list[Facts]]:
    """The facts of each host's ranks."""
    nodes: dict[int, list[Facts]] = {}
    for each in facts:
        nodes.setdefault(each.node, []).append(each)
    return list(nodes.values())


def per_host(facts: list[Facts], judge: Callable[[list[Facts]], CheckRow | None]) -> list[CheckRow]:
    """What is to be said of each host; what is the same for several is said once, and of which."""
    nodes = group_by_node(facts)
    said: dict[CheckRow, list[str]] = {}
    for ranks in nodes:
        row = judge(ranks)
        if row is not None:
            said.setdefault(row, []).append(ranks[0].host)
    everywhere = [len(where) == len(nodes) for where in said.values()]
    return [
        row if everyone else row._replace(found=f"{format_hosts(where)}: {row.found}")
        for (row, where), everyone in zip(said.items(), everywhere, strict=True)
    ]


def format_hosts(of_hosts: Iterable[str]) -> str:
    """A few hosts by name, many by number."""
    found = list(of_hosts)
    return ", ".join(found) if len(found) <= 4 else f"{len(found)} hosts ({found[0]}, {found[1]}, ...)"


def spread(values: list[float]) -> str:
    """The least and the largest, in three digits; one of them where they look the same."""
    return " to ".join(dict.fromkeys(f"{float(f'{value:.3g}'):g}" for value in (min(values), max(values))))


def format_bytes(size: int) -> str:
    """Bytes in words."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return counted(size, "byte")
