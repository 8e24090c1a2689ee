"""Asynchronous pairwise gossip: two ranks replace their vectors by the mean of both, and no other rank waits.

    x_i, x_j <- (x_i + x_j) / 2

    lower rank i                  higher rank j           The lower rank of a pair sends a copy a of x; the higher
    a <- x_i      -- a -->        x_j <- (a + x_j) / 2    rank averages, and sends the mean m back. A rank that has
                  <-- m --        m <- x_j                picked a lower rank asks that one to begin.
    x_i <- x_i + m - a

Averagings are atomic: until m has arrived, i neither sends its x to another rank nor averages another's. Its training
steps go on; they are contained in x_i - a, so the result is as if they had followed an instantaneous averaging. Without
steps both ranks hold the same bits. There is no deadlock, on any graph: only lower ranks wait, for higher ones, so the
highest waiting rank waits for one that answers; the others follow in turn. No rank blocks meanwhile: `progress`
advances messages between layers and steps. An averaging costs 2 messages of K values, one or two signals of 8 bytes,
and the memory of about 2 vectors on each rank. (After Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel
stochastic gradient descent", ICML 2018, where a thread communicates and the graph is bipartite)"""

import os
from typing import Any

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.framing import Frame, Inbox
from hpcdl.comm.gossip.topology import Topology
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.reduce import add_into, add_scaled, scale
from hpcdl.memory import Memory

SIGN, MEAN = Frame(1, ["sign"], number=np.int64), 3  # a signal, and values under tag 2; tag of the mean
COMING, SEND_ME, LAST = 1, 2, 3  # signals: my values follow; send me yours; no more signals


class PairwiseGossip:
    """Averages this rank's vector `x` with its neighbours' vectors, in pairs; memory: counts the vectors in flight.
    averagings: number completed. moved: the caller sets it if a step has changed x since x was sent.
    resting: True while this rank begins no averaging."""

    sent: Any  # Array | None, as `mean`
    mean: Any
    sending: Any  # Request | None, as `answer`
    answer: Any

    def __init__(self, comm: Communicator, x: Array, topology: Topology, memory: Memory | None = None):
        self.comm, self.x, self.topology, self.memory = comm, x, topology, memory or Memory()
        self.to_send: dict[int, bool] = {}  # queue of higher ranks to send x to
        self.requested: set[int] = set()  # lower ranks that were asked to send theirs
        self.arriving: dict[int, tuple[np.ndarray, Request]] = {}  # vectors from lower ranks, and their receives
        self.buffers: list[tuple[np.ndarray, Request]] = []  # send buffers, and the last message of each
        self.sent = self.sending = self.mean = self.answer = None  # the vector sent to a higher rank, and its answer
        self.averagings, self.moved, self.resting = 0, False, False
        # Compile the kernels before the first averaging.
        one, other = (device_of(x).zeros(1, x.dtype) for _ in range(2))
        add_into(one, other)
        add_scaled(one, other, -1.0)
        scale(one, 0.5)

    def listen(self) -> None:
        """Start to receive signals of the neighbours."""
        neighbours = sorted(to for rank, to in self.topology.edges if rank == self.comm.rank)
        self.signs = Inbox(self.comm, SIGN, neighbours)

    def pick(self, random: np.random.Generator, step: int) -> None:
        """Queue an averaging with a random neighbour in this step's graph, or ask it to begin; once for each pair."""
        neighbours = self.topology.graph(step)[self.comm.rank]
        if neighbours:
            other = neighbours[random.integers(len(neighbours))]
            if other > self.comm.rank:
                self.to_send[other] = True
            elif other not in self.requested:
                self.requested.add(other)
                self._sign(other, SEND_ME)
        self.progress()

    def progress(self, _part: slice | None = None) -> bool:
        """Advance the averagings; True if one was completed. May serve as `on_ready` of a backward pass."""
        before = self.averagings
        self.signs.look()
        for source in self.signs.arrived():
            self._handle_sign(source, int(self.signs.take(source)["sign"]))
        if self.answer is not None and self.answer.done:
            self._take_mean()
        if self.answer is None:
            for source in [source for source, (_, request) in self.arriving.items() if request.done]:
                self._average(source)
            if self.to_send and not self.resting:
                self._send(next(iter(self.to_send)))
        if self.answer is not None or self.requested:
            os.sched_yield()  # the partner may share this core
        return self.averagings > before

    def rest(self, comm: Communicator) -> None:
        """Begin no averaging, but answer until no rank has one open; collective. comm: of the same ranks."""
        self.resting = True
        self.comm.wait_until(lambda: self.answer is None, self.progress)
        all_rest = comm.ibarrier()
        self.comm.wait_until(lambda: all_rest.done, self.progress)

    def go_on(self) -> None:
        """Allow averagings again."""
        self.resting = False

    def close(self) -> None:
        """Receive the last signal of each neighbour, and leave nothing in flight; after `rest`."""
        for neighbour in list(self.signs.room):
            self._sign(neighbour, LAST)
        self.comm.wait_until(lambda: not self.signs.pending, self.progress)
        self.comm.wait_until(lambda: not self.comm.in_flight)

    def _sign(self, to: int, sign: int) -> None:
        SIGN.send(self.comm, to, SIGN.header(sign=sign))

    def _handle_sign(self, source: int, sign: int) -> None:
        if sign == COMING:
            buffer = self._buffer()
            self.arriving[source] = buffer, self.comm.iwait(buffer, source, SIGN.payload)
        elif sign == SEND_ME:
            self.to_send[source] = True
        if sign != LAST:
            self.signs.listen(source)

    def _send(self, to: int) -> None:
        del self.to_send[to]
        self.sent, self.mean, self.moved = self._buffer(), self._buffer(), False
        self.sent[:] = self.x
        _, self.sending = SIGN.send(self.comm, to, SIGN.header(sign=COMING), self.sent)
        self.answer = self.comm.iwait(self.mean, to, MEAN)

    def _take_mean(self) -> None:
        """Add to x the mean less the vector that was sent."""
        if self.moved:
            add_scaled(self.x, self.sent, -1.0)
            add_into(self.x, self.mean)
        else:
            self.x[:] = self.mean
        self.buffers += (self.sent, self.sending), (self.mean, self.answer)
        self.answer = None
        self.averagings += 1

    def _average(self, source: int) -> None:
        """Replace x by the mean of x and the vector of `source`, a lower rank, and send that rank the mean."""
        buffer, _ = self.arriving.pop(source)
        add_into(self.x, buffer)
        scale(self.x, 0.5)
        buffer[:] = self.x
        self.buffers.append((buffer, self.comm.ipush(buffer, source, MEAN)))
        self.requested.discard(source)
        self.averagings += 1

    def _buffer(self) -> np.ndarray:
        for which, (buffer, request) in enumerate(self.buffers):
            if request.done:
                del self.buffers[which]
                return buffer
        return self.memory.hold("parameters", device_of(self.x).empty(self.x.size, self.x.dtype))
