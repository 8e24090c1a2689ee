"""Registration with torch.distributed on `import hpcdl.torch`: the backend's name, and the rendezvous of ranks.

MPI starts with the first process group, not here. A program that sets MASTER_ADDR and MASTER_PORT, RANK and WORLD_SIZE
works unchanged. If these variables are missing, or agree with MPI, any backend (also gloo) gets MPI's rank and size."""

import contextlib
import functools
import importlib
import itertools
import os
import socket
import urllib.parse
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
CONNECT_TIMEOUT = timedelta(seconds=10)  # to reach the store at an address
stores: list[Any] = []  # kept until the program ends: rank 0 may leave the process group before others


def register() -> None:
    """Register the backend, the rendezvous and monitored_barrier, once."""
    if not distributed.is_available() or "hpcdl" in distributed.Backend.backend_list:
        return

    def make(*asked: Any) -> Any:
        return importlib.import_module("hpcdl.torch.groups").make(*asked)  # which starts MPI

    distributed.Backend.register_backend("hpcdl", make, extended_api=True, devices=["cpu", "cuda"])
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function bears the same name
    handlers = rendezvous._rendezvous_handlers
    theirs = handlers["env"]

    def env(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if uses_mpi(url):
            yield from mpi_rendezvous(**options)
        else:
            yield from theirs(url, **options)

    handlers["env"] = env
    rendezvous.register_rendezvous_handler("mpi", lambda url, **options: mpi_rendezvous(**options))
    for module in (distributed, distributed_c10d):
        module.monitored_barrier = wrap_monitored_barrier(module.monitored_barrier)  # type: ignore[attr-defined]


def wrap_monitored_barrier(theirs: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of PyTorch's monitored_barrier, which is for gloo alone: hpcdl's groups use their own."""

    @functools.wraps(theirs)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if distributed_c10d._rank_not_in_group(group) or distributed.get_backend(group) != "hpcdl":
            theirs(group, timeout, wait_all_ranks)
        else:
            ours: Any = group or distributed.group.WORLD
            seconds = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
            ours.monitored_barrier(seconds, wait_all_ranks)

    return monitored_barrier


def uses_mpi(url: str) -> bool:
    """True if MPI defines the ranks: the program's own settings are incomplete, or agree with MPI."""
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))  # rank= and world_size= of the call
    named = [query.get("rank", os.environ.get("RANK")), query.get("world_size", os.environ.get("WORLD_SIZE"))]
    launched = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_ID"))
    if None not in named and (launched or not all(os.environ.get(name) for name in ADDRESS)):
        from mpi4py import MPI

        return named == [str(MPI.COMM_WORLD.rank), str(MPI.COMM_WORLD.size)]
    return None in named or not all(os.environ.get(name) for name in ADDRESS)


def mpi_rendezvous(
    timeout: timedelta = distributed_c10d.default_pg_timeout, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield a store shared by all ranks of MPI's world, this rank, and the number of ranks; collective."""
    from hpcdl.machine import world

    world.start()
    from mpi4py import MPI

    world.check_world(MPI.COMM_WORLD)
    comm = MPI.COMM_WORLD
    store: Any = distributed.HashStore() if comm.size == 1 else shared_store(comm, timeout)
    stores.append(store)
    yield store, comm.rank, comm.size


def shared_store(comm: Any, timeout: timedelta) -> Any:
    """Return a store that rank 0 serves, at an address that all ranks reach, or raise AgreedError; collective."""
    store = None
    if comm.rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    host, port, places = comm.bcast((socket.gethostname(), store.port, addresses()) if store else None)
    problem = None
    if store is None:
        for place in ["127.0.0.1"] if socket.gethostname() == host else places:
            try:
                socket.getaddrinfo(place, None, socket.AF_INET)  # PyTorch's client would retry it for 25 seconds
            except OSError:
                problem = problem or f"{place} is not known to {socket.gethostname()}"
                continue
            try:
                store = distributed.TCPStore(place, port, None, False, CONNECT_TIMEOUT, wait_for_workers=False)
                store.set_timeout(timeout)
                break
            except Exception as error:  # of several kinds
                problem = str(error).splitlines()[0]
        else:
            problem = problem or f"{host} has no address"
    failed = [each for each in comm.allgather(None if store else problem) if each]
    if failed:
        from hpcdl.errors import AgreedError

        raise AgreedError(f"the store of rank 0 on {host} cannot be reached at {', '.join(places)}: {failed[0]}")
    return store


def addresses() -> list[str]:
    """Return this host's name, the addresses of the name, and those that the kernel's routing table marks as local."""
    name, found = socket.gethostname(), []
    with contextlib.suppress(OSError):
        found += [str(about[4][0]) for about in socket.getaddrinfo(name, None, socket.AF_INET)]
    with contextlib.suppress(OSError), open("/proc/net/fib_trie") as file:
        pairs = itertools.pairwise(file.read().splitlines())
        found += [before.split()[-1] for before, line in pairs if "/32 host LOCAL" in line and "|--" in before]
    return [name, *dict.fromkeys(each for each in found if not each.startswith("127."))]
