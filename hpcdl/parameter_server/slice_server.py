"""One server of a parameter store: it holds a slice of the vector, and answers whoever asks.

    for ever, until all clients have closed:
        wait for a request of any client
        push      take the values in; apply them by `update`, at once or with their round
        pull      keep it until the consistency allows the answer
        end the steps that are complete; answer the pulls whose time has come; send to subscribers

All messages are typed buffers (store_messages.py); who may go on is decided by clocks.py. While an answer travels the
slice may change, so what is sent is a copy, one for all that are sent the same version.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox, fill
from hpcdl.comm.requests import Request
from hpcdl.memory import Memory
from hpcdl.parameter_server.clocks import ClockProgress, Clocks
from hpcdl.parameter_server.replication import Copies, SliceReplicas
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


class Asked(NamedTuple):
    """A request, and of which rank; deliver(header, values): how an answer gets to a client on this very rank."""

    header: np.ndarray
    client: int
    deliver: Callable | None = None


class Subscription:
    """A client that is sent the slice unasked.

    sending: the message that went out last. behind: once that has arrived, it is to get the newest.
    """

    def __init__(self, asked: Asked):
        self.asked, self.behind = asked, False
        self.sending: Request | None = None

    @property
    def arrived(self) -> bool:
        return self.sending is None or self.sending.done


class SliceServer(SliceState):
    """Serves `values`, this server's slice, to the clients of `clocks` (ranks of comm); see `SliceState`.

    broadcast_every: clocks (async: versions) after which subscribers are sent the slice. gathered: the lead, on rank 0,
    may ask until it says that it is over. copies: of this slice on other servers, replicas: those of other slices that
    this server holds; empty where each slice is on one server.
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
    ):
        super().__init__(values, clocks, update, delay, memory, rows, held)
        self.touched: dict[int, Touched] = {}  # what each client has asked for by its last keys
        self.comm, self.broadcast_every, self.gathered = comm, broadcast_every, gathered
        self.copies, self.replicas = Copies(comm, self), SliceReplicas(comm)
        self.waiting: list[Asked] = []  # pulls that wait for their answers
        self.closing: list[Asked] = []  # last pulls, which wait until all clients have closed
        self.last_answers: list[Request] = []
        self.subscriptions: dict[int, Subscription] = {}
        heard = [rank for rank in range(comm.size) if rank != comm.rank and self._may_ask(rank)]
        self.inbox = Inbox(comm, StoreTag.REQUEST, heard, len(REQUEST_HEADER), "f8")  # type: ignore[arg-type]

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer until all clients have closed, and have their last answers."""
        while self.clocks.open or self.gathered or self.replicas.open:
            self.comm.wait_until(self._anything, self._catch_up, patient=True)
            self.attend()
        for answer in self.last_answers:
            answer.wait(doze=True)

    def _anything(self) -> bool:
        """Whether anything has come."""
        return bool(self.inbox.arrived()) or self.copies.held() or self.replicas.arrived()

    def attend(self) -> bool:
        """Handle the requests that have arrived; whether there was anything to do."""
        busy = self._catch_up() | self.copies.acknowledge() | self.replicas.attend()
        while come := self.inbox.arrived():
            for client in come:
                self.handle(*self._receive(client))
                if self._may_ask(client):
                    self.inbox.listen(client)
            busy = True
        return busy

    def handle(self, asked: Asked, buffer: np.ndarray | None = None) -> None:
        """One request, and all that it makes possible; buffer: begins with the values of a push, or is the keys."""
        if asked.header["signal"]:
            self.lead.signalled()
        if asked.client != self.comm.rank:
            self.lead.sent(asked.client, float(asked.header["bytes"]), float(asked.header["messages"]))
        counted = self.clocks.counted
        self._note(asked, buffer)
        self.end_steps()
        if self.clocks.counted > counted:
            self.copies.note(*self.lead.note())
        if asked.header["operation"] == StoreOperation.LAST:
            self.copies.tell(StoreOperation.LAST, asked.client)
        self._answer_who_may_go_on()
        self._send_to_subscribers()
        self._answer_last_pulls()

    def go_on_from(self, progress: ClockProgress) -> None:
        """Take the place of a server that was so far, with all replicas that this one holds."""
        for state in (self, *self.replicas.of.values()):
            state.clocks.go_on_from(progress)
            state.losses = dict(progress.losses)

    def _may_ask(self, rank: int) -> bool:
        """Whether requests of this rank may still come."""
        return rank in self.clocks.open or (self.gathered and rank == 0)

    def _receive(self, client: int) -> tuple[Asked, np.ndarray | None]:
        """The request of this client that has arrived, with the values where it is a push."""
        request, buffer = as_request(self.inbox.take(client)), None
        self._check(request, client)
        count = int(request["stop"] - request["start"])
        if request["operation"] in (StoreOperation.PUSH, StoreOperation.PUSH_AT):
            buffer = self.buffer()
            fill(self.comm, buffer[:count], client, StoreTag.VALUES)
            if self.lead.beside:
                numbers = np.empty(self.lead.beside)
                fill(self.comm, numbers, client, StoreTag.BESIDE)
                self.lead.told(client, numbers)
        elif request["operation"] == StoreOperation.KEYS:
            assert self.rows is not None
            buffer = np.empty(count, KEY)
            fill(self.comm, buffer, client, StoreTag.VALUES)
            check_keys(buffer, self.rows.count(self.held), client)
        return Asked(request, client), buffer

    def _check(self, request: np.ndarray, client: int) -> None:
        """Raise UsageError for a request that is none of a client's, before anything is done by it."""
        rows = None if self.rows is None else self.rows.count(self.held)
        touched = len(self.touched[client].elements) if client in self.touched else None
        vectors = len(getattr(self.update, "state", ()))
        leads, kept = client == 0 and self.gathered, client in self.copies.kept
        held = ServedSlice(self.values.size, vectors, rows, touched, leads, kept)
        waiting = sum(asked.client == client for asked in self.waiting)
        check_request(request, client, held, self.clocks, waiting)

    def _note(self, asked: Asked, buffer: np.ndarray | None) -> None:
        """Take in what a request brings, or keep it until its time has come."""
        operation, client = asked.header["operation"], asked.client
        if operation == StoreOperation.PUSH:
            assert buffer is not None
            (self.copies.keep if self.copies.careful else self.take_in)(Push.read(asked.header, client), buffer)
            return
        self.copies.commit(client)  # who asks for more knows that its last push is on all servers
        if operation == StoreOperation.PUSH_AT:
            assert buffer is not None
            self.take_in(Push.read(asked.header, client)._replace(part=self.touched[client]), buffer)
        elif operation == StoreOperation.SUBSCRIBE:
            self.subscriptions[client] = Subscription(asked)
            self._send_unasked(self.subscriptions[client])
        elif operation == StoreOperation.LAST:
            self.clocks.closed(client)
            self.subscriptions.pop(client, None)
            self.closing.append(asked)
        elif operation == StoreOperation.OVER:
            self.gathered = False
        else:
            if operation == StoreOperation.KEYS:
                assert buffer is not None and self.rows is not None
                self.touched[client] = Touched(buffer, self.rows.elements(buffer, self.held))
            self.waiting.append(asked)

    def _answer_who_may_go_on(self) -> None:
        for asked in list(self.waiting):
            step = self._grant(asked)
            if step is not None:
                self.waiting.remove(asked)
                self._answer(asked, step)

    def _send_to_subscribers(self) -> None:
        if self.subscriptions and self.clocks.broadcast_due(self.broadcast_every):
            self.clocks.broadcast_at = self.clocks.of_store
            for subscription in self.subscriptions.values():
                self._send_unasked(subscription)

    def _answer_last_pulls(self) -> None:
        """When the last client has closed: apply what is delayed, and answer them all."""
        if self.clocks.open or not self.closing:
            return
        self.apply_delayed()
        sent = [self._answer(asked, NO_STEP, last=True) for asked in self.closing]
        self.last_answers, self.closing = [each for each in sent if each is not None], []

    # -- answers -----------------------------------------------------------------------------------------------------

    def _grant(self, asked: Asked) -> int | None:
        """What the answer says of the step; None while the request has to wait."""
        if asked.header["reply"] == StoreTag.GATHERED:
            return NO_STEP if self.clocks.of_store >= asked.header["needs"] else None
        operation = asked.header["operation"]
        if operation == StoreOperation.PEEK or (
            operation == StoreOperation.KEYS and not self.clocks.consistency.clocked
        ):
            return NO_STEP
        return self.clocks.grant(int(asked.header["clock"]))

    def _answer(self, asked: Asked, step: int, last: bool = False) -> Request | None:
        request = asked.header
        if request["operation"] == StoreOperation.FINISH:
            self.apply_delayed()
        answer, tag, which = self._header(step=step, last=last), int(request["reply"]), int(request["which"])
        if request["operation"] == StoreOperation.DRAW:
            return self._send(asked, tag, answer)
        if request["operation"] == StoreOperation.KEYS:
            return self._send(
                asked, tag, answer, self._for_now("parameters", self.values[self.touched[asked.client].elements])
            )
        values = self._snapshot() if which == 0 else self.vector(which).copy()
        return self._send(asked, tag, answer, values[int(request["start"]) : int(request["stop"])])

    def _header(self, step: int, limit: float = math.inf, last: bool = False) -> np.ndarray:
        return new_header(
            ANSWER_HEADER,
            step=step,
            limit=limit,
            last=last,
            seen=self.clocks.of_store,
            version=self.clocks.version,
            apart=self.lead.apart_seconds,
            signal=bool(signals.received),
        )

    def _send(self, asked: Asked, tag: int, answer: np.ndarray, values: np.ndarray | None = None) -> Request | None:
        """Answer; returns the last message, where it travels."""
        if asked.deliver is not None:
            asked.deliver(answer, values)
            return None
        tell_sent(answer, self.comm.traffic, values)
        sent = self.comm.ipush(as_message(answer), asked.client, tag)
        return sent if values is None else self.comm.ipush(values, asked.client, tag + 1)

    # -- to subscribers ----------------------------------------------------------------------------------------------

    def _send_unasked(self, subscription: Subscription) -> None:
        """Send the slice, unless the one before is still on its way: then the newest follows when that has arrived."""
        subscription.behind = not subscription.arrived
        if not subscription.behind:
            step, limit = self.clocks.grant_unasked()
            if step == NO_STEP and self.clocks.consistency.clocked:
                step = self.clocks.of_client[subscription.asked.client]
            answer = self._header(step, limit)
            subscription.sending = self._send(subscription.asked, StoreTag.UNASKED, answer, self._snapshot())

    def _catch_up(self) -> bool:
        """Send the newest to the subscribers that are behind and can have it; whether there were any."""
        ready = [each for each in self.subscriptions.values() if each.behind and each.arrived]
        for subscription in ready:
            self._send_unasked(subscription)
        return bool(ready)
