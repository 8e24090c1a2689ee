"""A parameter store: a vector cut into slices over servers, from which clients pull and to which they push.

    client: for ever                        server, for its slice
        pull   w <- the store's values          pull: answer when the consistency allows it
        compute g from w                        push: update(w, g), at once or with its round
        push   g

    clients  rank 2 ----- push g[0:n/2] ---->  rank 0   w[0:n/2]    update
             rank 3 ----- push g[n/2:n] ---->  rank 1   w[n/2:n]    update
                  ...  <---- pull w[...] ----

    layout, serving = StoreLayout(size, comm.size, servers=2), Serving(Consistency("ssp", 4))
    store = ParameterStore(comm, layout, serving, update=add, initial=w0)
    if store.serves:
        store.serve()                           # until all clients have closed
    else:
        while ...:
            store.pull(w)
            ...
            store.push(g)
        store.close(w)

Rank 0, a server, may count steps: `horizon` says how many there are and which have to wait, and it takes them up as

    for loss, total in store.completed_steps():      # serves; a step is complete when all of its pushes are applied
        ...                                          # no requests are answered until this is done

Costs of a step with S servers, W clients and K values: a client sends K and gets K values, in 2 messages a server each
way and one to ask; a server gets W K / S and sends W K / S. With S = 1 the server's link is the bottleneck, which more
servers relieve until S = W. On workers (`on_workers`) each of N ranks is client and server: it sends and gets
2 (N-1)/N K values, as in a ring.

With `rows`, clients exchange only the rows they need, by keys (sparse_keys.py).

The parts: settings (store_settings.py), messages (store_messages.py), clients (store_client.py), servers
(slice_server.py), consistency and clocks (consistency.py, clocks.py), replicas (replication.py).

(Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; Dean et al., NeurIPS 2012)
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.kernels.device import CPU
from hpcdl.memory import Memory
from hpcdl.parameter_server.clocks import Clocks, Horizon
from hpcdl.parameter_server.replication import SliceReplica, backups
from hpcdl.parameter_server.slice_server import Beside, SliceServer
from hpcdl.parameter_server.store_client import Asking, Client, Connection, LocalConnection, Subscribed
from hpcdl.parameter_server.store_messages import REQUEST_HEADER, Push, StoreOperation, StoreTag, as_message, new_header
from hpcdl.parameter_server.store_settings import (
    ON_REQUEST,
    UNREPLICATED,
    Replication,
    Serving,
    StoreLayout,
    check_replicas,
    check_store,
)
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
    """A vector on servers, by its layout (store_settings.py); a collective call of all ranks of `comm`.

    update(values, pushed, push): applies what was pushed to a server's slice, in place (see `store_messages.Push`; with
    rounds it is the sum of all pushes of a clock); where it has a member `state`, these are vectors as long as the
    slice; where a member `additive` is true, what it adds depends on the push alone, and `of_size(n)` makes one for n
    values (store_client.py); with replicas, one that has a state needs `of_size`, too, and servers call `replicate`
    before they serve. initial: the whole vector, given on rank 0. start: the first clock. horizon(), given on rank 0 if
    that counts steps: how far clients may go. memory: counts what a rank holds for it. beside: what pushes carry to
    rank 0 beside their values.

    `server` is what this rank serves by, `client` what it pulls and pushes by; None where it does not.

    A rank serves one store at a time: two that are used at once need servers of their own, on communicators of their
    own. UsageError where sizes and ranks do not go together.
    """

    server: SliceServer
    client: Client

    def __init__(
        self,
        comm: Communicator,
        layout: StoreLayout,
        serving: Serving = ON_REQUEST,
        replication: Replication = UNREPLICATED,
        *,
        update: Callable = add,
        initial: np.ndarray | None = None,
        start: int = 0,
        horizon: Callable[[], Horizon] | None = None,
        memory: Memory | None = None,
        beside: Beside | None = None,
    ):
        check_replicas(replication.replicas, layout.servers, layout.on_workers, layout.rows is not None, serving)
        check_store(layout, serving)
        self.layout, self.consistency, self.memory = layout, serving.consistency, memory or Memory()
        self.comm = comm.split(0, name="store", allreduce="tree")
        self.rows, self.clients, self.slices = layout.rows, layout.clients, layout.slices
        self.serves, self.works = comm.rank in layout.holders, comm.rank in layout.clients
        given, self.led = self.comm.mpi.bcast((initial is not None, horizon is not None))
        self.server = None  # type: ignore[assignment]  # where this rank does not serve
        self.client = None  # type: ignore[assignment]  # where it does not work
        if self.serves:
            values = CPU.zeros(layout.length(comm.rank), np.dtype(layout.dtype))
            clocks = Clocks(self.clients, self.consistency, start, horizon)
            self.server = SliceServer(
                self.comm,
                values,
                clocks,
                update,
                serving.delay,
                max(1, serving.broadcast_every),
                gathered=self.led and comm.rank > 0,
                memory=self.memory,
                rows=layout.rows,
                held=self.slices[comm.rank],
                beside=beside if comm.rank == 0 else None,
            )
            if replication.careful:
                self._hold_replicas(replication, update, start)
        if self.works:
            client_start = start if replication.progress is None else replication.progress.of_client[comm.rank]
            additive_update = update if getattr(update, "additive", False) else None
            self.client = self._make_client(bool(serving.broadcast_every), client_start, additive_update)
            self.client.beside = beside
            for connection in self.client.connections:
                connection.replicated = replication.careful
        if given:
            self.scatter(initial)

    def _hold_replicas(self, replication: Replication, update: Any, start: int) -> None:
        copies, rank, servers = self.server.copies, self.comm.rank, self.layout.servers
        copies.careful, copies.backups = True, backups(rank, servers, replication.replicas)
        for primary in [each for each in range(servers) if rank in backups(each, servers, replication.replicas)]:
            size = self.layout.length(primary)
            values, clocks = CPU.zeros(size, self.server.values.dtype), Clocks(self.clients, self.consistency, start)
            replica_update = update.of_size(size) if hasattr(update, "of_size") else update
            for vector in getattr(replica_update, "state", {}).values():
                self.memory.hold("optimizer", vector)
            led = self.led and primary == 0
            self.server.replicas.of[primary] = SliceReplica(values, clocks, replica_update, led, self.memory)
        if replication.progress is not None:
            self.server.go_on_from(replication.progress)

    def _make_client(self, subscribed: bool, start: int, update: Any) -> Client:
        def connect(rank: int, held: slice, start: int) -> Connection:
            if rank == self.comm.rank:
                return LocalConnection(self.comm, self.server, held, start)
            return Connection(self.comm, rank, held, start)

        connections = [connect(rank, held, start) for rank, held in enumerate(self.slices)]
        attend = self.server.attend if self.serves else None
        settings = self.comm, connections, np.dtype(self.layout.dtype), self.consistency, attend, start
        if not subscribed:
            return Asking(*settings, rows=self.rows)
        return Subscribed(*settings, counter=connect(0, slice(0, 0), 0), memory=self.memory, update=update)

    # -- clients -----------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """This client's clock: the number of its pushes."""
        return self.client.clock

    @property
    def apart_seconds(self) -> float:
        """Seconds that rank 0 spent on other work than steps, as far as this client knows."""
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

        count, total, loss, norm: for the update and for rank 0 (see `store_messages.Push`).
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

    def completed_steps(self) -> Iterator[tuple[float, float]]:
        """Serve until all clients have closed; yield of each complete step the sum of losses and the examples."""
        yield from self.server.completed_steps()
        if self.led and self.comm.rank == 0:
            over = new_header(REQUEST_HEADER, operation=StoreOperation.OVER)
            for rank in range(1, len(self.slices)):
                self.comm.push(as_message(over), rank, StoreTag.REQUEST)

    def serve(self) -> None:
        """Serve until all clients have closed."""
        for loss, total in self.completed_steps():
            self.server.each_step(loss, total)

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

    @property
    def signalled(self) -> bool:
        """True once a client has reported a signal."""
        return self.server.signalled

    @property
    def staleness_histogram(self) -> list[int]:
        """The number of applied pushes by staleness 0, 1, ..., at rank 0's slice."""
        counts = self.server.clocks.staleness
        return [counts[each] for each in range(max(counts, default=-1) + 1)]

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
            self.server.sent.note(each.rank, float(each.answer["bytes"]), float(each.answer["messages"]))

    def replicate(self) -> None:
        """Copy the slices to their replicas; on all servers, once they are filled, before they serve."""
        if self.serves:
            self.server.copies.begin()
            self.server.replicas.begin()

    def free(self) -> None:
        """Free the communicator; collective, after `close` and `serve`."""
        self.comm.free()
