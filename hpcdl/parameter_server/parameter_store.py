"""A parameter store: a vector cut into slices over servers, from which clients pull and to which they push.

    client: for ever                        server, for its slice
        pull   w <- the store's values          pull: answer when the consistency allows it
        compute g from w                        push: update(w, g), at once or with its round
        push   g

    clients  rank 2 ----- push g[0:n/2] ---->  rank 0   w[0:n/2]    update
             rank 3 ----- push g[n/2:n] ---->  rank 1   w[n/2:n]    update
                  ...  <---- pull w[...] ----

A program that uses it: docs/servers.md. Rank 0, a server, may count steps. A step is complete when all of its pushes
are applied. Rank 0 answers no requests in the body of a loop over `completed_steps`.

Costs of a step with S servers, W clients and K values: a client sends K and gets K values, in 2 messages per server
each way and one to ask; a server gets W K / S and sends W K / S. With S = 1 the server's link is the bottleneck, which
more servers relieve until S = W. With `on_workers` each of N ranks is client and server, and sends and gets 2 (N-1)/N K
values, as in a ring. (Li et al., OSDI 2014; Dean et al., NeurIPS 2012)"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.compression import feedback_for, make_codec
from hpcdl.kernels.device import CPU
from hpcdl.memory import Memory
from hpcdl.parameter_server.clocks import Clocks, Horizon
from hpcdl.parameter_server.replication import SliceReplica, backups
from hpcdl.parameter_server.slice_server import Beside, SliceServer
from hpcdl.parameter_server.store_client import Client, Connection, LocalConnection, Subscribed
from hpcdl.parameter_server.store_messages import REQUEST, Push, StoreOperation, StoreTag
from hpcdl.parameter_server.store_settings import (
    ON_REQUEST,
    UNCOMPRESSED,
    UNREPLICATED,
    Replication,
    Serving,
    StoreCompression,
    StoreLayout,
    check_replicas,
    check_store,
)
from hpcdl.runs import signals


class AddUpdate:
    """The default update: values <- values + pushed."""

    additive = True

    def of_size(self, size: int) -> "AddUpdate":
        """Return the update itself: it has no state."""
        return self

    def __call__(self, values: np.ndarray, pushed: np.ndarray, push: Push) -> None:
        values += pushed


add = AddUpdate()
ONE = {"count": 1.0, "total": 1.0, "loss": 0.0, "norm": 0.0}  # amounts of a push of one example


class ParameterStore:
    """A vector on servers, by its layout (store_settings.py). The constructor is a collective call of `comm`.

    update(values, pushed, push): applies pushed values to a server's slice, in place (see `Push`; with rounds they are
    the sum of a clock's pushes). Optional members of `update`: state, a dict of vectors as long as the slice; additive,
    True if what it adds depends on the push alone; of_size(n), which makes an update of n values. An additive update
    needs `of_size`; so does one with a state if there are replicas, and servers then call `replicate` before they
    serve. initial: the whole vector, on rank 0. start: the first clock. horizon(), on rank 0 if it counts steps: how
    far clients may go. memory: counts what a rank holds. beside: further numbers of pushes, for rank 0. server, client:
    this rank's SliceServer and Client, or None. A rank serves one store at a time: two stores used
    at once need servers and communicators of their own. Raises UsageError if sizes and ranks do not fit."""

    server: SliceServer
    client: Client
    keeps_residuals = False  # True if compressed pushes leave residuals at the clients

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
                max(1, serving.broadcast_every),
                delay=serving.delay,
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
        if serving.compression != UNCOMPRESSED:
            self._compress(serving.compression)
        if given:
            self.scatter(initial)

    def _compress(self, compression: StoreCompression) -> None:
        push, pull, seed = compression
        dtype = np.dtype(self.layout.dtype)
        pull_codec = None if pull == "none" else make_codec(pull, dtype)
        if self.serves:
            self.server.push_codec = None if push == "none" else make_codec(push, dtype)
            self.server.pull_codec, self.server.seed = pull_codec, seed
        if self.works:
            feedback = None if push == "none" else feedback_for(push, self.layout.size, dtype)
            if feedback is not None:
                self.memory.hold("optimizer", feedback.residual)
            self.client.compress(feedback, pull_codec, seed)
        self.keeps_residuals = push != "none" and feedback_for(push, 0, dtype).keep

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
            return Client(*settings, rows=self.rows)
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
        """Set `into` to the store's values (all, or those of `part`), as fresh as the consistency demands; may wait.
        Return the step to compute (the client's clock; under async the next of a shared counter); None: none is left.
        With broadcasts `into` is the whole vector, always the same array, and a pull waits only for values too old."""
        return self.client.pull(into, part)

    def push(self, values: np.ndarray, part: slice | None = None, **amounts: float) -> None:
        """Send `values` (all, or those of `part`) to the servers, which apply them; advance this client's clock.
        amounts: count, total (1 by default), loss and norm (0), for the update and for rank 0 (`Push`)."""
        self.client.push(values, part, **ONE | amounts)

    def peek(self, into: np.ndarray) -> None:
        """Set `into` to all present values without taking a step, for actors."""
        self.client.fetch(StoreOperation.PEEK, into)

    def draw(self) -> int | None:
        """Return the next step of the shared counter, without values; None if none is left. For async with keys."""
        return self.client.draw()

    def pull_at(self, into: np.ndarray, keys: np.ndarray) -> int | None:
        """Set in `into`, the whole vector, the rows of these keys (int64, sorted, unique), and the elements of no row.
        Return the step as `pull` does, but under async give out no step: use `draw`."""
        return self.client.pull_at(into, keys)

    def push_at(self, values: np.ndarray, **amounts: float) -> None:
        """Push, as `push` does, the elements of the whole vector `values` that were pulled last; set them to zero."""
        self.client.push_at(values, **ONE | amounts)

    def close(self, into: np.ndarray | None = None) -> None:
        """Close this client, and return when all clients have closed; `into` gets the final values."""
        self.client.close(into)
        if self.serves:
            self.serve()
        self.client.finish()

    # -- servers -----------------------------------------------------------------------------------------------------

    def completed_steps(self) -> Iterator[tuple[float, float]]:
        """Serve until all clients have closed; yield (sum of losses, examples) of each complete step."""
        yield from self.server.completed_steps()
        if self.led and self.comm.rank == 0:
            for rank in range(1, len(self.slices)):
                REQUEST.send(self.comm, rank, REQUEST.header(operation=StoreOperation.OVER))[0].wait()
        if self.keeps_residuals and self.comm.rank == 0:
            for rank in self._other_clients:
                self.comm.push(np.zeros(1), rank, StoreTag.RESIDUAL)

    def serve(self) -> None:
        """Serve until all clients have closed."""
        for loss, total in self.completed_steps():
            self.server.each_step(loss, total)

    def attend(self, *_: object) -> None:
        """Answer the requests that have arrived, if this rank is also a server; for calls while it computes."""
        if self.serves:
            self.server.inbox.look()
            self.server.attend()

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    @property
    def signalled(self) -> bool:
        """True once a client has reported a signal."""
        return self.server.signalled

    @property
    def staleness_histogram(self) -> list[int]:
        """The number of applied pushes by staleness 0, 1, ..., at rank 0's slice."""
        counts = self.server.clocks.staleness
        return [counts[each] for each in range(max(counts, default=-1) + 1)]

    def scatter(self, whole: Any, which: int = 0) -> None:
        """Give each server its slice of rank 0's vector, before the first pull; which: as in `gather`."""
        if self.comm.rank == 0:
            for rank, held in enumerate(self.slices[1:], 1):
                self.comm.push(whole[held], rank, StoreTag.VALUES)
            self.server.vectors[which][:] = whole[self.slices[0]]
        elif self.serves:
            self.comm.wait(self.server.vectors[which], 0, StoreTag.VALUES)

    def gather(self, whole: np.ndarray, which: int = 0, needs: float = -math.inf, finish: bool = False) -> None:
        """On rank 0, while it serves, set `whole` to the servers' vectors, for scores and checkpoints.
        which: 0: the values; 1, 2, ...: vectors of the update's state. needs: clock that each server has to reach
        first. finish: True to apply delayed updates first."""
        others = [Connection(self.comm, rank, held) for rank, held in enumerate(self.slices[1:], 1)]
        operation = StoreOperation.FINISH if finish else StoreOperation.PULL
        for connection in others:
            connection.expect(whole[connection.slice], StoreTag.GATHERED)
            request = REQUEST.header(
                operation=operation,
                reply=StoreTag.GATHERED,
                which=which,
                stop=connection.slice.stop - connection.slice.start,
                needs=needs,
                signal=bool(signals.received),
            )
            connection.ask(request)
        if finish:
            self.server.apply_delayed()
        whole[self.slices[0]] = self.server.vectors[which]
        self.comm.wait_until(lambda: all(connection.arrived for connection in others))
        for each in others:
            self.server.sent.note(each.rank, float(each.answer["bytes"]), float(each.answer["messages"]))

    @property
    def _other_clients(self) -> list[int]:
        return [rank for rank in self.clients if rank > 0]

    def gather_residuals(self) -> np.ndarray:
        """Return, on rank 0, what the clients' compressed pushes have left out, a row each; while clients wait."""
        rows = np.zeros((len(self.clients), self.layout.size), self.layout.dtype)
        if self.works:
            rows[0] = self.client.feedback.residual  # type: ignore[union-attr]
        for rank in self._other_clients:
            self.comm.push(np.ones(1), rank, StoreTag.RESIDUAL)
        for rank in self._other_clients:
            self.comm.wait(rows[self.clients.index(rank)], rank, StoreTag.RESIDUAL_VALUES)
        return rows

    def scatter_residuals(self, rows: Any) -> None:
        """Give each client its row of rank 0's residuals, before the first pull."""
        if self.comm.rank == 0:
            for rank in self._other_clients:
                self.comm.push(rows[self.clients.index(rank)], rank, StoreTag.RESIDUAL_VALUES)
            if self.works:
                self.client.feedback.residual[:] = rows[0]  # type: ignore[union-attr]
        elif self.works:
            self.comm.wait(self.client.feedback.residual, 0, StoreTag.RESIDUAL_VALUES)  # type: ignore[union-attr]

    def replicate(self) -> None:
        """Copy the slices to their replicas; to be called on all servers, with filled slices, before they serve."""
        if self.serves:
            self.server.copies.begin()
            self.server.replicas.begin()

    def free(self) -> None:
        """Free the communicator; collective, after `close` and `serve`."""
        self.comm.free()
