"""Rounds of gossip: every rank replaces its vector by a weighted mean of its own and its neighbours' vectors.

    x_i <- sum over j of W[i, j] x_j         one message of K values over each edge, one latency

A round keeps the average over all ranks if the columns of W sum to 1 (mixing.py). It may overlap with computing, as
long as x does not change. An accelerated round also uses the vector of the round before, as Chebyshev polynomials do.
It shrinks the distance to the average to about 1 - sqrt(2 (1 - lambda)) of itself, instead of lambda:

    x_(k+1) = (1 + eta) W x_k - eta x_(k-1),   x_(-1) = x_0,   eta = (1 - sqrt(1 - lambda^2)) / (1 + sqrt(1 - lambda^2))

(Boyd et al., "Randomized gossip algorithms", 2006; Liu and Morse, "Accelerated linear iterations for distributed
averaging", 2011)"""

from typing import Any

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array, device_of
from hpcdl.kernels.reduce import add_scaled, scale
from hpcdl.memory import Memory

TAG = 11


class Gossip:
    """Rounds of gossip over a vector x, which `start` sends and `finish` replaces; memory: counts received vectors."""

    def __init__(self, comm: Communicator, x: Array, memory: Memory | None = None):
        self.comm, self.x, self.device, self.memory = comm, x, device_of(x), memory or Memory()
        self.received: dict[int, Array] = {}
        self.in_flight: list[Request] = []
        self.weights: Any = None  # of x, and of the received vectors by rank
        scale(x[:1], 1.0)  # no effect, but compiles the kernel before any timed call
        add_scaled(x[:1], x[:1], 0.0)

    def start(self, w: np.ndarray) -> None:
        """Send x to i if w[i, rank] > 0, and receive from j if w[rank, j] > 0; x must not change until `finish`."""
        rank = self.comm.rank
        senders = [j for j in np.flatnonzero(w[rank]).tolist() if j != rank]
        self.received |= {j: self._vector() for j in senders if j not in self.received}
        self.in_flight = [self.comm.iwait(self.received[j], j, TAG) for j in senders]
        self.in_flight += [self.comm.ipush(self.x, i, TAG) for i in np.flatnonzero(w[:, rank]).tolist() if i != rank]
        self.weights = float(w[rank, rank]), {j: float(w[rank, j]) for j in senders}

    def progress(self, _part: slice | None = None) -> None:
        """Advance the messages in flight; may serve as `on_ready` of a backward pass."""
        all(request.test() for request in self.in_flight)  # an unsuccessful test advances all others

    def finish(self) -> None:
        """Replace x by the sum over j of w[rank, j] x_j, when all vectors have arrived."""
        for request in self.in_flight:
            request.wait()
        self.in_flight, (own, others) = [], self.weights
        if own != 1:
            scale(self.x, own)
        for j, weight in others.items():
            add_scaled(self.x, self.received[j], weight)

    def _vector(self) -> Array:
        return self.memory.hold("parameters", self.device.empty(self.x.size, self.x.dtype))

    def round(self, w: np.ndarray) -> None:
        """Run a round with the mixing matrix `w`, and block until its end."""
        self.start(w)
        self.finish()


class AcceleratedGossip(Gossip):
    """Accelerated rounds of gossip. before: x before the last round. `begin` starts a new sequence of rounds."""

    def __init__(self, comm: Communicator, x: Array, eta: float, memory: Memory | None = None):
        super().__init__(comm, x, memory)
        self.eta, self.before, self.sent = eta, self.device.empty(x.size, x.dtype), self._vector()

    def begin(self) -> None:
        """Start a new sequence: the next round is its first."""
        self.before[:] = self.x

    def finish(self) -> None:
        """Replace x by (1 + eta) sum over j of w[rank, j] x_j - eta before, and `before` by the former x."""
        self.sent[:] = self.x
        super().finish()
        scale(self.x, 1 + self.eta)
        add_scaled(self.x, self.before, -self.eta)
        self.before[:] = self.sent
