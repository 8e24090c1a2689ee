"""Clients of a parameter store: they push, and pull in one of two ways.

    Asking                                        Subscribed
        request from all servers; wait for all        subscribe once; from then on servers broadcast
                                                      take the received values; wait only if too old

A subscriber saves the request and its latency, and may compute with older values than necessary. Under async it still
requests its next step, one ahead, so that the number is there when needed.

Under ssp a client sees the effect of all of its own pushes (read-my-writes; Ho et al., NeurIPS 2013, section 2). An
asking client does, since its push precedes its request. A broadcast may lack a subscriber's last pushes: it adds their
changes, which it knows only if they depend neither on the values nor on a state of the update.

A server on this very rank is called directly, and calls back; no message is sent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.requests import Request
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, device_of
from hpcdl.memory import Memory
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.slice_server import Beside, SliceServer, StoreRequest
from hpcdl.parameter_server.sparse_keys import VectorRows
from hpcdl.parameter_server.store_messages import (
    ANSWER_HEADER,
    ENDED,
    REQUEST_HEADER,
    Push,
    StoreOperation,
    StoreTag,
    as_message,
    new_header,
    tell_sent,
)
from hpcdl.runs import signals


class OwnPush(NamedTuple):
    """Change of a server's values by one of this client's pushes. clock: its number. part: of the whole vector."""

    clock: int
    part: slice
    change: Any  # Array


class Connection:
    """A client's view of one server: its rank, its slice of the vector, and the pending answer.

    own: a subscriber's pushes that the last values lack; missing: those of them not yet added. seen, version: the
    store's clock and version in the last answer read; so too `apart_seconds`, of rank 0. signalled: True if that rank
    had a signal.
    """

    local = False

    def __init__(self, comm: Communicator, rank: int, held: slice, start: int = 0):
        self.comm, self.rank, self.slice = comm, rank, held
        self.seen, self.version, self.apart_seconds, self.signalled = float(start), float(start), 0.0, False
        self.answer = new_header(ANSWER_HEADER)
        self.values: Any = None  # np.ndarray | None: receives the answer's values
        self.requests: list[Request] = []
        self.replicated = False  # True if pushes are acknowledged (replication.py)
        self.own: list[OwnPush] = []
        self.missing: list[OwnPush] = []

    def expect(self, values: np.ndarray | None, tag: int = StoreTag.ANSWER) -> None:
        """Post the receives of an answer: a header, and values if there is an array for them."""
        self.values = values
        arrays = [as_message(self.answer), *([] if values is None else [values])]
        self.requests = [self.comm.iwait(array, self.rank, tag + i) for i, array in enumerate(arrays)]

    @property
    def arrived(self) -> bool:
        """True if the answer is complete."""
        return all(request.done for request in self.requests)

    def read(self) -> None:
        """Take over the fields of the header."""
        self.seen, self.version = float(self.answer["seen"]), float(self.answer["version"])  # copies, not views
        self.apart_seconds = float(self.answer["apart"])
        self.signalled |= bool(self.answer["signal"])

    @property
    def step(self) -> int | None:
        """The step that the answer gives; None if none is left."""
        return None if self.answer["step"] == ENDED else int(self.answer["step"])

    def ask(self, request: np.ndarray, keys: np.ndarray | None = None) -> None:
        """Send a request, with keys if given."""
        self.comm.ipush(as_message(tell_sent(request, self.comm.traffic, keys)), self.rank, StoreTag.REQUEST)
        if keys is not None:
            self.comm.ipush(keys, self.rank, StoreTag.VALUES)

    def push(self, request: np.ndarray, values: np.ndarray) -> list[Request]:
        """Send values; return the pending sends, and the receipt if replicas give one."""
        tell_sent(request, self.comm.traffic, values)
        receipts = [self.comm.iwait(np.empty(1), self.rank, StoreTag.RECEIPT)] if self.replicated else []
        sent = self.comm.ipush(as_message(request), self.rank, StoreTag.REQUEST)
        return [sent, self.comm.ipush(values, self.rank, StoreTag.VALUES), *receipts]


class LocalConnection(Connection):
    """The connection to a server on this very rank."""

    local = True

    def __init__(self, comm: Communicator, server: SliceServer, held: slice, start: int = 0):
        super().__init__(comm, comm.rank, held, start)
        self.server, self.delivered = server, True

    def expect(self, values: np.ndarray | None, tag: int = StoreTag.ANSWER) -> None:
        self.values, self.delivered = values, False

    @property
    def arrived(self) -> bool:
        return self.delivered

    def ask(self, request: np.ndarray, keys: np.ndarray | None = None) -> None:
        self.server.handle_own(StoreRequest(request, self.rank, self._deliver), keys)

    def push(self, request: np.ndarray, values: np.ndarray) -> list[Request]:
        buffer = self.server.buffer()
        buffer[: values.size] = values
        self.server.handle_own(StoreRequest(request, self.rank), buffer)
        return []

    def _deliver(self, answer: np.ndarray, values: np.ndarray | None) -> None:
        """Take the server's answer."""
        self.answer[...], self.delivered = answer, True
        if values is not None:
            self.values[:] = values


