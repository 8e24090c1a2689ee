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

(Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; Dean et al., NeurIPS 2012)
"""

import math
from collections.abc import Callable

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, device_of
from hpcdl.runs import signals
from hpcdl.services.consistency import BSP, Consistency
from hpcdl.services.roles import divide
from hpcdl.services.slice_server import (
    ANSWER,
    ASKED,
    DRAW,
    ENDED,
    FINISH,
    LAST,
    OVER,
    PULL,
    PUSH,
    REQUEST,
    SUBSCRIBE,
    TO_CLIENT,
    TO_KEEPER,
    UNASKED,
    VALUES,
    SliceServer,
    as_message,
)


def add(values, pushed, push) -> None:
    """The ready-made update: values <- values + pushed."""
    values += pushed


class Link:
    """What a client knows of one server: its rank, its slice of the vector, and the answer that is under way."""

    def __init__(self, rank: int, part: slice, here: bool):
        self.rank, self.part, self.here = rank, part, here
        self.header, self.into, self.requests, self.delivered = np.zeros((), ANSWER), None, (), True
        self.seen, self.version, self.signalled = 0, 0, False
        self.come = self.closed = False  # of answers that were not asked for: whether one has come, and the last one

    def expect(self, comm, into, reply: int) -> None:
        """An answer will come: a header, and values where there is an array for them."""
        self.into, self.delivered = into, not self.here
        if not self.here:
            arrays = [as_message(self.header), *([] if into is None else [into])]
            self.requests = [comm.iwait(array, self.rank, reply + i) for i, array in enumerate(arrays)]

    def deliver(self, header, values) -> None:
        """The answer of the server on this rank."""
        self.header[...], self.delivered = header, True
        if values is not None:
            self.into[:] = values

    @property
    def arrived(self) -> bool:
        """Whether the answer is complete."""
        return self.delivered and all(request.done for request in self.requests)

    def read(self) -> None:
        """Take note of what the header says."""
        self.seen, self.version = float(self.header["seen"]), float(self.header["version"])  # not views of it
        self.signalled |= bool(self.header["signal"])


class ParameterStore:
    """A vector of `size` values of `dtype` on servers; a collective call of all ranks of `comm`.

    servers: the first so many ranks hold the slices, the others are clients; on_workers: every rank holds a slice and
    is a client, too. consistency: how far clients may run ahead. update(values, pushed, push): applies what was pushed
    to a server's slice, in place (see `slice_server.Push`; with rounds it is the sum of all pushes of a clock); where
    it has a member `state`, these are vectors as long as the slice. initial: the whole vector, given on rank 0. block:
    slices are cut at multiples of it only. broadcast_every: servers send their slices to all clients after so many
    clocks (async: versions), without being asked; 0: never. delay: values are applied so many versions late. lead:
    on rank 0, who decides about steps (see the strategy). start: the first clock.

    A rank serves one store at a time: two that are used at once need servers of their own, on communicators of their
    own. UsageError where sizes and ranks do not go together.
    """

    def __init__(
        self,
        comm,
        size: int,
        dtype="float32",
        *,
        servers: int = 1,
        on_workers: bool = False,
        consistency: Consistency = BSP,
        update: Callable = add,
        initial: np.ndarray | None = None,
        block: int = 1,
        broadcast_every: int = 0,
        delay: int = 0,
        lead=None,
        start: int = 0,
    ):
        check(comm.size, size // block, servers, on_workers, consistency, broadcast_every, delay)
        self.comm, self.size, self.dtype = comm.split(0, name="store", allreduce="tree"), size, np.dtype(dtype)
        self.consistency, self.broadcast_every = consistency, broadcast_every
        holders = range(comm.size) if on_workers else range(servers)
        self.clients = range(comm.size) if on_workers else range(servers, comm.size)
        cuts = [slice(cut.start * block, cut.stop * block) for cut in chunks(size // block, len(holders))]
        cuts[-1] = slice(cuts[-1].start, size)
        self.links = [Link(rank, cut, rank == comm.rank) for rank, cut in zip(holders, cuts, strict=True)]
        self.own_last = sorted(self.links, key=lambda link: link.here)  # its lead may wait for the other servers
        self.serves, self.works = comm.rank in holders, comm.rank in self.clients
        self.clock, self.subscribed, self.server = start, False, None
        self.drawer = Link(0, slice(0, 0), comm.rank == 0 and on_workers)  # answers to DRAW
        if self.serves:
            self.part, every = cuts[comm.rank], max(1, broadcast_every)
            values = CPU.zeros(self.part.stop - self.part.start, self.dtype)
            self.server = SliceServer(self.comm, values, self.clients, consistency, update, lead, delay, every)
            self.server.deliver = self._deliver
        if self.comm.mpi.bcast(initial is not None):
            self.scatter(initial)
        for link in self.links:
            link.seen = link.version = start
        self.led = self.comm.mpi.bcast(lead is not None)
        if self.serves:
            self.server.kept = self.led and comm.rank > 0
            self.server.begin(start)

    def scatter(self, whole: np.ndarray | None, which: int = 0) -> None:
        """Give each server its slice of a vector that rank 0 has; before the first pull. which: as in `gather`."""
        if self.comm.rank == 0:
            for link in self.links[1:]:
                self.comm.push(whole[link.part], link.rank, VALUES)
        if self.serves:
            held = self.server.vector(which)
            if self.comm.rank == 0:
                held[:] = whole[self.part]
            else:
                self.comm.wait(held, 0, VALUES)

    # -- what a client does ------------------------------------------------------------------------------------------

    def pull(self, into: np.ndarray, part: slice | None = None) -> int | None:
        """into <- the store's values, all or those of `part`, as fresh as the consistency asks; waits until they are.

        Returns the step to compute (the client's clock, under async the next of a counter that all share), or None
        when there is none left. Where servers send without being asked it takes what has come, and waits only when
        that is too old; `into` is then the whole vector, the same array each time.
        """
        if self.broadcast_every:
            if part is not None:
                raise UsageError("servers that send without being asked send all: pull without a part")
            self._checked(into, None)
            return self._newest(into)
        return self._fetch(PULL, into, part)

    def push(self, values, part: slice | None = None, count=1.0, total=1.0, loss=0.0, norm=0.0) -> None:
        """Send `values` (all, or those of `part`) to the servers, which apply them; this client's clock goes on by one.

        count, total, loss, norm: for the update and whoever leads (see `slice_server.Push`).
        """
        part = self._checked(values, part)
        amounts = {"count": count, "total": total, "loss": loss, "norm": norm}
        sent = []
        for link in self.own_last:
            start, stop = overlap(link.part, part)
            request = self._request(PUSH, link, start, stop, **amounts)
            mine = values[start - part.start : stop - part.start] if start < stop else values[:0]
            if link.here:
                room = self.server.room()
                room[: mine.size] = mine
                self.server.handle(request, link.rank, room)
            else:
                sent += [self.comm.ipush(as_message(request), link.rank, ASKED)]
                sent += [self.comm.ipush(mine, link.rank, VALUES)]
        self._wait_until(lambda: all(request.done for request in sent))
        self.clock += 1

    def attend(self, *_) -> None:
        """Answer the requests that have come, where this rank is a server, too: for now and then, while it computes."""
        if self.serves:
            self.server.inbox.look()
            self.server.answer()

    def _wait_until(self, condition) -> None:
        self.comm.wait_until(condition, self.server.answer if self.serves else None)

    def close(self, into: np.ndarray | None = None) -> None:
        """No more pushes of this client. Returns when all clients have closed; into <- the final values."""
        if self.subscribed:
            into = np.empty(self.size, self.dtype) if into is None else into
            self._checked(into, None)
            self._wait_until(lambda: self.drawer.arrived)  # one step ahead of need
            for link in self.own_last:
                self._send(self._request(LAST, link, *ends(link.part), reply=UNASKED), link)
            self._wait_until(lambda: self._take_newest(into, last=True))
        else:
            self._fetch(LAST, into)
        if self.serves:
            self.serve()

    def serve(self) -> None:
        """What a server does: answer until all clients have closed."""
        self.server.serve()
        if self.led and self.comm.rank == 0:
            for link in self.links[1:]:
                self.comm.push(as_message(self._request(OVER, link)), link.rank, ASKED)

    def gather(self, whole: np.ndarray, which: int = 0, needs: float = -math.inf, finish: bool = False) -> None:
        """whole <- the servers' vectors; on rank 0, while it serves. For scores and checkpoints.

        which: 0, the values, or 1, 2, ...: of the update's state. needs: the clock that each server is to have reached.
        finish: what is delayed is applied first.
        """
        others = [Link(link.rank, link.part, False) for link in self.links[1:]]
        for link in others:
            link.expect(self.comm, whole[link.part], TO_KEEPER)
            request = self._request(FINISH if finish else PULL, link, *ends(link.part), reply=TO_KEEPER, which=which)
            request["needs"] = needs
            self._send(request, link)
        if finish:
            self.server.flush()
        whole[self.part] = self.server.vector(which)
        self.comm.wait_until(lambda: all(link.arrived for link in others))

    def free(self) -> None:
        """Give back the communicator; a collective call, after `close` and `serve`."""
        self.comm.free()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _request(self, operation, link, start=0, stop=0, reply=TO_CLIENT, **fields) -> np.ndarray:
        """A request about the elements start to stop of the whole vector."""
        request = np.zeros((), REQUEST)
        signalled = bool(signals.received) or any(link.signalled for link in self.links)  # the lead has to know
        fields |= {"operation": operation, "reply": reply, "signal": signalled}
        fields |= {"start": start - link.part.start, "stop": stop - link.part.start}
        fields |= {"clock": self.clock, "seen": link.seen, "version": link.version}
        for name, value in fields.items():
            request[name] = value
        request["needs"] = self.clock - self.consistency.bound
        return request

    def _send(self, request, link) -> None:
        if link.here:
            self.server.handle(request, link.rank)
        else:
            self.comm.ipush(as_message(request), link.rank, ASKED)

    def _deliver(self, reply: int, header, values) -> None:
        """An answer of the server on this rank to its client."""
        own = self.drawer if self.subscribed and reply == TO_CLIENT else self.links[self.comm.rank]
        own.deliver(header, values)

    def _fetch(self, operation, into, part=None) -> int | None:
        """Ask all servers for what they hold of `part`; returns the step that the first one gives."""
        part = slice(0, 0) if into is None else self._checked(into, part)
        cuts = [overlap(link.part, part) for link in self.own_last]
        for link, (start, stop) in zip(self.own_last, cuts, strict=True):
            array = into[start - part.start : stop - part.start] if start < stop else np.empty(0, self.dtype)
            link.expect(self.comm, array, TO_CLIENT)
        for link, cut in zip(self.own_last, cuts, strict=True):
            self._send(self._request(operation, link, *cut), link)
        self._wait_until(lambda: all(link.arrived for link in self.links))
        for link in self.links:
            link.read()
        return self._step(self.links[0])

    def _checked(self, array, part: slice | None) -> slice:
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

    def _step(self, link) -> int | None:
        return None if link.header["step"] == ENDED else int(link.header["step"])

    @property
    def paused(self) -> float:
        """Seconds that the first server has spent on other things than serving, as far as this client knows."""
        return float(self.links[0].header["paused"])

    # -- where servers send without being asked ----------------------------------------------------------------------

    def _newest(self, into) -> int | None:
        if not self.subscribed:
            self._subscribe()
        self._wait_until(lambda: self._take_newest(into) and self._may_go_on())
        if self.consistency.clocked:
            return None if self.links[0].header["step"] == ENDED else self.clock
        step = self._step(self.drawer)
        if step is not None:
            self._draw()
        return step

    def _subscribe(self) -> None:
        self.subscribed = True
        for link in self.links:
            link.expect(self.comm, CPU.empty(link.part.stop - link.part.start, self.dtype), UNASKED)
            self._send(self._request(SUBSCRIBE, link), link)
        if not self.consistency.clocked:
            self._draw()

    def _draw(self) -> None:
        """Ask for the next step; one ahead, so that its number is here when it is needed."""
        self.drawer.expect(self.comm, None, TO_CLIENT)
        self._send(self._request(DRAW, self.drawer), self.drawer)

    def _take_newest(self, into, last: bool = False) -> bool:
        """into <- what has come; whether all servers have sent something (last: their last)."""
        for link in self.links:
            while link.arrived and not link.closed:
                device_of(into).copy_in(into[link.part], link.into)
                link.read()
                if link.header["last"]:
                    link.closed = True
                else:
                    link.come = True
                    link.expect(self.comm, link.into, UNASKED)
        return all(link.closed if last else link.come for link in self.links)

    def _may_go_on(self) -> bool:
        """Whether the parameters at hand are fresh enough for the next step, or it is known that there is none."""
        if not self.consistency.clocked:
            return self.drawer.arrived
        if self.links[0].header["step"] == ENDED:
            return True
        fresh = all(link.seen >= self.clock - self.consistency.bound for link in self.links)
        return fresh and self.clock < self.links[0].header["told"]


def ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def overlap(held: slice, asked: slice) -> tuple[int, int]:
    """Start and stop of what both slices have; empty at the beginning of `held` where that is nothing."""
    start, stop = max(held.start, asked.start), min(held.stop, asked.stop)
    return (start, stop) if start < stop else (held.start, held.start)


def check(ranks: int, units: int, servers: int, on_workers: bool, consistency, broadcast_every=0, delay=0) -> None:
    """Raise UsageError where so many ranks cannot serve `units` that are not cut."""
    consistency.check()
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
