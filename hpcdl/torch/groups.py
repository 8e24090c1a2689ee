"""Process groups of torch.distributed from MPI's world, and their traffic.

    init_process_group("hpcdl")    all ranks of the world, in MPI's order or in the program's
    new_group(ranks)               only these ranks make the call
    traffic(), write_trace(path)   what all groups have sent together

The communicator of a default group is kept and reused by a later one; those of other groups are freed
(group_cleanup.py). Environment: HPCDL_ALLREDUCE, the algorithm; HPCDL_TRACE, a folder for the program's trace, which is
recorded only then.
"""

import atexit
import contextlib
import dataclasses
import datetime
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed

from hpcdl.comm import Communicator, failure
from hpcdl.comm.failure import refuse_together
from hpcdl.comm.node_memory import cores, ranks_of_node
from hpcdl.errors import UsageError
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
        return BackendGroup(comm, asked.group_id, asked.store, timeout, owns_communicator=False)
    comm, first = subgroup_communicator(ranks, asked.group_id, timeout), distributed.group.WORLD
    limit = 0.0 if isinstance(first, BackendGroup) and first.timeout == timeout else timeout.total_seconds()
    return BackendGroup(
        comm, asked.group_id, asked.store, timeout, limit, owns_communicator=comm not in COMMUNICATORS.values()
    )


def world_communicator(rank: int, size: int, store: Any, timeout: datetime.timedelta) -> Communicator:
    """Return the communicator of the default group; collective over its ranks."""
    if MPI.COMM_WORLD.size > 1:
        failure.install()
    world.check_world(MPI.COMM_WORLD)
    if size > MPI.COMM_WORLD.size:
        raise UsageError(
            f"the process group is to have {size} ranks, and MPI's world has {MPI.COMM_WORLD.size}; start the program "
            f"with mpiexec -n {size} or srun, and leave out rank and world_size"
        )
    if size == MPI.COMM_WORLD.size:
        places = MPI.COMM_WORLD.allgather(rank)
        ranks = [places.index(each) for each in range(size)] if set(places) == set(range(size)) else []
    else:  # some ranks of the world: they exchange their ranks through the store
        store.set(f"hpcdl/{rank}", str(MPI.COMM_WORLD.rank))
        ranks = [int(store.get(f"hpcdl/{each}")) for each in range(size)]
    if not ranks or MPI.COMM_WORLD.rank not in ranks:
        raise UsageError(f"rank {rank} of the process group is there twice; leave out rank and world_size: MPI knows")
    key = tuple(ranks)
    if key not in COMMUNICATORS:
        COMMUNICATORS[key] = open_communicator(ranks, timeout)
    comm = COMMUNICATORS[key]
    if comm.watchdog is not None:
        comm.watchdog.timeout = timeout.total_seconds()
    return comm


def open_communicator(ranks: Sequence[int], timeout: datetime.timedelta) -> Communicator:
    """Make a communicator of these ranks of MPI's world, which make the call together."""
    bare: Any = MPI.COMM_WORLD
    if list(ranks) != list(range(bare.size)):
        everyone = bare.Get_group()
        bare = bare.Create_group(everyone.Incl(list(ranks)), 1)
    node = ranks_of_node(bare)
    engine.spare = cores(node) > node.size * torch.get_num_threads()
    local = node.rank
    node.Free()
    folder = os.environ.get("HPCDL_TRACE")
    comm = Communicator(
        bare,
        os.environ.get("HPCDL_ALLREDUCE", "auto"),
        timeout=timeout.total_seconds(),
        trace=SPANS if folder else 0,
        device=shared_gpu(bare, local),
    )
    if folder:
        with refuse_together(bare):
            if comm.rank == 0:
                try:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise UsageError(f"HPCDL_TRACE={folder}: {error.strerror}") from None
        atexit.register(comm.timeline.write, Path(folder) / "trace.json")
    return comm


def shared_gpu(bare: MPI.Intracomm, local: int) -> Device:
    """Return the GPU whose arrays MPI can take; CPU if CuPy or a GPU is missing on a rank."""
    device: Device = CPU
    if torch.cuda.is_available():
        with contextlib.suppress(UsageError):
            device = open_device("cuda", local)
    return device if bare.allreduce(device is not CPU, MPI.LAND) else CPU


def subgroup_communicator(ranks: list[int], name: str, timeout: datetime.timedelta) -> Communicator:
    """Return the communicator of a subgroup, a part of the default group's if that is ours."""
    parent: Any = distributed.group.WORLD
    with engine.exclusive():
        free_unused()
        if isinstance(parent, BackendGroup):
            return parent.comm.subgroup(ranks, name, zlib.crc32(name.encode()) % 32767)
        key = tuple(ranks)
        if key not in COMMUNICATORS:
            COMMUNICATORS[key] = open_communicator(ranks, timeout)
        return COMMUNICATORS[key]


# -- traffic -----------------------------------------------------------------------------------------------------------


def traffic() -> dict[str, dict[str, Any]]:
    """Return what this rank has sent through the backend, by operation: calls, bytes, messages, seconds,
    blocked_seconds.

    messages is None if MPI's own all-reduce hides them; in shared memory there are none, and bytes are those copied.
    """
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

    Raises UsageError if none are recorded: HPCDL_TRACE has to name a folder from the start.
    """
    group: Any = distributed.group.WORLD
    if not isinstance(group, BackendGroup):
        raise UsageError('there is no process group of the backend hpcdl; call init_process_group("hpcdl") first')
    if not group.comm.timeline.limit:
        raise UsageError("no trace is kept; set HPCDL_TRACE to a folder before init_process_group")
    with engine.exclusive():
        group.comm.timeline.write(path)
