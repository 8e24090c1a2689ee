"""Settings of a parameter store: who holds which slice, how servers serve, and how they replicate.

    StoreLayout    size, ranks, servers, ...       ->  servers, clients, slices
    Serving        consistency, broadcasts, delay
    Replication    replicas, acknowledgements, the store whose place this one takes

Pure: no messages, no values.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from numpy.typing import DTypeLike

from hpcdl.chunks import chunks
from hpcdl.errors import UsageError
from hpcdl.parameter_server.clocks import ClockProgress
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.roles import divide
from hpcdl.parameter_server.sparse_keys import VectorRows


@dataclass(frozen=True)
class StoreLayout:
    """Who holds which slice of a vector of `size` values of `dtype`, among `ranks` ranks.

    servers: the first so many ranks hold the slices, the others are clients; on_workers: every rank holds a slice and
    is a client, too. block: slices are cut at multiples of it only. rows: clients exchange rows of the vector by their
    keys (sparse_keys.py), and slices are cut between rows.
    """

    size: int
    ranks: int
    dtype: DTypeLike = "float32"
    servers: int = 1
    on_workers: bool = False
    block: int = 1
    rows: VectorRows | None = None

    @property
    def holders(self) -> range:
        """The ranks that hold slices."""
        return range(self.ranks if self.on_workers else self.servers)

    @property
    def clients(self) -> range:
        """The ranks that pull and push."""
        return range(0 if self.on_workers else self.servers, self.ranks)

    @property
    def unit(self) -> int:
        """The number of values that are never cut apart."""
        return self.block if self.rows is None else self.rows.width

    @cached_property
    def slices(self) -> list[slice]:
        """The slices of the holders, in their order."""
        cuts = [
            slice(c.start * self.unit, c.stop * self.unit) for c in chunks(self.size // self.unit, len(self.holders))
        ]
        return [*cuts[:-1], slice(cuts[-1].start, self.size)]

    def length(self, rank: int) -> int:
        """The number of values that a rank holds; 0 if it is no server."""
        return self.slices[rank].stop - self.slices[rank].start if rank in self.holders else 0


class Serving(NamedTuple):
    """How servers serve.

    consistency: how far clients may run ahead. broadcast_every: servers send their slices to all clients after so many
    clocks (async: versions), without being asked; 0: never. delay: values are applied so many versions late.
    """

    consistency: Consistency = BSP
    broadcast_every: int = 0
    delay: int = 0


class Replication(NamedTuple):
    """How slices are replicated (replication.py).

    replicas: on how many servers each slice is. acknowledged: pushes are acknowledged also without replicas, as in a
    job that has lost some. progress: of the store whose place this one takes.
    """

    replicas: int = 1
    acknowledged: bool = False
    progress: ClockProgress | None = None

    @property
    def careful(self) -> bool:
        """True if pushes are acknowledged, and applied only when they are complete."""
        return self.replicas > 1 or self.acknowledged


ON_REQUEST, UNREPLICATED = Serving(), Replication()  # the defaults of a store


def check_replicas(replicas: int, servers: int, on_workers: bool, keyed: bool, serving: Serving) -> None:
    """Raise UsageError if these servers or settings allow no such replicas."""
    if replicas == 1:
        return
    if replicas > servers:
        raise UsageError(
            f"{replicas} replicas of each slice need {replicas} servers, not {servers}: take --servers {replicas}"
        )
    for unfit, name in (
        (on_workers, "--servers-on-workers"),
        (keyed, "--sparse-push"),
        (serving.broadcast_every, "--broadcast-every"),
        (serving.delay, "--fixed-delay"),
    ):
        if unfit:
            raise UsageError(f"--replicas {replicas}: {name} has no replicas of its slices; leave out one of them")


def check_store(layout: StoreLayout, serving: Serving) -> None:
    """Raise UsageError if the ranks of the layout cannot serve its vector so."""
    consistency, every, delay = serving
    consistency.checked()
    holders, units = len(layout.holders), layout.size // layout.unit
    if holders < 1:
        raise UsageError(f"a parameter store needs at least one server, not {holders}")
    if not layout.on_workers:
        divide(layout.ranks, layout.servers)
    if holders > units:
        raise UsageError(f"{holders} servers cannot share {units} parameters; take {units} or fewer")
    if every < 0 or (every and every > consistency.bound + 1):
        raise UsageError(
            f"servers that send after every {every} clocks need workers that may be {every - 1} "
            f"clocks ahead: take a staleness of {every - 1} or more, or send after every clock"
        )
    if delay < 0 or (delay and consistency.name == "ssp"):
        raise UsageError("a fixed delay is a number of versions, for bsp and async: ssp has clocks of its own")
    if layout.rows is not None and every:
        raise UsageError("servers that send without being asked send all: leave out keys, or let them be asked")
