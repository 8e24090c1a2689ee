"""A parameter store: a vector cut into slices over servers, from which clients pull and to which they push.

    client: for ever                        server, for its slice
        pull   w <- the store's values          pull: answer when the consistency allows it
        compute g from w                        push: update(w, g), at once or with its round
        push   g

    clients  rank 2 ----- push g[0:n/2] ---->  rank 0   w[0:n/2]    update
             rank 3 ----- push g[n/2:n] ---->  rank 1   w[n/2:n]    update
                  ...  <---- pull w[...] ----

    store = ParameterStore(comm, size, servers=2, consistency=Consistency("ssp", 4), update=add, initial=w0)
    if store.serves:
        store.serve()                           # until all clients have closed
    else:
        while ...:
            store.pull(w)
            ...
            store.push(g)
        store.close(w)

Costs of a step with S servers, W clients and K values: a client sends K and gets K values, in 2 messages a server each
way and one to ask; a server gets W K / S and sends W K / S. With S = 1 the server's link is the bottleneck, which more
servers relieve until S = W. On workers (`on_workers`) each of N ranks is client and server: it sends and gets
2 (N-1)/N K values, as in a ring.

With `rows`, clients exchange only the rows they need, by keys (sparse_keys.py).

The parts: messages (store_messages.py), clients (store_client.py), servers (slice_server.py), consistency and clocks
(consistency.py, clocks.py), and the coordinator of steps (step_coordinator.py).

(Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; Dean et al., NeurIPS 2012)
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU
from hpcdl.memory import Memory
from hpcdl.parameter_server.clocks import ClockProgress, Clocks
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.replication import SliceReplica, backups
from hpcdl.parameter_server.roles import divide
from hpcdl.parameter_server.slice_server import SliceServer
from hpcdl.parameter_server.sparse_keys import VectorRows
from hpcdl.parameter_server.step_coordinator import Lead
from hpcdl.parameter_server.store_client import Asking, Client, Connection, LocalConnection, Subscribed
from hpcdl.parameter_server.store_messages import REQUEST_HEADER, Push, StoreOperation, StoreTag, as_message, new_header
from hpcdl.runs import signals


class AddUpdate:
    """The default update: values <- values + pushed."""

    additive = True

    def of_size(self, size: int) -> "AddUpdate":
        """Return itself: it has no state."""
        return self

    def __call__(self, values: np.ndarray, pushed: np.ndarray, push: Push) -> None:
        values += pushed


add = AddUpdate()


class ParameterStore:
    """A vector of `size` values of `dtype` on servers; a collective call of all ranks of `comm`.

    servers: the first so many ranks hold the slices, the others are clients; on_workers: every rank holds a slice and
    is a client, too. consistency: how far clients may run ahead. update(values, pushed, push): applies what was pushed
    to a server's slice, in place (see `store_messages.Push`; with rounds it is the sum of all pushes of a clock); where
    it has a member `state`, these are vectors as long as the slice; where a member `additive` is true, what it adds
    depends on the push alone, and `of_size(n)` makes one for n values (store_client.py). initial: the whole vector,
    given on rank 0. block: slices are cut at multiples of it only. rows: clients exchange rows of the vector by their
    keys (sparse_keys.py), and slices are cut between rows. broadcast_every: servers send their slices to all clients
    after so many clocks (async: versions), without being asked; 0: never. delay: values are applied so many versions
    late. lead: on rank 0, who decides about steps (step_coordinator.py). start: the first clock. memory: counts what a
    rank holds for it. beside: the numbers, float64, that each push carries to the lead beside its values (`Lead.beside`
    of them); the lead's own do not travel. replicas: on how many servers each slice is (replication.py); an update that
    has a state then has `of_size(n)`, which makes one for another slice, and servers call `replicate` before they
    serve. careful: pushes are acknowledged, as with replicas, also without. progress: of the store whose place this one
    takes.

    `server` is what this rank serves by, `client` what it pulls and pushes by; None where it does not.

    A rank serves one store at a time: two that are used at once need servers of their own, on communicators of their
    own. UsageError where sizes and ranks do not go together.
    """

    server: SliceServer
    client: Client

    def __init__(
        self,
        comm: Communicator,
        size: int,
        dtype: DTypeLike = "float32",
        *,
        servers: int = 1,
        on_workers: bool = False,
        consistency: Consistency = BSP,
        update: Callable = add,
        initial: np.ndarray | None = None,
        block: int = 1,
        rows: VectorRows | None = None,
        broadcast_every: int = 0,
        delay: int = 0,
        lead: Lead | None = None,
        start: int = 0,
        memory: Memory | None = None,
        beside: Callable[[], np.ndarray] | None = None,
        replicas: int = 1,
        careful: bool = False,
        progress: ClockProgress | None = None,
    ):
        if replicas > 1:
            refuse_no_replicas(servers, replicas, on_workers, rows is not None, broadcast_every, delay)
        block = rows.width if rows is not None else block
        check_settings(comm.size, size // block, servers, on_workers, consistency, broadcast_every, delay)
        if rows is not None and broadcast_every:
            raise UsageError("servers that send without being asked send all: leave out keys, or let them be asked")
        self.rows = rows
        self.comm, self.consistency = comm.split(0, name="store", allreduce="tree"), consistency
        holders = comm.size if on_workers else servers
        self.clients = range(comm.size) if on_workers else range(servers, comm.size)
        self.serves, self.works = comm.rank < holders, comm.rank in self.clients
        self.slices = cut_slices(size, holders, block)
        given, self.led = self.comm.mpi.bcast((initial is not None, lead is not None))
        self.server = None  # type: ignore[assignment]  # where this rank does not serve
        self.client = None  # type: ignore[assignment]  # where it does not work
        if self.serves:
            held = self.slices[comm.rank]
            values = CPU.zeros(held.stop - held.start, np.dtype(dtype))
            clocks, gathered = Clocks(self.clients, consistency, start, lead), self.led and comm.rank > 0
            settings = delay, max(1, broadcast_every), gathered, memory
            self.server = SliceServer(self.comm, values, clocks, update, *settings, rows, held)
            if replicas > 1 or careful:
                self._hold_replicas(servers, replicas, update, start, memory)
                if progress is not None:
                    self.server.go_on_from(progress)
        if self.works:
            client_start = start if progress is None else progress.of_client[comm.rank]
            additive_update = update if getattr(update, "additive", False) else None
            self.client = self._make_client(
                np.dtype(dtype), bool(broadcast_every), client_start, memory or Memory(), additive_update
            )
            self.client.beside = beside
            for connection in self.client.connections:
                connection.replicated = replicas > 1 or careful
        if given:
            self.scatter(initial)
        if lead is not None:
            lead.begin(self, start)

    def _hold_replicas(self, servers: int, replicas: int, update: Any, start: int, memory: Memory | None) -> None:
        copies, rank = self.server.copies, self.comm.rank
        copies.careful, copies.backups = True, backups(rank, servers, replicas)
        for primary in [each for each in range(servers) if rank in backups(each, servers, replicas)]:
            size = self.slices[primary].stop - self.slices[primary].start
            values, clocks = CPU.zeros(size, self.server.values.dtype), Clocks(self.clients, self.consistency, start)
            replica_update = update.of_size(size) if hasattr(update, "of_size") else update
            if memory is not None:
                for vector in getattr(replica_update, "state", {}).values():
                    memory.hold("optimizer", vector)
            led = self.led and primary == 0
            self.server.replicas.of[primary] = SliceReplica(values, clocks, replica_update, led, memory)

    def _make_client(self, dtype: np.dtype, subscribed: bool, start: int, memory: Memory, update: Any) -> Client:
        def connect(rank: int, held: slice, start: int) -> Connection:
            if rank == self.comm.rank:
                return LocalConnection(self.comm, self.server, held, start)
            return Connection(self.comm, rank, held, start)

        connections = [connect(rank, held, start) for rank, held in enumerate(self.slices)]
        attend = self.server.attend if self.serves else None
        settings = self.comm, connections, dtype, self.consistency, attend, start
        if not subscribed:
            return Asking(*settings, rows=self.rows)
        return Subscribed(*settings, counter=connect(0, slice(0, 0), 0), memory=memory, update=update)

    # -- clients -----------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """This client's clock: the number of its pushes."""
        return self.client.clock

    @property
    def apart_seconds(self) -> float:
        """Seconds that the lead spent on other work than steps, as far as this client knows."""
        return self.client.connections[0].apart_seconds

    def pull(self, into: np.ndarray, part: slice | None = None) -> int | None:
        """Set `into` to the store's values, all or those of `part`, as fresh as the consistency demands; waits for
        them.

        Returns the step to compute (the client's clock, under async the next value of a shared counter), or None if
        none is left. If servers broadcast, it takes the received values, and waits only if they are too old; `into` is
        then the whole vector, the same array each time.
        """
        return self.client.pull(into, part)

    def push(
        self,
        values: np.ndarray,
        part: slice | None = None,
        count: float = 1.0,
        total: float = 1.0,
        loss: float = 0.0,
        norm: float = 0.0,
    ) -> None:
        """Send `values` (all, or those of `part`) to the servers, which apply them; advances this client's clock.

        count, total, loss, norm: for the update and the lead (see `store_messages.Push`).
        """
        self.client.push(values, part, count=count, total=total, loss=loss, norm=norm)

    def peek(self, into: np.ndarray) -> None:
        """Set `into` to all present values without taking a step, for actors."""
        self._asking.fetch(StoreOperation.PEEK, into)

    def draw(self) -> int | None:
        """Return the next step of the shared counter, without values; None if none is left. For async with keys."""
        return self._asking.draw()

    def pull_at(self, into: np.ndarray, keys: np.ndarray) -> int | None:
        """As `pull`, for the rows with these keys (int64, sorted, unique) and the elements of no row.

        Under async it gives out no step: use `draw`.
        """
        return self._asking.pull_at(into, keys)

    def push_at(
        self, values: np.ndarray, count: float = 1.0, total: float = 1.0, loss: float = 0.0, norm: float = 0.0
    ) -> None:
        """As `push`, for the elements pulled last; sets them to zero in `values`, the whole vector."""
        self._asking.push_at(values, count=count, total=total, loss=loss, norm=norm)

    @property
    def _asking(self) -> Asking:
        assert isinstance(self.client, Asking)  # `rows` and `broadcast_every` exclude each other
        return self.client

    def close(self, into: np.ndarray | None = None) -> None:
        """Close this client. Returns when all clients have closed; `into` gets the final values."""
        self.client.close(into)
        if self.serves:
            self.serve()

    # -- servers -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until all clients have closed."""
        self.server.serve()
        if self.led and self.comm.rank == 0:
            over = new_header(REQUEST_HEADER, operation=StoreOperation.OVER)
            for rank in range(1, len(self.slices)):
                self.comm.push(as_message(over), rank, StoreTag.REQUEST)

    def attend(self, *_: object) -> None:
        """Answer requests that have arrived, if this rank is a server, too; for calls during computing."""
        if self.serves:
            self.server.inbox.look()
            self.server.attend()

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    @property
    def granted(self) -> int:
        """Steps below have been given out."""
        return self.server.clocks.granted

    def scatter(self, whole: np.ndarray | None, which: int = 0) -> None:
        """Give each server its slice of rank 0's vector; before the first pull. which: as in `gather`."""
        if self.comm.rank == 0:
            assert whole is not None
            for rank, held in enumerate(self.slices[1:], 1):
                self.comm.push(whole[held], rank, StoreTag.VALUES)
            self.server.vector(which)[:] = whole[self.slices[0]]
        elif self.serves:
            self.comm.wait(self.server.vector(which), 0, StoreTag.VALUES)

    def gather(self, whole: np.ndarray, which: int = 0, needs: float = -math.inf, finish: bool = False) -> None:
        """Set `whole` to the servers' vectors; on rank 0, while it serves. For scores and checkpoints.

        which: 0, the values, or 1, 2, ...: vectors of the update's state. needs: clock that each server has to reach
        first. finish: apply delayed updates first.
        """
        others = [Connection(self.comm, rank, held) for rank, held in enumerate(self.slices[1:], 1)]
        for connection in others:
            connection.expect(whole[connection.slice], StoreTag.GATHERED)
            request = new_header(
                REQUEST_HEADER,
                operation=StoreOperation.FINISH if finish else StoreOperation.PULL,
                reply=StoreTag.GATHERED,
                which=which,
                stop=connection.slice.stop - connection.slice.start,
                needs=needs,
                signal=bool(signals.received),
            )
            connection.ask(request)
        if finish:
            self.server.apply_delayed()
        whole[self.slices[0]] = self.server.vector(which)
        self.comm.wait_until(lambda: all(connection.arrived for connection in others))
        for each in others:
            self.server.lead.sent(each.rank, float(each.answer["bytes"]), float(each.answer["messages"]))

    def replicate(self) -> None:
        """Copy the slices to their replicas; on all servers, once they are filled, before they serve."""
        if self.serves:
            self.server.copies.begin()
            self.server.replicas.begin()

    def free(self) -> None:
        """Free the communicator; collective, after `close` and `serve`."""
        self.comm.free()


