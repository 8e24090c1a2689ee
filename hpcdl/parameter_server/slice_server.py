"""One server of a parameter store: holds a slice of the vector and answers requests.

    until all clients have closed:
        wait for a request of any client
        push      receive the values; apply them by `update`, at once or with their round
        pull      store it until the consistency allows the answer
        yield the steps that are complete; answer the pulls that are allowed; send to subscribers

All messages are typed buffers (store_messages.py); clocks.py decides which pulls are allowed. Since the slice may
change while an answer travels, answers are sent from a copy, one per version.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox, fill
from hpcdl.comm.requests import Request
from hpcdl.comm.trace import SentTotals
from hpcdl.memory import Memory
from hpcdl.parameter_server.clocks import ClockProgress, Clocks
from hpcdl.parameter_server.replication import ReplicaSender, SliceReplicas
from hpcdl.parameter_server.request_checks import ServedSlice, check_keys, check_request
from hpcdl.parameter_server.slice_state import SliceState
from hpcdl.parameter_server.sparse_keys import KEY, Touched, VectorRows
from hpcdl.parameter_server.store_messages import (
    ANSWER_HEADER,
    NO_STEP,
    REQUEST_HEADER,
    Push,
    StoreOperation,
    StoreTag,
    as_message,
    as_request,
    new_header,
    tell_sent,
)
from hpcdl.runs import signals


class StoreRequest(NamedTuple):
    """A request of a client; deliver(header, values): passes the answer to a client on this very rank."""

    header: np.ndarray
    client: int
    deliver: Callable | None = None


class Beside(NamedTuple):
    """Further numbers, `length` of float64, that a client's push carries to rank 0, whose own do not travel.

    pack(): makes them. take(rank, numbers): takes them up on rank 0.
    """

    length: int
    pack: Callable[[], np.ndarray]
    take: Callable[[int, np.ndarray], Any]


class Subscription:
    """A client that receives broadcasts of the slice.

    sending: the last message sent. behind: True if the newest values follow when that has arrived.
    """

    def __init__(self, received: StoreRequest):
        self.received, self.behind = received, False
        self.sending: Request | None = None

    @property
    def arrived(self) -> bool:
        return self.sending is None or self.sending.done


class SliceServer(SliceState):
    """Serves `values`, this server's slice, to the clients of `clocks` (ranks of comm); see `SliceState`.

    broadcast_every: clocks (async: versions) between broadcasts. gathered: True while rank 0 may gather the slice.
    beside: what pushes carry to this server, if it is rank 0's. copies: replicas of this slice on other servers;
    replicas: those of other slices on this server; both are empty without replication.

    each_step(loss, total): is called for each complete step on a rank that works, too (`attend`). signalled: True once
    a client has reported a signal. sent: total traffic that clients have reported with requests, and servers as they
    were gathered.
    """

    def __init__(
        self,
        comm: Communicator,
        values: np.ndarray,
        clocks: Clocks,
        update: Callable,
        delay: int = 0,
        broadcast_every: int = 1,
        gathered: bool = False,
        memory: Memory | None = None,
        rows: VectorRows | None = None,
        held: slice | None = None,
        beside: Beside | None = None,
    ):
        super().__init__(values, clocks, update, delay, memory, rows, held)
        self.beside, self.signalled, self.sent = beside, False, SentTotals()
        self.each_step: Callable[[float, float], object] = lambda loss, total: None
        self.touched: dict[int, Touched] = {}  # elements of each client's last keys
        self.comm, self.broadcast_every, self.gathered = comm, broadcast_every, gathered
        self.copies, self.replicas = ReplicaSender(comm, self), SliceReplicas(comm)
        self.waiting: list[StoreRequest] = []  # pulls that wait for their answers
        self.closing: list[StoreRequest] = []  # last pulls, which wait until all clients have closed
        self.last_answers: list[Request] = []
        self.subscriptions: dict[int, Subscription] = {}
        heard = [rank for rank in range(comm.size) if rank != comm.rank and self._may_ask(rank)]
        self.inbox = Inbox(comm, StoreTag.REQUEST, heard, len(REQUEST_HEADER), "f8")  # type: ignore[arg-type]

    # -- the loop ----------------------------------------------------------------------------------------------------

    def completed_steps(self) -> Iterator[tuple[float, float]]:
        """Serve until all clients have closed and received their last answers; yield as `handle`."""
        while self.clocks.open or self.gathered or self.replicas.open:
            self.comm.wait_until(self._anything, self._catch_up, patient=True)
            yield from self._requests()
        for answer in self.last_answers:
            answer.wait(doze=True)

    def _anything(self) -> bool:
        """True if any message has arrived."""
        return bool(self.inbox.arrived()) or self.copies.held() or self.replicas.arrived()

    def attend(self) -> bool:
        """Handle the requests that have arrived, beside other work; True if there was anything to do."""
        if not self._anything():
            return self._catch_up()
        for loss, total in self._requests():
            self.each_step(loss, total)
        return True

    def _requests(self) -> Iterator[tuple[float, float]]:
        self._catch_up()
        self.copies.acknowledge()
        self.replicas.attend()
        while senders := self.inbox.arrived():
            for client in senders:
                yield from self.handle(*self._receive(client))
                if self._may_ask(client):
                    self.inbox.listen(client)

    def handle_own(self, received: StoreRequest, buffer: np.ndarray | None = None) -> None:
        """Handle a request of a client on this very rank."""
        for loss, total in self.handle(received, buffer):
            self.each_step(loss, total)

    def handle(self, received: StoreRequest, buffer: np.ndarray | None = None) -> Iterator[tuple[float, float]]:
        """Handle one request; buffer: the values of a push, at its beginning, or the keys.

        Yields the loss and the examples of each step that it completes, before anything else is answered.
        """
        self.signalled |= bool(received.header["signal"])
        if received.client != self.comm.rank:
            self.sent.note(received.client, float(received.header["bytes"]), float(received.header["messages"]))
        self._note(received, buffer)
        for step in self.end_steps():
            if not self.clocks.stopped:
                yield step
        if received.header["operation"] == StoreOperation.LAST:
            self.copies.tell(StoreOperation.LAST, received.client)
        self._answer_who_may_go_on()
        self._send_to_subscribers()
        self._answer_last_pulls()

    def go_on_from(self, progress: ClockProgress) -> None:
        """Continue from another server's position, with all replicas on this one."""
        for state in (self, *self.replicas.of.values()):
            state.clocks.go_on_from(progress)
            state.losses = dict(progress.losses)

    def _may_ask(self, rank: int) -> bool:
        """True if requests of this rank may still arrive."""
        return rank in self.clocks.open or (self.gathered and rank == 0)

    def _receive(self, client: int) -> tuple[StoreRequest, np.ndarray | None]:
        """Return the request of this client that has arrived, with its values or keys."""
        request, buffer = as_request(self.inbox.take(client)), None
        self._check(request, client)
        count = int(request["stop"] - request["start"])
        if request["operation"] in (StoreOperation.PUSH, StoreOperation.PUSH_AT):
            buffer = self.buffer()
            fill(self.comm, buffer[:count], client, StoreTag.VALUES)
            if self.beside is not None:
                numbers = np.empty(self.beside.length)
                fill(self.comm, numbers, client, StoreTag.BESIDE)
                self.beside.take(client, numbers)
        elif request["operation"] == StoreOperation.KEYS:
            assert self.rows is not None
            buffer = np.empty(count, KEY)
            fill(self.comm, buffer, client, StoreTag.VALUES)
            check_keys(buffer, self.rows.count(self.held), client)
        return StoreRequest(request, client), buffer

    def _check(self, request: np.ndarray, client: int) -> None:
        """Raise UsageError for an invalid request, before acting on it."""
        rows = None if self.rows is None else self.rows.count(self.held)
        touched = len(self.touched[client].elements) if client in self.touched else None
        vectors = len(getattr(self.update, "state", ()))
        leads, kept = client == 0 and self.gathered, client in self.copies.pending
        held = ServedSlice(self.values.size, vectors, rows, touched, leads, kept)
        waiting = sum(received.client == client for received in self.waiting)
        check_request(request, client, held, self.clocks, waiting)

    def _note(self, received: StoreRequest, buffer: np.ndarray | None) -> None:
        """Process a request, or store it until its answer is allowed."""
        operation, client = received.header["operation"], received.client
        if operation == StoreOperation.PUSH:
            assert buffer is not None
            (self.copies.keep if self.copies.careful else self.take_in)(Push.read(received.header, client), buffer)
            return
        self.copies.commit(client)  # its next request shows that its last push is on all servers
        if operation == StoreOperation.PUSH_AT:
            assert buffer is not None
            self.take_in(Push.read(received.header, client)._replace(part=self.touched[client]), buffer)
        elif operation == StoreOperation.SUBSCRIBE:
            self.subscriptions[client] = Subscription(received)
            self._send_unasked(self.subscriptions[client])
        elif operation == StoreOperation.LAST:
            self.clocks.closed(client)
            self.subscriptions.pop(client, None)
            self.closing.append(received)
        elif operation == StoreOperation.OVER:
            self.gathered = False
        else:
            if operation == StoreOperation.KEYS:
                assert buffer is not None and self.rows is not None
                self.touched[client] = Touched(buffer, self.rows.elements(buffer, self.held))
            self.waiting.append(received)

    def _answer_who_may_go_on(self) -> None:
        for received in list(self.waiting):
            step = self._grant(received)
            if step is not None:
                self.waiting.remove(received)
                self._answer(received, step)

    def _send_to_subscribers(self) -> None:
        if self.subscriptions and self.clocks.broadcast_due(self.broadcast_every):
            self.clocks.broadcast_at = self.clocks.of_store
            for subscription in self.subscriptions.values():
                self._send_unasked(subscription)

    def _answer_last_pulls(self) -> None:
        """When the last client has closed: apply delayed updates, and answer all closing clients."""
        if self.clocks.open or not self.closing:
            return
        self.apply_delayed()
        sent = [self._answer(received, NO_STEP, last=True) for received in self.closing]
        self.last_answers, self.closing = [each for each in sent if each is not None], []

    # -- answers -----------------------------------------------------------------------------------------------------

    def _grant(self, received: StoreRequest) -> int | None:
        """Return the step for the answer; None while the request has to wait."""
        if received.header["reply"] == StoreTag.GATHERED:
            return NO_STEP if self.clocks.of_store >= received.header["needs"] else None
        operation = received.header["operation"]
        if operation == StoreOperation.PEEK or (
            operation == StoreOperation.KEYS and not self.clocks.consistency.clocked
        ):
            return NO_STEP
        return self.clocks.grant(int(received.header["clock"]))

    def _answer(self, received: StoreRequest, step: int, last: bool = False) -> Request | None:
        request = received.header
        if request["operation"] == StoreOperation.FINISH:
            self.apply_delayed()
        answer, tag, which = self._header(step=step, last=last), int(request["reply"]), int(request["which"])
        if request["operation"] == StoreOperation.DRAW:
            return self._send(received, tag, answer)
        if request["operation"] == StoreOperation.KEYS:
            return self._send(
                received, tag, answer, self._for_now("parameters", self.values[self.touched[received.client].elements])
            )
        values = self._snapshot() if which == 0 else self.vector(which).copy()
        return self._send(received, tag, answer, values[int(request["start"]) : int(request["stop"])])

    def _header(self, step: int, limit: float = math.inf, last: bool = False) -> np.ndarray:
        return new_header(
            ANSWER_HEADER,
            step=step,
            limit=limit,
            last=last,
            seen=self.clocks.of_store,
            version=self.clocks.version,
            apart=self.clocks.horizon().apart_seconds,
            signal=bool(signals.received),
        )

    def _send(
        self, received: StoreRequest, tag: int, answer: np.ndarray, values: np.ndarray | None = None
    ) -> Request | None:
        """Send an answer; return the request of its last message, None for a local client."""
        if received.deliver is not None:
            received.deliver(answer, values)
            return None
        tell_sent(answer, self.comm.traffic, values)
        sent = self.comm.ipush(as_message(answer), received.client, tag)
        return sent if values is None else self.comm.ipush(values, received.client, tag + 1)

    # -- to subscribers ----------------------------------------------------------------------------------------------

    def _send_unasked(self, subscription: Subscription) -> None:
        """Broadcast the slice to a subscriber, unless its last message is under way: then the newest follows."""
        subscription.behind = not subscription.arrived
        if not subscription.behind:
            step, limit = self.clocks.grant_unasked()
            if step == NO_STEP and self.clocks.consistency.clocked:
                step = self.clocks.of_client[subscription.received.client]
            answer = self._header(step, limit)
            subscription.sending = self._send(subscription.received, StoreTag.UNASKED, answer, self._snapshot())

    def _catch_up(self) -> bool:
        """Send the newest slice to subscribers that are behind and ready; True if there were any."""
        ready = [each for each in self.subscriptions.values() if each.behind and each.arrived]
        for subscription in ready:
            self._send_unasked(subscription)
        return bool(ready)
