"""One server of a parameter store: holds a slice of the vector and answers requests.

    until all clients have closed:
        wait for a request of any client
        push      receive the values; apply them by `update`, at once or with their round
        pull      store it until the consistency (clocks.py) allows the answer
        yield the steps that are complete; answer the pulls that are allowed; send to subscribers

Since the slice may change while an answer travels, answers are sent from a copy, one per version."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.compression import RandomKey, VectorCodec
from hpcdl.comm.framing import Inbox, fill
from hpcdl.comm.requests import Request
from hpcdl.comm.trace import SentTotals
from hpcdl.parameter_server.clocks import ClockProgress, Clocks
from hpcdl.parameter_server.replication import ReplicaSender, SliceReplicas
from hpcdl.parameter_server.request_checks import check_keys, check_request
from hpcdl.parameter_server.slice_state import SliceState
from hpcdl.parameter_server.sparse_keys import KEY, Touched
from hpcdl.parameter_server.store_messages import ANSWER, ANSWERS, NO_STEP, REQUEST, Push, StoreOperation, StoreTag
from hpcdl.runs import signals


class StoreRequest(NamedTuple):
    """A request of a client. deliver(header, values): passes the answer to a client on this rank; None: send it."""

    header: np.ndarray
    client: int
    deliver: Callable | None = None


class Beside(NamedTuple):
    """Further float64 numbers, `length` of them, that a client's push carries to rank 0; rank 0's own do not travel.
    pack(): returns the numbers. take(rank, numbers): processes them on rank 0."""

    length: int
    pack: Callable[[], np.ndarray]
    take: Callable[[int, np.ndarray], Any]


@dataclass
class Subscription:
    """A client that receives broadcasts. sending: its last broadcast. behind: True if a newer one has to follow."""

    received: StoreRequest
    sending: Request | None = None
    behind: bool = False

    @property
    def arrived(self) -> bool:
        return self.sending is None or self.sending.done


class SliceServer(SliceState):
    """Serves `values`, this server's slice, to the clients of `clocks` (ranks of comm); see `SliceState`.
    broadcast_every: clocks (async: versions) between broadcasts. gathered: True while rank 0 may gather the slice.
    beside: what pushes carry to rank 0's server. copies: sends to replicas of this slice. replicas: of other
    slices, here. each_step(loss, total): called for each complete step if this rank works, too (`attend`). signalled:
    True once a client has reported a signal. sent: traffic that clients and gathered servers have reported."""

    def __init__(
        self,
        comm: Communicator,
        values: np.ndarray,
        clocks: Clocks,
        update: Callable,
        broadcast_every: int = 1,
        gathered: bool = False,
        beside: Beside | None = None,
        **settings: Any,
    ):
        super().__init__(values, clocks, update, **settings)
        self.beside, self.signalled, self.sent = beside, False, SentTotals()
        self.each_step: Callable[[float, float], object] = lambda loss, total: None
        self.touched: dict[int, Touched] = {}  # elements of each client's last keys
        self.push_codec: VectorCodec | None = None  # of values from other ranks
        self.pull_codec: VectorCodec | None = None  # of answers to pulls of the whole slice
        self.seed, self.encoded = 0, (-1, np.empty(0))  # version and message of the last compressed answer
        self.comm, self.broadcast_every, self.gathered = comm, broadcast_every, gathered
        self.copies, self.replicas = ReplicaSender(comm, self), SliceReplicas(comm)
        self.waiting: list[StoreRequest] = []  # pulls that wait for their answers
        self.closing: list[StoreRequest] = []  # last pulls, which wait until all clients have closed
        self.last_answers: list[Request] = []
        self.subscriptions: dict[int, Subscription] = {}
        heard = [rank for rank in range(comm.size) if rank != comm.rank and self._may_ask(rank)]
        self.inbox = Inbox(comm, REQUEST, heard)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def completed_steps(self) -> Iterator[tuple[float, float]]:
        """Serve until all clients have closed and received their last answers; yield what `handle` yields."""
        while self.clocks.open or self.gathered or self.replicas.open:
            self.comm.wait_until(self._anything, self._catch_up, patient=True)
            yield from self._requests()
        for answer in self.last_answers:
            answer.wait(doze=True)

    def _anything(self) -> bool:
        return bool(self.inbox.arrived() or self.copies.held() or self.replicas.inbox.arrived())

    def attend(self) -> bool:
        """Handle the requests that have arrived, during other work; return True if there was anything to do."""
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
        """Handle a request; yield (loss, examples) of each step that it completes, before any request is answered.
        buffer: an array that begins with the values of a push, or the keys; None for other requests."""
        self.signalled |= bool(received.header["signal"])
        if received.client != self.comm.rank:
            self.sent.note(received.client, float(received.header["bytes"]), float(received.header["messages"]))
        self._note(received, buffer)
        for step in self.end_steps():
            if not self.clocks.stopped:
                yield step
        if received.header["operation"] == StoreOperation.LAST:
            self.copies.tell(StoreOperation.LAST, received.client)
        for waiting in list(self.waiting):
            granted = self._grant(waiting)
            if granted is not None:
                self.waiting.remove(waiting)
                self._answer(waiting, granted)
        if self.subscriptions and self.clocks.broadcast_due(self.broadcast_every):
            self.clocks.broadcast_at = self.clocks.of_store
            for subscription in self.subscriptions.values():
                self._send_unasked(subscription)
        if self.closing and not self.clocks.open:  # the last client has closed: answer all
            self.apply_delayed()
            sent = [self._answer(last, NO_STEP, last=True) for last in self.closing]
            self.last_answers, self.closing = [each for each in sent if each is not None], []

    def go_on_from(self, progress: ClockProgress) -> None:
        """Restore clocks and losses from another server's progress, here and in the replicas on this server."""
        for state in (self, *self.replicas.of.values()):
            state.clocks.go_on_from(progress)
            state.losses = dict(progress.losses)

    def _may_ask(self, rank: int) -> bool:
        return rank in self.clocks.open or (self.gathered and rank == 0)

    def _receive(self, client: int) -> tuple[StoreRequest, Any]:
        request, buffer = self.inbox.take(client), None  # type: Any, Any
        check_request(request, client, self)
        count = int(request["stop"] - request["start"])
        if request["operation"] in (StoreOperation.PUSH, StoreOperation.PUSH_AT):
            buffer = self.buffer()
            if self.push_codec is None:
                REQUEST.fill(self.comm, client, buffer[:count])
            else:
                message = self.push_codec.message(count)
                REQUEST.fill(self.comm, client, message)
                self.push_codec.decode(message, buffer[:count])
            if self.beside is not None:
                numbers = np.empty(self.beside.length)
                fill(self.comm, numbers, client, StoreTag.BESIDE)
                self.beside.take(client, numbers)
        elif request["operation"] == StoreOperation.KEYS:
            buffer = np.empty(count, KEY)
            REQUEST.fill(self.comm, client, buffer)
            check_keys(buffer, self.rows.count(self.held), client)
        return StoreRequest(request, client), buffer

    def _note(self, received: StoreRequest, buffer: Any) -> None:
        """Process a request, or store it until its answer is allowed."""
        operation, client = received.header["operation"], received.client
        if operation == StoreOperation.PUSH:
            (self.copies.keep if self.copies.careful else self.take_in)(Push.read(received.header, client), buffer)
            return
        self.copies.commit(client)  # its next request shows that its last push is on all servers
        if operation == StoreOperation.PUSH_AT:
            self.take_in(Push.read(received.header, client)._replace(part=self.touched[client]), buffer)
        elif operation == StoreOperation.SUBSCRIBE:
            self.subscriptions[client] = Subscription(received)
            self._send_unasked(self.subscriptions[client])
        elif operation == StoreOperation.LAST:
            self.clocks.open.discard(client)
            self.subscriptions.pop(client, None)
            self.closing.append(received)
        elif operation == StoreOperation.OVER:
            self.gathered = False
        else:
            if operation == StoreOperation.KEYS:
                self.touched[client] = Touched(buffer, self.rows.elements(buffer, self.held))
            self.waiting.append(received)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _grant(self, received: StoreRequest) -> int | None:
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
        which, values = int(request["which"]), None
        if request["operation"] == StoreOperation.KEYS:
            values = self.values[self.touched[received.client].elements]
            self.memory.hold_until_freed("parameters", values)
        elif request["operation"] != StoreOperation.DRAW:
            vector = self._snapshot() if which == 0 else self.vectors[which].copy()
            values = vector[int(request["start"]) : int(request["stop"])]
            pulls = request["operation"] == StoreOperation.PULL and request["reply"] == StoreTag.ANSWER
            if self.pull_codec is not None and pulls and received.deliver is None and values.size == vector.size:
                values = self._message(vector)
        return self._send(received, int(request["reply"]), self._header(step=step, last=last), values)

    def _message(self, values: np.ndarray) -> np.ndarray:
        """Return the compressed slice, one message per version."""
        assert self.pull_codec is not None
        if self.encoded[0] != self.clocks.version:
            message = self.memory.hold_until_freed("parameters", self.pull_codec.message(values.size))
            self.pull_codec.encode(values, message, RandomKey(self.seed, self.clocks.version, "pull", self.held.start))
            self.encoded = self.clocks.version, message
        return self.encoded[1]

    def _header(self, step: int, limit: float = math.inf, last: bool = False) -> np.ndarray:
        clocks, signal = self.clocks, bool(signals.received)
        state = {"seen": clocks.of_store, "version": clocks.version, "apart": clocks.horizon().apart_seconds}
        return ANSWER.header(step=step, limit=limit, last=last, signal=signal, **state)

    def _send(
        self, received: StoreRequest, tag: int, answer: np.ndarray, values: np.ndarray | None = None
    ) -> Request | None:
        """Send an answer; return the request of its last message, None for a local client."""
        if received.deliver is not None:
            received.deliver(answer, values)
            return None
        return ANSWERS[tag].send(self.comm, received.client, answer, *([] if values is None else [values]))[-1]

    # -- to subscribers ----------------------------------------------------------------------------------------------

    def _send_unasked(self, subscription: Subscription) -> None:
        """Broadcast the slice to a subscriber; if its last broadcast is still under way, mark it as behind."""
        subscription.behind = not subscription.arrived
        if not subscription.behind:
            step, limit = self.clocks.grant_unasked()
            if step == NO_STEP and self.clocks.consistency.clocked:
                step = self.clocks.of_client[subscription.received.client]
            answer = self._header(step, limit)
            subscription.sending = self._send(subscription.received, StoreTag.UNASKED, answer, self._snapshot())

    def _catch_up(self) -> bool:
        """Send the newest slice to subscribers that are behind and ready; return True if there were any."""
        ready = [each for each in self.subscriptions.values() if each.behind and each.arrived]
        for subscription in ready:
            self._send_unasked(subscription)
        return bool(ready)
