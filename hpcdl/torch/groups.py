"""Process groups of torch.distributed from MPI's world, and their traffic.

init_process_group("hpcdl") takes all ranks of the world, in MPI's order or in the program's; only the given ranks call
new_group. The communicator of a default group is kept for a later one; communicators of other groups are freed
(group_cleanup.py). Environment: HPCDL_ALLREDUCE names the algorithm, HPCDL_TRACE a folder for the program's trace."""

import atexit
import contextlib
import dataclasses
import datetime
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed

from hpcdl.comm import Communicator, failure
from hpcdl.comm.failure import refuse_together
from hpcdl.comm.node_memory import cores, ranks_of_node
from hpcdl.errors import UsageError, blamed_on
from hpcdl.kernels.device import CPU, Device, open_device
from hpcdl.machine import world
from hpcdl.torch.backend import BackendGroup
from hpcdl.torch.group_cleanup import free_unused
from hpcdl.torch.work import engine

SPANS = 100_000  # most spans of the trace
COMMUNICATORS: dict[tuple[int, ...], Communicator] = {}  # by the ranks of MPI's world


def make(asked: Any, options: Any = None) -> BackendGroup:
    """Return the process group that torch.distributed requests. Raises UsageError if the ranks are not MPI's."""
    ranks, timeout = list(asked.global_ranks_in_group), asked.timeout
    if not ranks:
        comm = world_communicator(asked.group_rank, asked.group_size, asked.store, timeout)
        return BackendGroup(comm, asked.group_id, asked.store, timeout, own=False)
    comm, first = subgroup_communicator(ranks, asked.group_id, timeout), distributed.group.WORLD
    limit = 0.0 if isinstance(first, BackendGroup) and first.timeout == timeout else timeout.total_seconds()
    return BackendGroup(comm, asked.group_id, asked.store, timeout, limit, own=comm not in COMMUNICATORS.values())


def world_communicator(rank: int, size: int, store: Any, timeout: datetime.timedelta) -> Communicator:
    """Return the communicator of the default group; collective over its ranks."""
    if MPI.COMM_WORLD.size > 1:
        failure.install()
    world.check_world(MPI.COMM_WORLD)
    if size > MPI.COMM_WORLD.size:
        advice = f"start the program with mpiexec -n {size} or srun, and leave out rank and world_size"
        raise UsageError(f"init_process_group asks for {size} ranks, and MPI has {MPI.COMM_WORLD.size}; {advice}")
    if size == MPI.COMM_WORLD.size:
        places = MPI.COMM_WORLD.allgather(rank)
        ranks = [places.index(each) for each in range(size)] if set(places) == set(range(size)) else []
    else:  # some ranks of the world: they exchange their ranks through the store
        store.set(f"hpcdl/{rank}", str(MPI.COMM_WORLD.rank))
        ranks = [int(store.get(f"hpcdl/{each}")) for each in range(size)]
    if not ranks or MPI.COMM_WORLD.rank not in ranks:
        raise UsageError(f"init_process_group: rank={rank}, and a rank is there twice; leave out rank and world_size")
    comm = open_communicator(tuple(ranks), timeout)
    comm.set_timeout(timeout.total_seconds())
    return comm


def open_communicator(ranks: tuple[int, ...], timeout: datetime.timedelta) -> Communicator:
    """Return the communicator of these ranks of MPI's world, which must all call this; made at the first call."""
    if ranks in COMMUNICATORS:
        return COMMUNICATORS[ranks]
    bare: Any = MPI.COMM_WORLD
    if list(ranks) != list(range(bare.size)):
        everyone = bare.Get_group()
        bare = bare.Create_group(everyone.Incl(list(ranks)), 1)
    node = ranks_of_node(bare)
    engine.spare = cores(node) > node.size * torch.get_num_threads()
    local = node.rank
    node.Free()
    folder = os.environ.get("HPCDL_TRACE")
    algorithm, trace = os.environ.get("HPCDL_ALLREDUCE", "auto"), SPANS if folder else 0
    device: Device = CPU
    if torch.cuda.is_available():
        with contextlib.suppress(UsageError):
            device = open_device("cuda", local)
    device = device if bare.allreduce(device is not CPU, MPI.LAND) else CPU  # if CuPy or a GPU is missing on a rank
    comm = Communicator(bare, algorithm, timeout=timeout.total_seconds(), trace=trace, device=device)
    if folder:
        with refuse_together(bare), blamed_on(f"HPCDL_TRACE={folder}: the folder cannot be made"):
            if comm.rank == 0:
                Path(folder).mkdir(parents=True, exist_ok=True)
        atexit.register(comm.timeline.write, Path(folder) / "trace.json")
    COMMUNICATORS[ranks] = comm
    return comm


def subgroup_communicator(ranks: list[int], name: str, timeout: datetime.timedelta) -> Communicator:
    """Return a subgroup's communicator, made from the default group's if the default group is of this backend."""
    parent: Any = distributed.group.WORLD
    with engine.exclusive():
        free_unused()
        if isinstance(parent, BackendGroup):
            return parent.comm.subgroup(ranks, name, zlib.crc32(name.encode()) % 32767)
        return open_communicator(tuple(ranks), timeout)


def traffic() -> dict[str, dict[str, Any]]:
    """Return this rank's traffic through the backend by operation: calls, bytes, messages, seconds, blocked_seconds.
    messages is None if MPI's own all-reduce hides them; in shared memory it is 0, and bytes are the copied bytes."""
    rows: dict[str, dict[str, Any]] = {}
    for comm in COMMUNICATORS.values():
        for name, counters in comm.traffic.items():
            row, values = rows.setdefault(name, {}), dataclasses.asdict(counters)
            for key, value in values.items():
                before = row.get(key, 0)
                row[key] = None if before is None or value is None else before + value
    return rows


def write_trace(path: str | Path) -> None:
    """Write the last operations of all ranks as a trace.json, on rank 0; collective over the default group.
    Raises UsageError without a trace: HPCDL_TRACE must be set before init_process_group."""
    group: Any = distributed.group.WORLD
    if not isinstance(group, BackendGroup):
        raise UsageError('there is no process group of the backend hpcdl; call init_process_group("hpcdl") first')
    if not group.comm.timeline.limit:
        raise UsageError("no trace is recorded; set HPCDL_TRACE to a folder before init_process_group")
    with engine.exclusive():
        group.comm.timeline.write(path)
