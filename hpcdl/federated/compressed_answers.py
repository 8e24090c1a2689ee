"""Compressed answers of clients: each travels as its own message, as to a real server, to all ranks.

    message = [ codec's message of w_k - w | n_k ]        m(d) + 8 bytes for d parameters, in the place of 8 (d + 1)

A compressed change cannot be added before it is decoded, so a round is an all-gather of its messages, and every rank is
the server: it decodes all, and adds them as fixed-point numbers (codec.py). With R messages on the rank that has
most, a rank sends (N - 1) R (m(d) + 8) bytes.

Clients keep no residual: one that is drawn rarely would send what it left out many rounds ago, of another model, and a
server with K clients cannot expect K vectors to be kept. So unbiased methods (qsgd, terngrad) average their errors over
clients, and of topk or sign a bias stays. (Reisizadeh et al., "FedPAQ", AISTATS 2020; for residuals with all clients in
each round: Sattler et al., "Robust and communication-efficient federated learning from non-i.i.d. data", 2019)"""

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.compression import RandomKey, make_codec
from hpcdl.federated.aggregators import RoundPart
from hpcdl.federated.codec import Codec
from hpcdl.kernels.device import CPU, device_of
from hpcdl.kernels.reduce import add_into

WEIGHT = 8  # bytes of n_k


class CompressedAnswers(RoundPart):
    """Compresses changes like `like` by the method `spec`, and sums them in the numbers of `fixed`."""

    def __init__(self, comm: Communicator, spec: str, like: np.ndarray, fixed: Codec, seed: int):
        self.comm, self.fixed, self.seed = comm, fixed, seed
        self.codec = make_codec(spec, like.dtype)
        self.change = device_of(like).empty(like.size, like.dtype)
        self.total = device_of(like).empty(fixed.length, np.int64)
        self.decoded = np.empty(like.size, like.dtype)
        self.length = self.codec.message_bytes(like.size)
        self.message = CPU.empty(self.length + WEIGHT, np.uint8)
        self.dealt: list[list[int]] = []

    def begin(self, dealt: list[list[int]]) -> None:
        """Begin a round, in which the clients dealt[r] on each rank r answer."""
        self.dealt, self.rows = dealt, CPU.zeros((self.comm.size, max(map(len, dealt)), self.message.size), np.uint8)

    def encode(self, client: int, change: np.ndarray, weight: int, turn: int) -> np.ndarray:
        """Return the client's message in round `turn`, which the next call overwrites."""
        key = RandomKey(self.seed, turn, f"client {client}")
        self.codec.encode(device_of(change).host(change), self.message[: self.length], key)
        self.message[self.length :] = np.array([weight]).view(np.uint8)
        return self.message

    def add(self, client: int, message: np.ndarray) -> None:
        """Add the message of a client on this rank."""
        self.rows[self.comm.rank, self.dealt[self.comm.rank].index(client)] = message

    def finish(self) -> np.ndarray:
        """Return the sum of the decoded answers, the same bits on all ranks; collective."""
        if self.rows.size:
            self.comm.all_gather(self.rows.reshape(-1))
        self.total[:] = 0
        for rows, clients in zip(self.rows, self.dealt, strict=True):
            for row, client in zip(rows, clients, strict=False):
                self.message[:] = row  # aligned
                self.codec.decode(self.message[: self.length], self.decoded)
                device_of(self.change).copy_in(self.change, self.decoded)
                weight = int(row[self.length :].copy().view(np.int64)[0])
                add_into(self.total, self.fixed.encode(client, self.change, weight))
        return self.total
