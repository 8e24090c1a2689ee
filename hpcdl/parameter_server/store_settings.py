"""Settings of a parameter store: which ranks hold which slice, how servers serve, and how slices are replicated."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from numpy.typing import DTypeLike

from hpcdl.chunks import chunks
from hpcdl.parameter_server.clocks import ClockProgress
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.roles import divide
from hpcdl.parameter_server.sparse_keys import VectorRows
from hpcdl.runs.options import refuse


@dataclass(frozen=True)
class StoreLayout:
    """Which of `ranks` ranks hold which slice of a vector of `size` values of `dtype`.
    servers: the first ranks, which hold slices; other ranks are clients. on_workers: every rank is both. block: slices
    are cut at its multiples. rows: clients exchange rows by keys (sparse_keys.py); slices are cut between rows."""

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
        """The number of neighbouring values that are never cut apart."""
        return self.block if self.rows is None else self.rows.width

    @cached_property
    def slices(self) -> list[slice]:
        """The slices of the holders, in their order."""
        cuts = [
            slice(c.start * self.unit, c.stop * self.unit) for c in chunks(self.size // self.unit, len(self.holders))
        ]
        return [*cuts[:-1], slice(cuts[-1].start, self.size)]

    def length(self, rank: int) -> int:
        """Return the number of values that a rank holds; 0 if it is no server."""
        return self.slices[rank].stop - self.slices[rank].start if rank in self.holders else 0


class StoreCompression(NamedTuple):
    """Methods of compression (hpcdl/comm/compression) of pushed and of pulled values, and the seed of their draws."""

    push: str = "none"
    pull: str = "none"
    seed: int = 0


UNCOMPRESSED = StoreCompression()


class Serving(NamedTuple):
    """How servers serve. consistency: how far clients may run ahead. delay: versions by which values are applied late.
    broadcast_every: clocks (async: versions) after which servers send their slices to all clients unasked; 0: never."""

    consistency: Consistency = BSP
    broadcast_every: int = 0
    delay: int = 0
    compression: StoreCompression = UNCOMPRESSED


class Replication(NamedTuple):
    """How slices are replicated (replication.py), each on `replicas` servers. progress: of the store that this one
    replaces; None: none. acknowledged: True if pushes are acknowledged without replicas, as servers were lost."""

    replicas: int = 1
    acknowledged: bool = False
    progress: ClockProgress | None = None

    @property
    def careful(self) -> bool:
        """True if pushes are acknowledged, and applied only when they are complete."""
        return self.replicas > 1 or self.acknowledged


ON_REQUEST, UNREPLICATED = Serving(), Replication()  # the defaults of a store


def check_replicas(replicas: int, servers: int, on_workers: bool, keyed: bool, serving: Serving) -> None:
    """Raise UsageError if these servers or settings do not allow `replicas` servers per slice."""
    if replicas == 1:
        return
    few = f"{replicas} replicas of each slice need {replicas} servers, not {servers}: take --servers {replicas}"
    unfit: dict[str, object] = {"--servers-on-workers": on_workers, "--sparse-push": keyed}
    unfit |= {"--broadcast-every": serving.broadcast_every, "--fixed-delay": serving.delay}
    without = f"--replicas {replicas} does not work with {{}}: leave out one of them"
    refuse((replicas > servers, few), *((given, without.format(name)) for name, given in unfit.items()))


def check_store(layout: StoreLayout, serving: Serving) -> None:
    """Raise UsageError if the ranks of the layout cannot serve its vector with these settings."""
    consistency, every, delay, compression = serving
    consistency.checked()
    holders, units = len(layout.holders), layout.size // layout.unit
    refuse((holders < 1, f"a parameter store needs at least one server, not {holders}"))
    if not layout.on_workers:
        divide(layout.ranks, layout.servers)
    seldom, keyed = every < 0 or (every and every > consistency.bound + 1), layout.rows is not None and every
    clocks = f"a broadcast every {every} clocks needs a staleness of {every - 1} or more; or broadcast every clock"
    versions = "a fixed delay is 0 versions or more, for bsp and async; ssp has a staleness instead"
    refuse(
        (holders > units, f"{holders} servers cannot share {units} parameters; take {units} or fewer"),
        (seldom, clocks),
        (delay < 0 or (delay and consistency.name == "ssp"), versions),
        (
            compression != UNCOMPRESSED and layout.rows is not None,
            "keys name other values in each push: leave out the keys, or the compression",
        ),
        (keyed, "servers that broadcast send all values: leave out the keys, or the broadcasts"),
    )
