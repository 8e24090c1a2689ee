"""One server of a parameter store: it holds a slice of the vector, and answers whoever asks.

    for ever, until all clients have closed:
        wait for a request of any client
        push      take the values in; apply them by `update`, at once or with their round
        pull      keep it until the consistency allows the answer
        answer the pulls whose time has come

A request is a header of a few numbers, followed by the values where it is a push; an answer is a header followed by the
slice. All messages are typed buffers. While an answer travels the slice may change, so what is sent is a copy, one for
all that are sent the same version.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpcdl.comm.operations import SUM
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU
from hpcdl.runs import signals
from hpcdl.services.consistency import Consistency
from hpcdl.comm.inbox import Inbox


def numbers(*names: str) -> np.dtype:
    """A header: named numbers that travel as so many float64, which hold whole numbers up to 2^53."""
    return np.dtype([(name, "f8") for name in names])


# clock, seen, version: see Push. needs: the store's clock that a pull waits for. start, stop: which part of the slice.
REQUEST = numbers(
    *("operation", "reply", "clock", "needs", "start", "stop", "seen", "version"),
    *("count", "total", "loss", "norm", "which", "signal"),
)
# step: the step to compute, ENDED or NONE. seen, version: the store's clock and version. told: no step from here on.
ANSWER = numbers("step", "seen", "version", "told", "last", "paused", "signal")

PULL, PUSH, DRAW, SUBSCRIBE, LAST, FINISH, OVER = range(7)  # operations
ASKED, VALUES, TO_CLIENT, TO_KEEPER, UNASKED = 1, 2, 3, 5, 7  # tags; an answer's values have its header's tag + 1
ENDED, NONE = -1, -2


def as_message(header: np.ndarray) -> np.ndarray:
    """The header as the vector that travels."""
    return header.reshape(1).view("f8")


class Push(NamedTuple):
    """What `update` is told of the values that it applies.

    step: which step they are for: the clock, under async the version. part: the elements of the slice. count: examples
    that the values are the sum over. total: examples of the whole step. norm: of the worker's whole vector. staleness:
    see consistency.py. clock, seen, version: the client's clock, and the store's clock and version when it had pulled.
    """

    client: int
    part: slice
    clock: int
    seen: int
    version: int
    count: float
    total: float
    loss: float
    norm: float
    step: int = 0
    staleness: int = 0


class SliceServer:
    """Serves `values`, this server's slice, to `clients` (ranks of comm).

    update(values, pushed, push): applies the pushed values to the part of the slice, in place. lead: on the server that
    gives out the steps, what decides about them (see `ParameterStore`). delay: how many versions late values are
    applied. every: clocks (async: versions) after which subscribers are sent the slice.
    """

    deliver: Callable  # (reply, header, values): how a client on this very rank is answered

    def __init__(self, comm, values, clients, consistency: Consistency, update: Callable, lead=None, delay=0, every=1):
        self.comm, self.values, self.consistency, self.update = comm, values, consistency, update
        self.lead, self.delay, self.every = lead, delay, every
        self.open, self.clocks = set(clients), dict.fromkeys(clients, 0)
        self.start = self.version = self.taken = self.steps_done = self.drawn = 0
        self.pending, self.closing = [], []  # pulls, and last pulls, that wait for their answers
        self.round, self.delayed, self.losses = {}, deque(), {}
        self.staleness, self.copy = Counter(), None
        self.subscribers, self.owed, self.sent, self.answered = {}, set(), 0, []
        self.kept = False  # whether the lead, on another server, may still ask
        self.rooms = []  # to receive pushes in
        self.inbox = None

    def begin(self, step: int) -> None:
        """The first step is this one; from now on requests are heard."""
        self.start = self.version = self.taken = self.steps_done = self.drawn = self.sent = step
        self.clocks = dict.fromkeys(self.clocks, step)
        if self.lead is not None:
            self.lead.begin(step)
        heard = [rank for rank in range(self.comm.size) if rank != self.comm.rank and self._hears(rank)]
        self.inbox = Inbox(self.comm, ASKED, heard, len(REQUEST), "f8")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer until all clients have closed, and have their last answers."""
        while self.hears:
            self.comm.wait_until(self.inbox.arrived, self._send_owed, patient=True)
            self.answer()
        for sent in self.answered:
            if sent is not None:
                sent.wait(doze=True)

    @property
    def hears(self) -> bool:
        """Whether requests may still come."""
        return bool(self.open) or self.kept

    def _hears(self, rank: int) -> bool:
        """Whether this rank may still ask."""
        return rank in self.open or (self.kept and rank == 0)

    def answer(self) -> bool:
        """Handle the requests that have arrived; whether there were any."""
        any_came = self._send_owed()
        while come := self.inbox.arrived():
            for source in come:
                request, room = self.inbox.take(source).view(REQUEST).reshape(()), None
                if request["operation"] == PUSH:
                    room = self.room()
                    values = room[: int(request["stop"] - request["start"])]
                    self.comm.iwait(values, source, VALUES).wait(doze=True)
                self.handle(request, source, room)
                if self._hears(source):
                    self.inbox.listen(source)
            any_came = True
        return any_came

    def room(self) -> np.ndarray:
        """An array as long as the slice, for the values of a push."""
        return self.rooms.pop() if self.rooms else CPU.empty(self.values.size, self.values.dtype)

    def handle(self, request, client: int, room=None) -> None:
        """One request of a client; room: begins with the values of a push."""
        operation = int(request["operation"])
        if request["signal"] and self.lead is not None:
            self.lead.signalled()
        if operation == PUSH:
            self._take(room, request, client)
        elif operation == LAST:
            self.open.discard(client)
            self.subscribers.pop(client, None)
            self.owed.discard(client)
            self.closing.append((request, client))
        elif operation == OVER:
            self.kept = False
        elif operation == SUBSCRIBE:
            self.subscribers[client] = None
            self._send_unasked(client)
        else:
            self.pending.append((request, client))
        self._go_on()

    @property
    def progress(self) -> float:
        """The store's clock: of the slowest client that is open; under async, how many pushes have come."""
        if not self.consistency.clocked:
            return self.taken
        return min((self.clocks[client] for client in self.open), default=max(self.clocks.values()))

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _take(self, room, request, client: int) -> None:
        field = {name: int(request[name]) for name in ("clock", "seen", "version", "start", "stop")}
        part = slice(field.pop("start"), field.pop("stop"))
        amounts = {name: float(request[name]) for name in ("count", "total", "loss", "norm")}
        push = Push(client, part, **field, **amounts)
        step = push.clock if self.consistency.clocked else self.taken
        if self.lead is not None and not math.isfinite(push.loss):
            raise self.lead.infinite(push._replace(step=step))
        if self.consistency.clocked and push.clock - push.seen > self.consistency.bound:
            raise UsageError(
                f"rank {client} pushed at clock {push.clock} what it computed from parameters of clock {push.seen}: "
                f"more than {self.consistency.bound:g} behind; pull before each push"
            )
        self.clocks[client] += 1
        self.taken += 1
        loss, total = self.losses.get(step, (0.0, 0.0))
        self.losses[step] = loss + push.loss, max(total, push.total)
        if self.consistency.in_rounds:
            self.round[client] = room, push
        else:
            self._apply(room[: part.stop - part.start], push, [push])
            self.rooms.append(room)

    def _end_round(self) -> None:
        """Apply the sum of the round's pushes, added in the order of the clients: the same bits in every run."""
        rooms, pushes = zip(*(self.round.pop(client) for client in sorted(self.round)), strict=True)
        whole, total = slice(0, self.values.size), rooms[0]
        if all(push.part == whole for push in pushes):
            for room in rooms[1:]:
                SUM(total, room)
        else:
            total = CPU.zeros(self.values.size, self.values.dtype)
            for room, push in zip(rooms, pushes, strict=True):
                total[push.part] += room[: push.part.stop - push.part.start]
        count = sum(push.count for push in pushes)
        self._apply(total, pushes[0]._replace(part=whole, count=count, total=count), pushes)
        self.rooms += rooms

    def _apply(self, values, push: Push, of) -> None:
        """Apply the values, or, with a delay, those of so many versions before; of: the pushes they are made of."""
        if not self.delay:
            return self._update(values, push, of)
        self.delayed.append((values.copy(), push, of))
        if len(self.delayed) > self.delay:
            self._update(*self.delayed.popleft())

    def _update(self, values, push: Push, of) -> None:
        step = push.clock if self.consistency.clocked else self.version
        self.staleness.update(map(self._late, of))
        self.update(self.values[push.part], values, push._replace(step=step, staleness=self._late(push)))
        self.version += 1
        self.copy = None

    def _late(self, push: Push) -> int:
        """The staleness of a push that is applied now (consistency.py)."""
        return push.clock - push.seen if self.consistency.name == "ssp" else self.version - push.version

    def flush(self) -> None:
        """Apply what is delayed: nothing that was pushed is lost."""
        while self.delayed:
            self._update(*self.delayed.popleft())

    # -- answers -----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """After each request: end rounds and steps, and answer the pulls whose time has come."""
        while self.steps_done < self.progress:
            if self.round:
                self._end_round()
            loss, total = self.losses.pop(self.steps_done)
            self.steps_done += 1
            if self.lead is not None:
                self.lead.done(loss, total)
        for waiting in list(self.pending):
            request, client = waiting
            step = self._grant(request)
            if step is not None:
                self.pending.remove(waiting)
                self._answer(client, request, step)
        if self.subscribers:
            self._broadcast()
        if not self.open and self.closing:
            self.flush()
            closing, self.closing = self.closing, []
            self.answered = [self._answer(client, request, NONE, last=True) for request, client in closing]

    def _grant(self, request) -> int | None:
        """The step that the client may compute, ENDED, or None while it has to wait."""
        clocked = self.consistency.clocked
        if request["reply"] == TO_KEEPER:
            return NONE if self.progress >= request["needs"] else None
        step = int(request["clock"]) if clocked else self.drawn
        if self.lead is not None and step >= self.lead.steps:
            return ENDED
        if (clocked and self.progress < request["needs"]) or (self.lead is not None and step >= self.lead.limit):
            return None
        self.drawn += 1
        if self.lead is not None:
            self.lead.granted = max(self.lead.granted, step + 1)
        return step

    def _answer(self, client: int, request, step: int, last=False):
        if request["operation"] == FINISH:
            self.flush()
        header, reply = self._header(step, last), int(request["reply"])
        if request["operation"] == DRAW:
            return self._send(client, reply, header)
        part = slice(int(request["start"]), int(request["stop"]))
        which = int(request["which"])
        return self._send(client, reply, header, (self._copy() if which == 0 else self.vector(which).copy())[part])

    def _header(self, step=NONE, last=False) -> np.ndarray:
        header = np.zeros((), ANSWER)
        header["step"], header["seen"], header["version"], header["last"] = step, self.progress, self.version, last
        header["told"], header["signal"] = math.inf, bool(signals.received)
        if self.lead is not None:
            header["paused"] = self.lead.paused
        return header

    def _copy(self) -> np.ndarray:
        """The slice as it is now; one copy for all who get the same version."""
        if self.copy is None:
            self.copy = self.values.copy()
        return self.copy

    def vector(self, which: int) -> np.ndarray:
        """0: the values; 1, 2, ...: a vector of the update's own state."""
        return self.values if which == 0 else list(self.update.state.values())[which - 1]

    def _send(self, client: int, reply: int, header, values=None):
        if client == self.comm.rank:
            return self.deliver(reply, header, values)
        sent = self.comm.ipush(as_message(header), client, reply)
        return sent if values is None else self.comm.ipush(values, client, reply + 1)

    # -- to those who do not ask -------------------------------------------------------------------------------------

    def _broadcast(self) -> None:
        """Send the slice to all subscribers when it is time: after `every` clocks, or when they can do nothing else."""
        told = self.lead is not None and self.consistency.clocked and self.progress >= self.lead.granted
        due = (self.progress - self.start) // self.every > (self.sent - self.start) // self.every
        if due or (told and self.sent < self.progress):
            self.sent = self.progress
            for client in self.subscribers:
                self._send_unasked(client)

    def _send_unasked(self, client: int) -> None:
        """Send the slice, unless the one before is still on its way: then the newest follows when that has arrived."""
        before = self.subscribers[client]
        if before is not None and not before.done:
            self.owed.add(client)
            return
        self.owed.discard(client)
        header = self._header()
        if self.lead is not None and self.consistency.clocked:
            header["told"] = min(self.lead.limit, self.progress + self.consistency.bound + 1)
            header["step"] = ENDED if self.progress >= self.lead.steps else NONE
            self.lead.granted = max(self.lead.granted, int(header["told"]))
        self.subscribers[client] = self._send(client, UNASKED, header, self._copy())

    def _send_owed(self) -> bool:
        ready = [client for client in self.owed if client in self.subscribers and self.subscribers[client].done]
        for client in ready:
            self._send_unasked(client)
        return bool(ready)
