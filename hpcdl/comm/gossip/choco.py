"""CHOCO-SGD's gossip: neighbours send compressed differences, and average estimates of their vectors.

    all ranks know estimates e_1, ..., e_N of the vectors x_1, ..., x_N of their neighbours; at first e_i = x_0
    in a round, on rank i:
        q_i <- c Q(x_i - e_i)                                  sent to each neighbour
        e_j <- e_j + q_j                                       for itself and each neighbour j
        x_i <- x_i + gamma * sum over j of W[i, j] (e_j - e_i)

    cost of a round     m(K) bytes over each edge, m(K) the length of the codec's message of K values; one latency

Since W stays the same and its rows sum to 1, a rank keeps e_i and s_i = sum over j of W[i, j] e_j, two vectors for any
number of neighbours: s_i <- s_i + sum over j of W[i, j] q_j, and x_i <- x_i + gamma (s_i - e_i). The average of all x_i
stays, whatever Q leaves out. What a message leaves out is in the next difference, so that error feedback needs no
residual. With Q(v) = v and gamma = 1 a round is x_i <- sum over j of W[i, j] x_j, plain gossip.

c and the default of gamma are measured (`measured`): c is the factor with which c Q(v) is closest to v, and gamma is
then 1 - |c Q(v) - v|^2 / |v|^2, which is 1 for a codec without error. A lower gamma is safer, and slower.

(Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed
communication", ICML 2019, algorithm 2; two vectors: appendix of the same)"""

from typing import NamedTuple

import numpy as np

from hpcdl.comm.communicator import Communicator
from hpcdl.comm.compression import RandomKey, VectorCodec, make_codec
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_scaled
from hpcdl.memory import Memory

TAG = 13
SAMPLE = 1 << 14  # longest vector on which a codec is measured


class Fidelity(NamedTuple):
    """How close c Q(v) is to v: the factor c, and quality = 1 - |c Q(v) - v|^2 / |v|^2."""

    factor: float
    quality: float


def measured(codec: VectorCodec, size: int) -> Fidelity:
    """Return the fidelity of a codec for normal random numbers, as many as `size`; the same on every rank."""
    v = np.random.default_rng(0).standard_normal(min(size, SAMPLE)).astype(codec.dtype)
    message, q = codec.message(v.size), np.empty_like(v)
    codec.encode(v, message, RandomKey())
    codec.decode(message, q)
    inner, squares = float(v @ q), float(q @ q)
    return Fidelity(inner / squares, inner**2 / (squares * float(v @ v))) if squares else Fidelity(1.0, 0.0)


class ChocoGossip:
    """Rounds of compressed gossip over a vector x, which is the same on all ranks now. w: the mixing matrix of all
    rounds. gamma: the consensus step; 0: as measured. estimate, mixed: e_i and s_i. memory: counts the buffers."""

    def __init__(self, comm: Communicator, x: Array, w: np.ndarray, spec: str, gamma: float, seed: int, memory: Memory):
        self.comm, self.x, self.seed, rank = comm, x, seed, comm.rank
        self.codec = make_codec(spec, x.dtype)
        self.factor, quality = measured(self.codec, x.size)
        self.gamma, self.own = gamma or quality, float(w[rank, rank])
        self.weights = {j: float(w[rank, j]) for j in np.flatnonzero(w[rank]).tolist() if j != rank}
        self.receivers = [i for i in np.flatnonzero(w[:, rank]).tolist() if i != rank]
        self.difference = memory.hold("parameters", np.empty_like(x))
        self.estimate, self.mixed = x.copy(), x.copy()
        self.message = memory.hold("parameters", self.codec.message(x.size))
        self.inbox = {j: memory.hold("parameters", self.codec.message(x.size)) for j in self.weights}
        add_scaled(x[:1], x[:1], 0.0)  # no effect, but compiles the kernel before any timed call

    def round(self, turn: int) -> None:
        """Run round `turn`, and block until its end."""
        self.difference[:] = self.x
        add_scaled(self.difference, self.estimate, -1.0)
        self.codec.encode(self.difference, self.message, RandomKey(self.seed, turn, "gossip"))
        requests = [self.comm.iwait(message, j, TAG) for j, message in self.inbox.items()]
        requests += [self.comm.ipush(self.message, i, TAG) for i in self.receivers]
        self.codec.add(self.message, self.estimate, self.factor)
        self.codec.add(self.message, self.mixed, self.factor * self.own)
        for request in requests:
            request.wait()
        for j, message in self.inbox.items():
            self.codec.add(message, self.mixed, self.factor * self.weights[j])
        add_scaled(self.x, self.mixed, self.gamma)
        add_scaled(self.x, self.estimate, -self.gamma)
