"""Asynchronous gossip in pairs: two ranks at a time replace their vectors by the mean of both, and no other rank waits.

    x_i, x_j <- (x_i + x_j) / 2

    lower rank i                  higher rank j           Of a pair, the lower rank sends its x, and remembers what it
    a <- x_i      -- a -->        x_j <- (a + x_j) / 2    sent; the higher one averages, and sends the mean back. A
                  <-- m --        m <- x_j                rank that has picked a lower one asks that to do so.
    x_i <- x_i + m - a

Atomic: until m has come, i neither sends its x to another nor averages what others sent. Its own steps go on; they are
in x_i - a, so all is as if the averaging had been done at once, and the steps after it. Without steps both hold the
same bits. No circle: only lower ranks have an m to wait for, from higher ones. The highest of them that waits does so
for one that waits for none, which answers; so, in turn, do all others, on any graph: it need not be bipartite. And
nobody stands still meanwhile: messages are taken forward by `progress`, between layers and between steps.

    cost of an averaging     messages                            values        memory
    a pair                   2, and a sign or two of 8 bytes     K each way    about 2 vectors of K on each rank

(Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018. There a
thread of each worker talks, and only ranks of one side of a bipartite graph begin an averaging.)
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
COMING, SEND_ME, LAST = 1, 2, 3  # signs: my values are on their way; send me yours; no more signs


class Pairs:
    """The averagings of this rank's vector `x` with those of its neighbours in the graph.

    averagings: how many have entered x. moved: x has changed since it was sent, by a step: who changes x says so.
    resting: this rank does not begin any. memory: counts the vectors that travel.
    """

    sent: Any  # Array | None, as `mean`
    mean: Any
    sending: Any  # Request | None, as `answer`
    answer: Any

    def __init__(self, comm: Communicator, x: Array, topology: Topology, memory: Memory | None = None):
        self.comm, self.x, self.topology, self.memory = comm, x, topology, memory or Memory()
        self.to_send: dict[int, bool] = {}  # higher ranks that x is to be sent to, the first one first
        self.asked: set[int] = set()  # lower ranks that have been asked to send theirs
        self.arriving: dict[int, tuple[np.ndarray, Request]] = {}  # what lower ranks send, and its receipt
        self.buffers: list[
            tuple[np.ndarray, Request]
        ] = []  # to send from, and the last message that was sent from there
        self.sent = self.sending = self.mean = self.answer = None  # what was sent to a higher rank, and its answer
        self.averagings, self.moved, self.resting = 0, False, False
        one, other = (device_of(x).zeros(1, x.dtype) for _ in range(2))  # compile what an averaging needs, before it
        add_into(one, other)
        add_scaled(one, other, -1.0)
        scale(one, 0.5)

    def listen(self) -> None:
        """From now on the neighbours are heard."""
        neighbours = sorted(to for rank, to in self.topology.edges if rank == self.comm.rank)
        self.signs = Inbox(self.comm, SIGN, neighbours, 1, np.int64)

    def pick(self, random: np.random.Generator, step: int) -> None:
        """Begin an averaging with a random neighbour in the graph of this step, or ask the neighbour to do so.

        A pair that waits for its turn already is not put down once more.
        """
        neighbours = self.topology.graph(step)[self.comm.rank]
        if neighbours:
            other = neighbours[random.integers(len(neighbours))]
            if other > self.comm.rank:
                self.to_send[other] = True
            elif other not in self.asked:
                self.asked.add(other)
                self._sign(other, SEND_ME)
        self.progress()

    def progress(self, _part: slice | None = None) -> bool:
        """Take the averagings as far as messages have come; whether any was done. May serve as `on_ready`."""
        before = self.averagings
        self.signs.look()
        for source in self.signs.arrived():
            self._heed(source, self.signs.take(source)[0])
        if self.answer is not None and self.answer.done:
            self._take_mean()
        if self.answer is None:
            for source in [source for source, (_, request) in self.arriving.items() if request.done]:
                self._average(source)
            if self.to_send and not self.resting:
                self._send(next(iter(self.to_send)))
        if self.answer is not None or self.asked:
            os.sched_yield()  # the other one of the pair may share this core
        return self.averagings > before

    def rest(self, comm: Communicator) -> None:
        """Begin none, and answer until no averaging of any rank of `comm`, the same ranks, is under way; collective."""
        self.resting = True
        self.comm.wait_until(lambda: self.answer is None, self.progress)
        all_rest = comm.ibarrier()
        self.comm.wait_until(lambda: all_rest.done, self.progress)

    def go_on(self) -> None:
        """Averagings may begin again."""
        self.resting = False

    def close(self) -> None:
        """Hear the last sign of each neighbour, and leave nothing in flight; all ranks rest."""
        for neighbour in list(self.signs.room):
            self._sign(neighbour, LAST)
        self.comm.wait_until(lambda: not self.signs.coming, self.progress)
        self.comm.wait_until(lambda: not any(each.communicator is self.comm for each in activity.in_flight))

    def _sign(self, to: int, sign: int) -> None:
        self.comm.ipush(np.array([sign]), to, SIGN)

    def _heed(self, source: int, sign: int) -> None:
        """What a neighbour has let this rank know."""
        if sign == COMING:
            buffer = self._buffer()
            self.arriving[source] = buffer, self.comm.iwait(buffer, source, VALUES)
        elif sign == SEND_ME:
            self.to_send[source] = True
        if sign != LAST:
            self.signs.listen(source)

    def _send(self, to: int) -> None:
        """x goes to a higher rank."""
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
        """x <- (x + values of a lower rank) / 2, which is sent back."""
        buffer, _ = self.arriving.pop(source)
        add_into(self.x, buffer)
        scale(self.x, 0.5)
        buffer[:] = self.x
        self.buffers.append((buffer, self.comm.ipush(buffer, source, MEAN)))
        self.asked.discard(source)
        self.averagings += 1

    def _buffer(self) -> np.ndarray:
        """An array that no message is in."""
        for which, (buffer, request) in enumerate(self.buffers):
            if request.done:
                del self.buffers[which]
                return buffer
        return self.memory.hold("parameters", device_of(self.x).empty(self.x.size, self.x.dtype))
