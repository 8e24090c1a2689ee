"""Gossip: every rank replaces its vector by a weighted mean of its own and its neighbours'.

    x_i <- sum over j of W[i, j] x_j         one message over each edge, and along no other way

    cost of a round      messages sent by rank i      values sent                         latencies
    each rank            neighbours that it has       K for each of them                  1

It keeps the average over all ranks where the columns of W sum to 1 (hpcdl/comm/gossip/mixing.py). What a round takes
from start to end may pass while this rank computes: x must only stay as it is meanwhile.

Accelerated, a round looks back at the one before, as Chebyshev's polynomials do, and the distance to the average then
falls by about 1 - sqrt(2 (1 - lambda)) a round, not by lambda:

    x_(k+1) = (1 + eta) W x_k - eta x_(k-1),   x_(-1) = x_0,   eta = (1 - sqrt(1 - lambda^2)) / (1 + sqrt(1 - lambda^2))

(Boyd et al., "Randomized gossip algorithms", 2006; Liu and Morse, "Accelerated linear iterations for distributed
averaging", 2011)
"""

from typing import Any

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.reduce import add_scaled, scale
from hpcdl.memory import Memory

TAG = 11


class Gossip:
    """Rounds of gossip over one vector x, which `start` sends and `finish` replaces; collective over neighbours.

    memory: counts the vectors that are received.
    """

    def __init__(self, comm: Communicator, x: Array, memory: Memory | None = None):
        self.comm, self.x, self.device, self.memory = comm, x, device_of(x), memory or Memory()
        self.received: dict[int, Array] = {}
        self.in_flight: list[Request] = []
        self.weights: Any = None  # of x, and of what is received, by rank
        scale(x[:1], 1.0)  # changes nothing, but compiles before any clock runs
        add_scaled(x[:1], x[:1], 0.0)

    def start(self, w: np.ndarray) -> None:
        """Send x to the ranks i with w[i, rank] > 0, and prepare for those j with w[rank, j] > 0; x must now rest."""
        rank = self.comm.rank
        senders = [j for j in np.flatnonzero(w[rank]).tolist() if j != rank]
        for j in senders:
            if j not in self.received:
                self.received[j] = self._vector()
        self.in_flight = [self.comm.iwait(self.received[j], j, TAG) for j in senders]
        self.in_flight += [self.comm.ipush(self.x, i, TAG) for i in np.flatnonzero(w[:, rank]).tolist() if i != rank]
        self.weights = float(w[rank, rank]), {j: float(w[rank, j]) for j in senders}

    def progress(self, _part: slice | None = None) -> None:
        """Take forward what is in flight; may serve as `on_ready` of a backward pass."""
        all(request.test() for request in self.in_flight)  # the first that is not done takes all others forward

    def finish(self) -> None:
        """x <- sum over j of w[rank, j] x_j, when all has arrived."""
        for request in self.in_flight:
            request.wait()
        self.in_flight, (own, others) = [], self.weights
        if own != 1:
            scale(self.x, own)
        for j, weight in others.items():
            add_scaled(self.x, self.received[j], weight)

    def _vector(self) -> Array:
        """One as long as x."""
        return self.memory.hold("parameters", self.device.empty(self.x.size, self.x.dtype))

    def round(self, w: np.ndarray) -> None:
        """A round from start to end."""
        self.start(w)
        self.finish()


class AcceleratedGossip(Gossip):
    """Rounds that look back at the one before; `before` is x of that round. `begin` a new sequence of rounds."""

    def __init__(self, comm: Communicator, x: Array, eta: float, memory: Memory | None = None):
        super().__init__(comm, x, memory)
        self.eta, self.before, self.sent = eta, self.device.empty(x.size, x.dtype), self._vector()

    def begin(self) -> None:
        """The next round is the first one."""
        self.before[:] = self.x

    def finish(self) -> None:
        """x <- (1 + eta) sum over j of w[rank, j] x_j - eta before, before <- x."""
        self.sent[:] = self.x
        super().finish()
        scale(self.x, 1 + self.eta)
        add_scaled(self.x, self.before, -self.eta)
        self.before[:] = self.sent
