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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox, fill
from hpcdl.comm.operations import SUM
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import CPU
from hpcdl.memory import Memory
from hpcdl.runs import signals
from hpcdl.services.clocks import Clocks, Delay
from hpcdl.services.keys import KEY, Rows, Touched, added
from hpcdl.services.request_checks import Held, check_keys, check_request
from hpcdl.services.store_messages import (
    ANSWER_HEADER,
    NO_STEP,
    REQUEST_HEADER,
    Operation,
    Push,
    Tag,
    as_message,
    as_request,
    new_header,
    tell_sent,
)


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


class SliceServer:
    """Serves `values`, this server's slice, to the clients of `clocks` (ranks of comm).

    update(values, pushed, push): applies the pushed values to the part of the slice, in place; False: it has not, and
    there is no new version. delay: how many versions late values are applied. broadcast_every: clocks (async: versions)
    after which subscribers are sent the slice. gathered: the lead, on rank 0, may ask until it says that it is over.
    memory: counts the slice, its copies and what is received. rows: how clients' keys name elements of the slice, which
    is `held` of the vector (keys.py).
    """

    update: Any  # a function, which may have a member `state`

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
        rows: Rows | None = None,
        held: slice | None = None,
    ):
        self.rows, self.held = rows, held or slice(0, values.size)
        self.touched: dict[int, Touched] = {}  # what each client has asked for by its last keys
        self.comm, self.values, self.clocks, self.lead, self.update = comm, values, clocks, clocks.lead, update
        self.memory = memory or Memory()
        self.memory.hold("parameters", values)
        self.delay, self.broadcast_every, self.gathered = Delay(delay), broadcast_every, gathered
        self.waiting: list[Asked] = []  # pulls that wait for their answers
        self.closing: list[Asked] = []  # last pulls, which wait until all clients have closed
        self.last_answers: list[Request] = []
        self.subscriptions: dict[int, Subscription] = {}
        self.round: dict[int, tuple[np.ndarray, Push]] = {}  # of each client that has pushed: its buffer and its push
        self.losses: dict[int, tuple[float, float]] = {}  # of the steps under way: the sum of losses, and the examples
        self.snapshot: np.ndarray | None = None  # a copy of the values as they are now
        self.buffers: list[np.ndarray] = []  # to receive pushes in
        heard = [rank for rank in range(comm.size) if rank != comm.rank and self._may_ask(rank)]
        self.inbox = Inbox(comm, Tag.REQUEST, heard, len(REQUEST_HEADER), "f8")  # type: ignore[arg-type]

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer until all clients have closed, and have their last answers."""
        while self.clocks.open or self.gathered:
            self.comm.wait_until(self.inbox.arrived, self._catch_up, patient=True)
            self.attend()
        for answer in self.last_answers:
            answer.wait(doze=True)

    def attend(self) -> bool:
        """Handle the requests that have arrived; whether there was anything to do."""
        busy = self._catch_up()
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
        self._note(asked, buffer)
        self._end_steps()
        self._answer_who_may_go_on()
        self._send_to_subscribers()
        self._answer_last_pulls()

    def _may_ask(self, rank: int) -> bool:
        """Whether requests of this rank may still come."""
        return rank in self.clocks.open or (self.gathered and rank == 0)

    def _receive(self, client: int) -> tuple[Asked, np.ndarray | None]:
        """The request of this client that has arrived, with the values where it is a push."""
        request, buffer = as_request(self.inbox.take(client)), None
        self._check(request, client)
        count = int(request["stop"] - request["start"])
        if request["operation"] in (Operation.PUSH, Operation.PUSH_AT):
            buffer = self.buffer()
            fill(self.comm, buffer[:count], client, Tag.VALUES)
            if self.lead.beside:
                numbers = np.empty(self.lead.beside)
                fill(self.comm, numbers, client, Tag.BESIDE)
                self.lead.told(client, numbers)
        elif request["operation"] == Operation.KEYS:
            assert self.rows is not None
            buffer = np.empty(count, KEY)
            fill(self.comm, buffer, client, Tag.VALUES)
            check_keys(buffer, self.rows.count(self.held), client)
        return Asked(request, client), buffer

    def _check(self, request: np.ndarray, client: int) -> None:
        """Raise UsageError for a request that is none of a client's, before anything is done by it."""
        rows = None if self.rows is None else self.rows.count(self.held)
        touched = len(self.touched[client].elements) if client in self.touched else None
        vectors = len(getattr(self.update, "state", ()))
        held = Held(self.values.size, vectors, rows, touched, client == 0 and self.gathered)
        waiting = sum(asked.client == client for asked in self.waiting)
        check_request(request, client, held, self.clocks, waiting)

    def buffer(self) -> np.ndarray:
        """An array as long as the slice, for the values of a push."""
        if self.buffers:
            return self.buffers.pop()
        return self.memory.hold("gradients", CPU.empty(self.values.size, self.values.dtype))

    def _note(self, asked: Asked, buffer: np.ndarray | None) -> None:
        """Take in what a request brings, or keep it until its time has come."""
        operation, client = asked.header["operation"], asked.client
        if operation == Operation.PUSH:
            assert buffer is not None
            self._take_in(Push.read(asked.header, client), buffer)
        elif operation == Operation.PUSH_AT:
            assert buffer is not None
            self._take_in(Push.read(asked.header, client)._replace(part=self.touched[client]), buffer)
        elif operation == Operation.SUBSCRIBE:
            self.subscriptions[client] = Subscription(asked)
            self._send_unasked(self.subscriptions[client])
        elif operation == Operation.LAST:
            self.clocks.closed(client)
            self.subscriptions.pop(client, None)
            self.closing.append(asked)
        elif operation == Operation.OVER:
            self.gathered = False
        else:
            if operation == Operation.KEYS:
                assert buffer is not None and self.rows is not None
                self.touched[client] = Touched(buffer, self.rows.elements(buffer, self.held))
            self.waiting.append(asked)

    def _end_steps(self) -> None:
        """Apply the rounds that are complete, and tell the lead of the steps."""
        for step in self.clocks.complete():
            if self.round:
                self._apply_round()
            self.lead.done(*self.losses.pop(step))

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

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _take_in(self, push: Push, buffer: np.ndarray) -> None:
        step = self.clocks.step_of(push)
        self.lead.admit(push._replace(step=step))
        self.clocks.pushed(push)
        loss, total = self.losses.get(step, (0.0, 0.0))
        self.losses[step] = loss + push.loss, max(total, push.total)
        if self.clocks.consistency.in_rounds:
            self.round[push.client] = buffer, push
        else:
            self._apply(buffer[: push.size], push, [push])
            self.buffers.append(buffer)

    def _apply_round(self) -> None:
        """Apply the sum of the round's pushes, added in the order of the clients: the same bits in every run."""
        buffers, pushes = zip(*(self.round.pop(client) for client in sorted(self.round)), strict=True)
        whole: Any = slice(0, self.values.size)
        total = buffers[0]
        if all(isinstance(push.part, Touched) for push in pushes):
            values = [buffer[: push.size] for buffer, push in zip(buffers, pushes, strict=True)]
            assert self.rows is not None
            whole, total = added(self.rows, self.held, [push.part for push in pushes], values)
        elif all(push.part == whole for push in pushes):
            for buffer in buffers[1:]:
                SUM(total, buffer)
        else:
            total = self._for_now("gradients", CPU.zeros(self.values.size, self.values.dtype))
            for buffer, push in zip(buffers, pushes, strict=True):
                total[push.part] += buffer[: push.size]
        count = sum(push.count for push in pushes)
        self._apply(total, pushes[0]._replace(part=whole, count=count, total=count), pushes)
        self.buffers += buffers

    def _apply(self, values: np.ndarray, push: Push, of: Iterable[Push]) -> None:
        """Apply the values, or, with a delay, those of so many versions before; of: the pushes they are made of."""
        if self.delay.versions:
            values = self._for_now("gradients", values.copy())
        for due in self.delay.enter((values, push, of)):
            self._update(*due)

    def apply_delayed(self) -> None:
        """Apply what is delayed: nothing that was pushed is lost."""
        for due in self.delay.rest():
            self._update(*due)

    def _update(self, values: np.ndarray, push: Push, of: Iterable[Push]) -> None:
        which = push.part.elements if isinstance(push.part, Touched) else push.part
        part = self.values[which]  # of numbers of elements a copy
        if self.update(part, values, self.clocks.described(push)) is False:
            return
        if isinstance(push.part, Touched):
            self.values[which] = part
        self.clocks.applied(of)
        self.snapshot = None

    # -- answers -----------------------------------------------------------------------------------------------------

    def _grant(self, asked: Asked) -> int | None:
        """What the answer says of the step; None while the request has to wait."""
        if asked.header["reply"] == Tag.GATHERED:
            return NO_STEP if self.clocks.of_store >= asked.header["needs"] else None
        operation = asked.header["operation"]
        if operation == Operation.PEEK or (operation == Operation.KEYS and not self.clocks.consistency.clocked):
            return NO_STEP
        return self.clocks.grant(int(asked.header["clock"]))

    def _answer(self, asked: Asked, step: int, last: bool = False) -> Request | None:
        request = asked.header
        if request["operation"] == Operation.FINISH:
            self.apply_delayed()
        answer, tag, which = self._header(step=step, last=last), int(request["reply"]), int(request["which"])
        if request["operation"] == Operation.DRAW:
            return self._send(asked, tag, answer)
        if request["operation"] == Operation.KEYS:
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

    def _snapshot(self) -> np.ndarray:
        """The slice as it is now; one copy for all who get the same version."""
        if self.snapshot is None:
            self.snapshot = self._for_now("parameters", self.values.copy())
        return self.snapshot

    def _for_now(self, kind: str, array: np.ndarray) -> np.ndarray:
        return self.memory.hold_while_it_is_there(kind, array)

    def vector(self, which: int) -> np.ndarray:
        """0: the values; 1, 2, ...: a vector of the update's own state."""
        return self.values if which == 0 else list(self.update.state.values())[which - 1]

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
            answer = self._header(*self.clocks.grant_unasked())
            subscription.sending = self._send(subscription.asked, Tag.UNASKED, answer, self._snapshot())

    def _catch_up(self) -> bool:
        """Send the newest to the subscribers that are behind and can have it; whether there were any."""
        ready = [each for each in self.subscriptions.values() if each.behind and each.arrived]
        for subscription in ready:
            self._send_unasked(subscription)
        return bool(ready)
