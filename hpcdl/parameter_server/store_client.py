"""Clients of a parameter store: they push, and pull in one of two ways.

    Asking                                        Subscribed
        request from all servers; wait for all        subscribe once; from then on servers broadcast
                                                      take the received values; wait only if too old

A subscriber saves the request and its latency, and may compute with older values than necessary. Under async it still
requests its next step, one ahead, so that the number is there when needed.

Under ssp a client sees the effect of all of its own pushes (read-my-writes; Ho et al., NeurIPS 2013, section 2). An
asking client does so, since its push precedes its request. A broadcast may lack a subscriber's last pushes: the
subscriber adds their changes, which it knows only if they depend neither on the values nor on a state of the update."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.compression import ErrorFeedback, RandomKey, VectorCodec
from hpcdl.comm.requests import Request
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, device_of
from hpcdl.memory import Memory
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.slice_server import Beside, SliceServer, StoreRequest
from hpcdl.parameter_server.store_messages import ANSWER, ANSWERS, ENDED, REQUEST, Push, StoreOperation, StoreTag
from hpcdl.runs import signals


class OwnPush(NamedTuple):
    """Change of a server's values by a push of this client. clock: the push's number. part: place in the vector."""

    clock: int
    part: slice
    change: Any  # Array


class Connection:
    """A client's view of one server: its rank, its slice of the vector, and the pending answer.
    seen, version, apart_seconds: as the last answer says (store_messages.py). signalled: True if the server had a
    signal. own: a subscriber's pushes that the last values lack. missing: pushes of `own` still to be added to them.
    feedback: compresses pushes. pull_codec: of pulls of the whole slice. seed: of both."""

    local = False
    feedback: ErrorFeedback | None = None
    pull_codec: VectorCodec | None = None
    seed = 0

    def __init__(self, comm: Communicator, rank: int, held: slice, start: int = 0):
        self.comm, self.rank, self.slice = comm, rank, held
        self.seen, self.version, self.apart_seconds, self.signalled = float(start), float(start), 0.0, False
        self.answer = ANSWER.header()
        self.values: Any = None  # np.ndarray | None: receives the answer's values
        self.sent: Any = None  # message of the last push
        self.encoded: Any = None  # receives the answer's values if they are compressed
        self.requests: list[Request] = []
        self.replicated = False  # True if pushes are acknowledged (replication.py)
        self.own: list[OwnPush] = []
        self.missing: list[OwnPush] = []

    def expect(self, values: np.ndarray | None, tag: int = StoreTag.ANSWER, encoded: bool = False) -> None:
        """Post the receives of an answer: a header, and values if there is an array for them, or their message."""
        self.values, self.encoded = values, None
        if encoded and self.pull_codec is not None:
            self.encoded = self.pull_codec.message(values.size)  # type: ignore[union-attr]
        payloads = [] if values is None else [values if self.encoded is None else self.encoded]
        self.requests = ANSWERS[tag].expect(self.comm, self.rank, self.answer, *payloads)

    @property
    def arrived(self) -> bool:
        """True if the answer is complete."""
        return all(request.done for request in self.requests)

    def read(self) -> None:
        """Take seen, version, apart_seconds and the signal from the answer's header; decode compressed values."""
        if self.encoded is not None:
            values = np.empty(self.values.size, self.values.dtype)
            self.pull_codec.decode(self.encoded, values)  # type: ignore[union-attr]
            device_of(self.values).copy_in(self.values, values)
            self.encoded = None
        self.seen, self.version = float(self.answer["seen"]), float(self.answer["version"])  # copies, not views
        self.apart_seconds = float(self.answer["apart"])
        self.signalled |= bool(self.answer["signal"])

    @property
    def step(self) -> int | None:
        """The step that the answer gives; None if none is left."""
        return None if self.answer["step"] == ENDED else int(self.answer["step"])

    def ask(self, request: np.ndarray, keys: np.ndarray | None = None) -> None:
        """Send a request, with keys if given."""
        REQUEST.send(self.comm, self.rank, request, *([] if keys is None else [keys]))

    def push(self, request: np.ndarray, values: np.ndarray) -> list[Request]:
        """Send values; return the pending sends, and the receive of the receipt if pushes are acknowledged."""
        receipts = [self.comm.iwait(np.empty(1), self.rank, StoreTag.RECEIPT)] if self.replicated else []
        if self.feedback is not None:
            values = self.encode(request, device_of(values).host(values))
        return [*REQUEST.send(self.comm, self.rank, request, values), *receipts]

    def encode(self, request: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the message of pushed values, and keep what it leaves out. A push of no example keeps and sends
        nothing: a server may ignore it."""
        assert self.feedback is not None
        start, stop = int(request["start"]), int(request["stop"])
        key = RandomKey(self.seed, int(request["clock"]), "push", self.slice.start + start)
        self.sent = self.feedback.codec.message(values.size)
        part = self.feedback.part(slice(start, stop))
        (part if request["count"] else part.codec).encode(values, self.sent, key)
        return self.sent  # type: ignore[no-any-return]

    def taken(self, values: np.ndarray) -> np.ndarray:
        """Return what the server takes for the pushed `values`."""
        if self.feedback is None:
            return values
        decoded = np.empty(values.size, values.dtype)
        self.feedback.codec.decode(self.sent, decoded)
        return decoded


class LocalConnection(Connection):
    """The connection to a server on this very rank: calls it directly, and is called back; no message is sent."""

    local = True

    def __init__(self, comm: Communicator, server: SliceServer, held: slice, start: int = 0):
        super().__init__(comm, comm.rank, held, start)
        self.server, self.delivered = server, True

    def expect(self, values: np.ndarray | None, tag: int = StoreTag.ANSWER, encoded: bool = False) -> None:
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
        self.answer[...], self.delivered = answer, True
        if values is not None:
            self.values[:] = values


class Client:
    """A client that requests values when it needs them. connections: to all servers, in the order of their slices.
    attend: serves requests on this rank while the client waits. rows: maps keys to elements; None: no keys."""

    def __init__(
        self,
        comm: Communicator,
        connections: list[Connection],
        dtype: np.dtype,
        consistency: Consistency,
        attend: Callable | None,
        start: int = 0,
        rows: Any = None,  # VectorRows | None
    ):
        self.comm, self.connections, self.dtype, self.consistency = comm, connections, dtype, consistency
        self.size, self.attend, self.clock = connections[-1].slice.stop, attend, start
        self.drawn, self.rows = 0, rows  # drawn: the step of the last pull
        self.touched: list[tuple[Connection, np.ndarray]] = []  # elements of the last keys by server
        # A server on this rank comes last, since a step that it completes may be scored, which waits for the other
        # servers; rank 0 comes before it, so that it learns the traffic to the others.
        self.beside: Beside | None = None
        self.feedback: ErrorFeedback | None = None  # of the whole vector; values to a server on this rank stay exact
        self.asked: Request | None = None  # rank 0 asks for the residual: 1; asks no more: 0
        self.answer_to_rank_0 = np.empty(1)
        self.others_first = sorted(connections, key=lambda each: (each.local, each.rank == 0))

    def compress(self, push: ErrorFeedback | None, pull: VectorCodec | None, seed: int) -> None:
        """Compress pushes and pulls from now on. A residual then answers rank 0 (`wait_until`)."""
        for connection in self.connections:
            if not connection.local:
                connection.pull_codec, connection.seed = pull, seed
                connection.feedback = None if push is None else push.part(connection.slice)
        self.feedback = push
        if push is not None and push.keep and self.comm.rank > 0:
            self.listen()

    def listen(self) -> None:
        """Wait for rank 0's next question for the residual."""
        self.asked = self.comm.iwait(self.answer_to_rank_0, 0, StoreTag.RESIDUAL)

    def answer_rank_0(self) -> bool:
        """Send rank 0 the residual if it has asked, and serve; return True if there was anything to do."""
        done = self.attend is not None and self.attend()
        if self.asked is None or not self.asked.done:
            return done
        self.asked = None
        if self.answer_to_rank_0[0]:
            assert self.feedback is not None
            self.comm.push(self.feedback.residual, 0, StoreTag.RESIDUAL_VALUES)
            self.listen()
        return True

    def finish(self) -> None:
        """Answer rank 0 until it asks no more for the residual."""
        self.wait_until(lambda: self.asked is None)

    def pull(self, into: np.ndarray, part: slice | None) -> int | None:
        return self.fetch(StoreOperation.PULL, into, part)

    def close(self, into: np.ndarray | None) -> None:
        self.fetch(StoreOperation.LAST, into)

    def push(self, values: np.ndarray, part: slice | None, **amounts: float) -> None:
        part = self.checked(values, part)

        def pushes() -> Iterator[tuple[Connection, np.ndarray, np.ndarray]]:
            for connection in self.others_first:
                common = overlap(connection.slice, part)
                request = self.request(StoreOperation.PUSH, connection, common, which=self.drawn, **amounts)
                yield connection, request, within(values, part, common)

        self._send(pushes())

    def push_at(self, values: np.ndarray, **amounts: float) -> None:
        """Send each server its elements of the last keys, and set them to zero in `values`, for the next gradient."""
        self.checked(values, None)

        def pushes() -> Iterator[tuple[Connection, np.ndarray, np.ndarray]]:
            for connection, elements in self.touched:
                server_values, stop = values[connection.slice], len(elements)
                message = server_values[elements]
                server_values[elements] = 0
                request = self.request(StoreOperation.PUSH_AT, connection, None, start=0, stop=stop, **amounts)
                yield connection, request, message

        self._send(pushes())

    def _send(self, pushes: Iterable[tuple[Connection, np.ndarray, np.ndarray]]) -> None:
        """Send the requests and values of a push to all servers; advance the clock when they are sent."""
        sent: list[Request] = []
        for connection, request, values in pushes:
            sent += connection.push(request, values)
            if self.beside is not None and connection.rank == 0 and not connection.local:
                sent.append(self.comm.ipush(self.beside.pack(), 0, StoreTag.BESIDE))
        self.wait_until(lambda: all(request.done for request in sent))
        self.clock += 1

    def fetch(self, operation: StoreOperation, into: np.ndarray | None, part: slice | None = None) -> int | None:
        """Request `part` from all servers and wait for it; return the step of the first server's answer."""
        if into is None:
            into, part = np.empty(0, self.dtype), slice(0, 0)
        part = self.checked(into, part)
        common = [(connection, overlap(connection.slice, part)) for connection in self.others_first]
        step = self._ask([(c, self.request(operation, c, each), within(into, part, each), None) for c, each in common])
        self.drawn = self.drawn if step is None else step
        return step

    def draw(self) -> int | None:
        first = self.connections[0]
        return self._ask([(first, self.request(StoreOperation.DRAW, first), None, None)])

    def pull_at(self, into: np.ndarray, keys: np.ndarray) -> int | None:
        """Pull the elements of these sorted, unique keys, and those of no row; other elements of `into` stay."""
        self.checked(into, None)
        questions, self.touched = [], []
        for c in self.others_first:
            own = self.rows.within(keys, c.slice)
            self.touched.append((c, self.rows.elements(own, c.slice)))
            request = self.request(StoreOperation.KEYS, c, start=0, stop=len(own))
            questions.append((c, request, np.empty(len(self.touched[-1][1]), self.dtype), own))
        step = self._ask(questions)
        for connection, elements in self.touched:
            into[connection.slice][elements] = connection.values
        return step

    def _ask(self, questions: list[tuple[Connection, np.ndarray, Any, Any]]) -> int | None:
        """Send requests and wait for the answers; return the step of the first server's answer.
        questions: (connection, request, array for the values or None, keys or None)."""
        for connection, request, values, _ in questions:
            whole = values is not None and values.size == connection.slice.stop - connection.slice.start
            connection.expect(values, encoded=whole and request["operation"] == StoreOperation.PULL)
        for connection, request, _, keys in questions:
            connection.ask(request, keys)
        self.wait_until(lambda: all(connection.arrived for connection, *_ in questions))
        for connection, *_ in questions:
            connection.read()
        return self.connections[0].step

    def request(
        self, operation: StoreOperation, connection: Connection, part: slice | None = None, **numbers: float
    ) -> np.ndarray:
        """Return a request's header. part: elements of the whole vector within the server's slice; None: the slice."""
        first, part = connection.slice.start, part or connection.slice
        numbers = {"reply": StoreTag.ANSWER, "start": part.start - first, "stop": part.stop - first} | numbers
        return REQUEST.header(
            operation=operation,
            clock=self.clock,
            needs=self.clock - self.consistency.bound,
            seen=connection.seen,
            version=connection.version,
            signal=bool(signals.received) or any(each.signalled for each in self.connections),  # for rank 0
            **numbers,
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, and serve meanwhile if this rank is a server."""
        self.comm.wait_until(condition, self.attend if self.asked is None else self.answer_rank_0)

    def checked(self, array: np.ndarray, part: slice | None) -> slice:
        """Return the part of the whole vector that `array` is for; UsageError for a wrong length, type or step."""
        start, stop, step = (part or slice(None)).indices(self.size)
        if step != 1:
            raise UsageError(f"a part of a parameter store is a slice of consecutive elements, not {part}")
        if array.size != max(0, stop - start) or array.dtype != self.dtype:
            raise UsageError(
                f"the store has {max(0, stop - start)} values of {self.dtype} for elements {start} to {stop}; "
                f"the array has {array.size} of {array.dtype}"
            )
        return slice(start, stop)


class Subscribed(Client):
    """A client that receives broadcasts from its first pull on. counter: connection to the server that gives out steps.
    memory: counts the receive buffers. update: the servers' update, if it is additive."""

    def __init__(self, *arguments: Any, counter: Connection, memory: Memory, update: Any = None, **options: Any):
        super().__init__(*arguments, **options)
        self.counter, self.memory, self.subscribed = counter, memory, False
        self.update = update if shows_own_pushes(self.consistency) else None
        self.received: set[int] = set()  # servers that have sent values
        self.closed: set[int] = set()  # servers that have sent their last values

    def pull(self, into: np.ndarray, part: slice | None) -> int | None:
        if part is not None:
            raise UsageError("servers that broadcast send all values: pull without a part")
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
            pushed = connection.taken(within(values, part, common))
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
        self.counter.expect(None)
        self.counter.ask(self.request(StoreOperation.DRAW, self.counter))

    def _take_newest(self, into: np.ndarray) -> bool:
        """Copy received values into `into`; return True if all servers have sent some."""
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
    """True if clients see their own pushes without waiting for the pushes of all clients."""
    return consistency.name == "ssp" and not consistency.in_rounds


def overlap(held: slice, requested: slice) -> slice:
    """Return the intersection of two slices; an empty slice at the beginning of `held` if there is none."""
    start, stop = max(held.start, requested.start), min(held.stop, requested.stop)
    return slice(start, stop) if start < stop else slice(held.start, held.start)


def within(array: np.ndarray, part: slice, common: slice) -> np.ndarray:
    """Return the elements `common` of `array`, which holds the elements `part` of the whole vector."""
    return array[common.start - part.start : common.stop - part.start]