def cut_slices(size: int, holders: int, block: int = 1) -> list[slice]:
    """Return the slices of `holders` servers of a vector, cut at multiples of `block`."""
    slices = [slice(cut.start * block, cut.stop * block) for cut in chunks(size // block, holders)]
    return [*slices[:-1], slice(slices[-1].start, size)]


def refuse_no_replicas(
    servers: int, replicas: int, on_workers: bool, keyed: bool, broadcast_every: int, delay: int
) -> None:
    """Raise UsageError if these servers or settings allow no such replicas."""
    if replicas > servers:
        raise UsageError(
            f"{replicas} replicas of each slice need {replicas} servers, not {servers}: take --servers {replicas}"
        )
    for unfit, name in (
        (on_workers, "--servers-on-workers"),
        (keyed, "--sparse-push"),
        (broadcast_every, "--broadcast-every"),
        (delay, "--fixed-delay"),
    ):
        if unfit:
            raise UsageError(f"--replicas {replicas}: {name} has no replicas of its slices; leave out one of them")


def check_settings(
    ranks: int,
    units: int,
    servers: int,
    on_workers: bool,
    consistency: Consistency,
    broadcast_every: int = 0,
    delay: int = 0,
) -> None:
    """Raise UsageError if so many ranks cannot serve `units` indivisible blocks."""
    consistency.checked()
    holders = ranks if on_workers else servers
    if holders < 1:
        raise UsageError(f"a parameter store needs at least one server, not {holders}")
    if not on_workers:
        divide(ranks, servers)
    if holders > units:
        raise UsageError(f"{holders} servers cannot share {units} parameters; take {units} or fewer")
    if broadcast_every < 0 or (broadcast_every and broadcast_every > consistency.bound + 1):
        raise UsageError(
            f"servers that send after every {broadcast_every} clocks need workers that may be {broadcast_every - 1} "
            f"clocks ahead: take a staleness of {broadcast_every - 1} or more, or send after every clock"
        )
    if delay < 0 or (delay and consistency.name == "ssp"):
        raise UsageError("a fixed delay is a number of versions, for bsp and async: ssp has clocks of its own")
