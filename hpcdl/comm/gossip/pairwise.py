"""Asynchronous pairwise gossip: two ranks replace their vectors by the mean of both, and no other rank waits.

    x_i, x_j <- (x_i + x_j) / 2

    lower rank i                  higher rank j           The lower rank of a pair sends a copy a of x; the higher
    a <- x_i      -- a -->        x_j <- (a + x_j) / 2    rank averages, and sends the mean m back. A rank that has
                  <-- m --        m <- x_j                picked a lower rank asks that one to begin.
    x_i <- x_i + m - a

Averagings are atomic: until m has arrived, i neither sends its x to another rank nor averages another's. Its own
training steps go on; they are contained in x_i - a, so the result is as if the averaging had been instantaneous and the
steps had followed. Without steps both hold the same bits. There is no deadlock, on any graph (it need not be
bipartite): only lower ranks wait, for higher ones, so the highest waiting rank waits for one that does not wait and
answers; the others follow in turn. No rank blocks meanwhile: `progress` advances messages between layers and between
steps.

    cost of an averaging     messages                            values        memory
    a pair                   2, and one or two signals of 8 bytes     K each way    about 2 vectors of K on each rank

(Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018. There a
thread of each worker communicates, and only the ranks of one side of a bipartite graph begin an averaging.)
"""

import os
from typing import Any

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.gossip.topology import Topology
from hpcdl.comm.inbox import Inbox
from hpcdl.comm.progress import activity
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.reduce import add_into, add_scaled, scale
from hpcdl.memory import Memory

SIGN, VALUES, MEAN = 1, 2, 3  # tags
COMING, SEND_ME, LAST = 1, 2, 3  # signals: my values follow; send me yours; no more signals


class PairwiseGossip:
    """The averagings of this rank's vector `x` with those of its neighbours in the graph.

    averagings: the number that have entered x. moved: set by the caller if a step has changed x since it was sent.
    resting: True while this rank begins no averaging. memory: counts the vectors in flight.
    """

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
        one, other = (
            device_of(x).zeros(1, x.dtype) for _ in range(2)
        )  # compile the kernels before the first averaging
        add_into(one, other)
        add_scaled(one, other, -1.0)
        scale(one, 0.5)

    def listen(self) -> None:
        """Start to receive signals of the neighbours."""
        neighbours = sorted(to for rank, to in self.topology.edges if rank == self.comm.rank)
        self.signs = Inbox(self.comm, SIGN, neighbours, 1, np.int64)

    def pick(self, random: np.random.Generator, step: int) -> None:
        """Begin an averaging with a random neighbour in the graph of this step, or ask the neighbour to do so.

        A pair that is already queued is not queued again.
        """
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
        """Advance the averagings; True if any was done. May serve as `on_ready` of a backward pass."""
        before = self.averagings
        self.signs.look()
        for source in self.signs.arrived():
            self._handle_sign(source, self.signs.take(source)[0])
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
        """Begin no averagings, and answer until none of any rank of `comm` (the same ranks) is open; collective."""
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
        self.comm.wait_until(lambda: not any(each.communicator is self.comm for each in activity.in_flight))

    def _sign(self, to: int, sign: int) -> None:
        self.comm.ipush(np.array([sign]), to, SIGN)

    def _handle_sign(self, source: int, sign: int) -> None:
        """Handle a neighbour's signal."""
        if sign == COMING:
            buffer = self._buffer()
            self.arriving[source] = buffer, self.comm.iwait(buffer, source, VALUES)
        elif sign == SEND_ME:
            self.to_send[source] = True
        if sign != LAST:
            self.signs.listen(source)

    def _send(self, to: int) -> None:
        """Send x to a higher rank."""
        del self.to_send[to]
        self.sent, self.mean, self.moved = self._buffer(), self._buffer(), False
        self.sent[:] = self.x
        self._sign(to, COMING)
        self.sending = self.comm.ipush(self.sent, to, VALUES)
        self.answer = self.comm.iwait(self.mean, to, MEAN)

    def _take_mean(self) -> None:
        """x <- x + mean - what was sent."""
        if self.moved:
            add_scaled(self.x, self.sent, -1.0)
            add_into(self.x, self.mean)
        else:
            self.x[:] = self.mean
        self.buffers += (self.sent, self.sending), (self.mean, self.answer)
        self.answer = None
        self.averagings += 1

    def _average(self, source: int) -> None:
        """x <- (x + values of a lower rank) / 2, and send it back."""
        buffer, _ = self.arriving.pop(source)
        add_into(self.x, buffer)
        scale(self.x, 0.5)
        buffer[:] = self.x
        self.buffers.append((buffer, self.comm.ipush(buffer, source, MEAN)))
        self.requested.discard(source)
        self.averagings += 1

    def _buffer(self) -> np.ndarray:
        """Return a send buffer that is not in use."""
        for which, (buffer, request) in enumerate(self.buffers):
            if request.done:
                del self.buffers[which]
                return buffer
        return self.memory.hold("parameters", device_of(self.x).empty(self.x.size, self.x.dtype))