class Client:
    """Common part of both clients. connections: to all servers, in the order of their slices; attend: serves requests
    on this rank while the client waits."""

    def __init__(
        self,
        comm: Communicator,
        connections: list[Connection],
        dtype: np.dtype,
        consistency: Consistency,
        attend: Callable | None,
        start: int = 0,
    ):
        self.comm, self.connections, self.dtype, self.consistency = comm, connections, dtype, consistency
        self.size, self.attend, self.clock = connections[-1].slice.stop, attend, start
        self.drawn = 0  # the step of the last pull
        # A server on this rank comes last, since a step that it completes may be scored, which waits for the other
        # servers; rank 0 comes before it, so that it learns the traffic to the others.
        self.beside: Beside | None = None
        self.others_first = sorted(connections, key=lambda each: (each.local, each.rank == 0))

    def pull(self, into: np.ndarray, part: slice | None) -> int | None:
        """Set `into` to the store's values (see `ParameterStore.pull`)."""
        raise NotImplementedError

    def close(self, into: np.ndarray | None) -> None:
        """Close. Returns when all clients have closed; `into` gets the final values."""
        self.fetch(StoreOperation.LAST, into)

    def push(self, values: np.ndarray, part: slice | None, **amounts: float) -> None:
        """Send each server its part of the values."""
        part, sent = self.checked(values, part), []
        for connection in self.others_first:
            common = overlap(connection.slice, part)
            request = self.request(StoreOperation.PUSH, connection, common, which=self.drawn, **amounts)
            sent += connection.push(request, within(values, part, common))
            if self.beside is not None and connection.rank == 0 and not connection.local:
                sent.append(self.comm.ipush(self.beside.pack(), 0, StoreTag.BESIDE))
        self.wait_until(lambda: all(request.done for request in sent))
        self.clock += 1

    def fetch(self, operation: StoreOperation, into: np.ndarray | None, part: slice | None = None) -> int | None:
        """Request `part` from all servers and wait for it; return the step of the first server's answer."""
        if into is None:
            into, part = np.empty(0, self.dtype), slice(0, 0)
        part = self.checked(into, part)
        common = [overlap(connection.slice, part) for connection in self.others_first]
        for connection, each in zip(self.others_first, common, strict=True):
            connection.expect(within(into, part, each))
        for connection, each in zip(self.others_first, common, strict=True):
            connection.ask(self.request(operation, connection, each))
        self.wait_until(lambda: all(connection.arrived for connection in self.connections))
        for connection in self.connections:
            connection.read()
        step = self.connections[0].step
        self.drawn = self.drawn if step is None else step
        return step

    def request(
        self, operation: StoreOperation, connection: Connection, part: slice | None = None, **numbers: float
    ) -> np.ndarray:
        """Return the header of a request for a part of the whole vector within the server's slice."""
        first, part = connection.slice.start, part or connection.slice
        numbers = {"reply": StoreTag.ANSWER, "start": part.start - first, "stop": part.stop - first} | numbers
        return new_header(
            REQUEST_HEADER,
            operation=operation,
            clock=self.clock,
            needs=self.clock - self.consistency.bound,
            seen=connection.seen,
            version=connection.version,
            signal=bool(signals.received) or any(each.signalled for each in self.connections),  # for rank 0
            **numbers,
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, and serve meanwhile where this rank does."""
        self.comm.wait_until(condition, self.attend)

    def checked(self, array: np.ndarray, part: slice | None) -> slice:
        """The part of the whole vector that `array` is for; UsageError where it is of another length or type."""
        start, stop, step = (part or slice(None)).indices(self.size)
        if step != 1:
            raise UsageError(f"a part of a parameter store is a slice of consecutive elements, not {part}")
        if array.size != max(0, stop - start) or array.dtype != self.dtype:
            raise UsageError(
                f"the store has {max(0, stop - start)} values of {self.dtype} for elements {start} to {stop}; "
                f"the array has {array.size} of {array.dtype}"
            )
        return slice(start, stop)


class Asking(Client):
    """A client that requests values when it needs them. rows: maps keys to elements; None: no keys."""

    def __init__(self, *arguments: Any, rows: VectorRows | None = None, **options: Any):
        super().__init__(*arguments, **options)
        self.rows = rows
        self.touched: list[tuple[Connection, np.ndarray]] = []  # elements of the last keys by server

    def pull(self, into: np.ndarray, part: slice | None) -> int | None:
        return self.fetch(StoreOperation.PULL, into, part)

    def draw(self) -> int | None:
        """Return the next step of the shared counter; None if none is left."""
        first = self.connections[0]
        first.expect(None)
        first.ask(self.request(StoreOperation.DRAW, first))
        self.wait_until(lambda: first.arrived)
        first.read()
        return first.step

    def pull_at(self, into: np.ndarray, keys: np.ndarray) -> int | None:
        """As `pull`, for the elements of these sorted, unique keys; the other elements of `into` are unchanged."""
        assert self.rows is not None
        self.checked(into, None)
        server_keys = [self.rows.within(keys, each.slice) for each in self.others_first]
        self.touched = [
            (c, self.rows.elements(k, c.slice)) for c, k in zip(self.others_first, server_keys, strict=True)
        ]
        for connection, elements in self.touched:
            connection.expect(np.empty(len(elements), self.dtype))
        for connection, each in zip(self.others_first, server_keys, strict=True):
            connection.ask(self.request(StoreOperation.KEYS, connection, start=0, stop=len(each)), each)
        self.wait_until(lambda: all(connection.arrived for connection in self.connections))
        for connection, elements in self.touched:
            connection.read()
            into[connection.slice][elements] = connection.values
        return self.connections[0].step

    def push_at(self, values: np.ndarray, **amounts: float) -> None:
        """Send each server its elements of the last keys, and set them to zero in `values`, for the next gradient."""
        self.checked(values, None)
        sent: list[Request] = []
        for connection, elements in self.touched:
            server_values = values[connection.slice]
            message = server_values[elements]
            server_values[elements] = 0
            request = self.request(StoreOperation.PUSH_AT, connection, None, start=0, stop=len(elements), **amounts)
            sent += connection.push(request, message)
        self.wait_until(lambda: all(request.done for request in sent))
        self.clock += 1


class Subscribed(Client):
    """A client that receives broadcasts from its first pull on. counter: connection to the server that gives out the
    steps.

    memory: counts the receive buffers. update: the servers' update, if it is additive.
    """

    def __init__(self, *arguments: Any, counter: Connection, memory: Memory, update: Any = None, **options: Any):
        super().__init__(*arguments, **options)
        self.counter, self.memory, self.subscribed = counter, memory, False
        self.update = update if shows_own_pushes(self.consistency) else None
        self.received: set[int] = set()  # servers that have sent values
        self.closed: set[int] = set()  # servers that have sent their last values

    def pull(self, into: np.ndarray, part: slice | None) -> int | None:
        if part is not None:
            raise UsageError("servers that send without being asked send all: pull without a part")
        self.checked(into, None)
        if not self.subscribed:
            self._subscribe()
        self.wait_until(lambda: self._take_newest(into) and self._may_go_on())
        for connection in self.connections:
            for own in connection.missing:
                into[own.part] += own.change
            connection.missing = []
        if self.consistency.clocked:
            return None if self.connections[0].step is None else self.clock
        step = self.counter.step
        if step is not None:
            self._draw()
        return step

    def push(self, values: np.ndarray, part: slice | None, **amounts: float) -> None:
        super().push(values, part, **amounts)
        part = self.checked(values, part)
        if self.update is None:
            return
        for connection in self.connections:
            common, clock, seen = overlap(connection.slice, part), self.clock - 1, int(connection.seen)
            pushed = within(values, part, common)
            fields = {"step": clock, "staleness": clock - seen, "version": int(connection.version)} | amounts
            push: Any = Push(client=self.comm.rank, part=common, clock=clock, seen=seen, **fields)  # type: ignore[arg-type]
            change = device_of(pushed).zeros(pushed.size, self.dtype)
            self.update.of_size(pushed.size)(change, pushed, push)
            own_push = OwnPush(clock, common, self.memory.hold_until_freed("parameters", change))
            connection.own.append(own_push)
            connection.missing.append(own_push)

    def close(self, into: np.ndarray | None) -> None:
        if not self.subscribed:
            super().close(into)
            return
        into = np.empty(self.size, self.dtype) if into is None else into
        self.checked(into, None)
        self.wait_until(lambda: self.counter.arrived)  # the step requested ahead
        for connection in self.others_first:
            connection.ask(self.request(StoreOperation.LAST, connection, reply=StoreTag.UNASKED))
        self.wait_until(lambda: self._take_newest(into) and len(self.closed) == len(self.connections))

    def _subscribe(self) -> None:
        self.subscribed = True
        for connection in self.connections:
            held = connection.slice
            values = self.memory.hold("parameters", CPU.empty(held.stop - held.start, self.dtype))
            connection.expect(values, StoreTag.UNASKED)
            connection.ask(self.request(StoreOperation.SUBSCRIBE, connection))
        if not self.consistency.clocked:
            self._draw()

    def _draw(self) -> None:
        """Request the next step."""
        self.counter.expect(None)
        self.counter.ask(self.request(StoreOperation.DRAW, self.counter))

    def _take_newest(self, into: np.ndarray) -> bool:
        """Copy received values into `into`; True if all servers have sent some."""
        for connection in self.connections:
            while connection.arrived and connection.rank not in self.closed:
                device_of(into).copy_in(into[connection.slice], connection.values)
                connection.read()
                connection.own = [each for each in connection.own if each.clock >= connection.answer["step"]]
                connection.missing = list(connection.own)
                self.received.add(connection.rank)
                if connection.answer["last"]:
                    self.closed.add(connection.rank)
                else:
                    connection.expect(connection.values, StoreTag.UNASKED)
        return len(self.received) == len(self.connections)

    def _may_go_on(self) -> bool:
        """True if the parameters are fresh enough for the next step, or no step is left."""
        if not self.consistency.clocked:
            return self.counter.arrived
        first = self.connections[0]
        if first.step is None:
            return True
        fresh = all(each.seen >= self.clock - self.consistency.bound for each in self.connections)
        return fresh and self.clock < float(first.answer["limit"])


def shows_own_pushes(consistency: Consistency) -> bool:
    """True if clients see their own pushes without waiting for those of all."""
    return consistency.name == "ssp" and not consistency.in_rounds


def overlap(held: slice, requested: slice) -> slice:
    """Return the intersection of two slices; an empty slice at the beginning of `held` if there is none."""
    start, stop = max(held.start, requested.start), min(held.stop, requested.stop)
    return slice(start, stop) if start < stop else slice(held.start, held.start)


def within(array: np.ndarray, part: slice, common: slice) -> np.ndarray:
    """Return the elements `common` of `array`, which holds the elements `part` of the whole vector."""
    return array[common.start - part.start : common.stop - part.start]
