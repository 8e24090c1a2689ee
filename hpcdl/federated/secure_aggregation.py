"""Secure aggregation: a server learns the sum of the clients' vectors, and nothing else about any of them.

Client u adds to its vector x_u a mask of its own, and a mask agreed with each other client v, which v subtracts:

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)      modulo 2^64

    y_1 = x_1 + b_1 + s_12 + s_13
    y_2 = x_2 + b_2 - s_12        + s_23             y_1 + y_2 + y_3 = x_1 + x_2 + x_3 + b_1 + b_2 + b_3
    y_3 = x_3 + b_3        - s_13 - s_23

Each y_u by itself is uniformly random. A client that does not answer leaves its s_uv in the others' y_v; so each
client first gives each other client a share of its secrets (shamir.py), and any t clients can reveal to the server, for
each client, either b_u or s_u, never both:

    round              each client sends to the server                  bytes, m clients     it receives
    0 advertise keys   two public keys: c_u for shares, s_u for masks   64                   all clients' keys
    1 share keys       for each v, sealed for v: shares of s_u and b_u  82 m                 what was sealed for it
    2 masked input     y_u, of d values                                 8 d                  who has answered
    3 unmasking        for each that answered: its share of b_u,        33 m
                       for each other client: its share of s_u

The server subtracts PRG(b_u) of clients that have answered, and PRG(s_uv) of clients that have not. To see x_u it needs
both secrets of u: b_u protects a y_u that arrives late, after s_u has been revealed.

    cost of a round    a client    2 (m - 1) key agreements, m masks of d values
                       the server  1 mask per answer, and per drop-out one for each answer

Guarantee: the server and up to t - 1 clients, all honest but curious, learn the sum over the clients that have answered
and no more. With t > m / 2 a server that lies about who has answered cannot get both secrets of a client, either. A
server that invents clients is not prevented: signed keys would be needed.

Here all ranks together are the server: an all-reduce adds up the masked vectors of their simulated clients, and each
rank removes an equal part of the masks. Keys come from the system's random numbers, not the seed; the sum is the same.

(Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, for honest but
curious parties. X25519, HKDF-SHA256, AES-128 in GCM for shares and in counter mode as PRG: package `cryptography`)"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.errors import LoneError, UsageError
from hpcdl.federated import shamir
from hpcdl.federated.aggregators import SumAggregator
from hpcdl.federated.shamir import SHARE
from hpcdl.kernels.device import CPU, device_of
from hpcdl.kernels.reduce import add_into

try:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise UsageError("secure aggregation needs the package cryptography: pip install 'hpcdl[private]'") from None

KEY, SEED = 32, 16  # bytes of a key of X25519; of a key of AES-128, which b_u is, too
SEALED = 2 * SHARE + 16  # two shares and an authentication tag
TAG = 30010
BLOCK = 1 << 14  # elements of the key stream per step, which stay in the cache
ZEROS = memoryview(bytes(8 * BLOCK))
STREAM = np.empty(BLOCK + 2, np.int64)  # older versions of the cipher want room for a block more


def add_mask(vector: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add sign * PRG(key) to vector, modulo 2^64; PRG: the key stream of AES in counter mode, as int64."""
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    combine = np.add if sign > 0 else np.subtract
    for start in range(0, vector.size, BLOCK):
        part = vector[start : start + BLOCK]
        cipher.update_into(ZEROS[: part.nbytes], STREAM.view(np.uint8))  # type: ignore[arg-type]
        combine(part, STREAM[: part.size], out=part)


def shared_key(private: X25519PrivateKey, public: np.ndarray, purpose: bytes) -> bytes:
    """Return the key shared by the owners of two key pairs: HKDF of their Diffie-Hellman secret."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(public.tobytes()))
    return HKDF(SHA256(), SEED, None, purpose).derive(secret)


def mask_sign(u: int, v: int) -> int:
    """Return the sign with which client u adds the mask that it shares with client v."""
    return 1 if u < v else -1


def nonce(sender: int, receiver: int) -> bytes:
    """Return the nonce of the sender's only message to this receiver; their shared key lives for one round."""
    return np.array([sender, receiver, 0], "<u4").tobytes()


class Party:
    """The secrets and messages of a client in one round. number: of the client, within the round."""

    def __init__(self, number: int):
        self.number = number
        self.sealing, self.masking = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.seed = os.urandom(SEED)
        self.sealed: Any = None  # after round 1: what each client has sealed for this one, (clients, SEALED)

    def advertise(self) -> np.ndarray:
        """Return this client's public keys, (2 * KEY,) bytes (round 0)."""
        pair = (each.public_key().public_bytes_raw() for each in (self.sealing, self.masking))
        return np.frombuffer(b"".join(pair), np.uint8)

    def share(self, keys: np.ndarray, threshold: int) -> np.ndarray:
        """Return (round 1) for each client its shares of this one's two secrets, sealed: (clients, SEALED) bytes. keys:
        (clients, 2 * KEY), the advertised keys of all clients. threshold: shares that reveal a secret."""
        self.keys, self.threshold = keys, threshold
        self.seals = [shared_key(self.sealing, each[:KEY], b"hpcdl share") for each in keys]  # also one with itself
        halves = (shamir.split(each, threshold, len(keys)) for each in (self.seed, self.masking.private_bytes_raw()))
        sealed = np.empty((len(keys), SEALED), np.uint8)
        for v, (of_seed, of_key) in enumerate(zip(*halves, strict=True)):
            text = AESGCM(self.seals[v]).encrypt(nonce(self.number, v), of_seed + of_key, None)
            sealed[v] = np.frombuffer(text, np.uint8)
        return sealed

    def mask(self, vector: np.ndarray) -> None:
        """Mask the vector of int64 in place, to y_u (round 2)."""
        add_mask(vector, self.seed)
        for v in range(len(self.keys)):
            if v != self.number:
                key = shared_key(self.masking, self.keys[v, KEY:], b"hpcdl mask")
                add_mask(vector, key, mask_sign(self.number, v))

    def reveal(self, answered: np.ndarray) -> np.ndarray:
        """Return (round 3), for each client u, the share of b_u if u has answered, else of s_u: (clients, SHARE) bytes.
        Raises LoneError on a second call, or if this client or too many others have not answered."""
        if self.sealed is None:
            raise LoneError(f"client {self.number} has already revealed its shares, which it does once")
        if answered.sum() < self.threshold or not answered[self.number]:
            raise LoneError(f"client {self.number} reveals shares only if it and {self.threshold - 1} more answered")
        sealed, self.sealed = self.sealed, None
        shares = np.empty((len(sealed), SHARE), np.uint8)
        for u, text in enumerate(sealed):
            opened = AESGCM(self.seals[u]).decrypt(nonce(u, self.number), text.tobytes(), None)
            shares[u] = np.frombuffer(opened, np.uint8).reshape(2, SHARE)[0 if answered[u] else 1]
        return shares


class SecureAggregator(SumAggregator):
    """An aggregator of int64 vectors of `size` elements that learns only their sum; masks are added on the CPU. More
    than this `fraction` of the clients (1: all), at least 2, must answer; else the sum is 0 and `abandoned` grows.
    observe(kind, client, message): gets all messages to the server; kind: "keys", "shares", "masked", "revealed"."""

    def __init__(self, comm: Communicator, size: int, fraction: float = 0.5, observe: Callable | None = None):
        self.comm, self.fraction, self.observe = comm, fraction, observe or (lambda *_: None)
        self.total = comm.empty(size, np.int64) if comm.device is CPU else CPU.empty(size, np.int64)
        self.abandoned = np.zeros(1, np.int64)

    def begin(self, dealt: list[list[int]]) -> None:
        """Run rounds 0 and 1 among all clients, numbered rank by rank. dealt: the clients of each rank. Collective."""
        rank, count = self.comm.rank, sum(map(len, dealt))
        self.numbers = np.split(np.arange(count), np.cumsum([len(clients) for clients in dealt])[:-1])  # of each rank
        self.parties = {client: Party(int(k)) for client, k in zip(dealt[rank], self.numbers[rank], strict=True)}
        self.threshold = max(2, min(count, int(self.fraction * count) + 1))
        self.keys, self.answered = np.zeros((count, 2 * KEY), np.uint8), np.zeros(count, np.uint8)
        self.total[:] = 0
        for client, party in self.parties.items():
            self.keys[party.number] = party.advertise()
            self.observe("keys", client, self.keys[party.number])
        self.comm.all_reduce(self.keys)  # rows of others are 0
        sealed = np.empty((len(self.parties), count, SEALED), np.uint8)
        for row, (client, party) in zip(sealed, self.parties.items(), strict=True):
            row[:] = party.share(self.keys, self.threshold)
            self.observe("shares", client, row)
        inbox = self._exchange(sealed, self.numbers, [len(numbers) for numbers in self.numbers])
        for column, party in enumerate(self.parties.values()):
            party.sealed = inbox[:, column]

    def add(self, client: int, vector: np.ndarray) -> None:
        """Run round 2 for a client of this rank; the vector is overwritten."""
        party, vector = self.parties[client], device_of(vector).host(vector)
        party.mask(vector)
        self.observe("masked", client, vector)
        add_into(self.total, vector)
        self.answered[party.number] = 1

    def finish(self) -> np.ndarray:
        """Run round 3; return the sum over the clients added on any rank, valid until the next `begin`. Collective."""
        self.comm.all_reduce(self.answered)
        answered = self.answered.astype(bool)
        if answered.sum() < self.threshold:
            self.abandoned += 1
            self.total[:] = 0
        else:
            self._unmask(answered)
            self.comm.all_reduce(self.total)
        return self.comm.device.array(self.total)

    def tracked(self) -> dict[str, Same]:
        return {"rounds_abandoned": Same(self.abandoned)}

    def report(self) -> dict:
        return {"rounds_abandoned": int(self.abandoned[0])}

    def _unmask(self, answered: np.ndarray) -> None:
        # Rank r removes the masks of every size-th client, drop-outs first: they cost most.
        work = np.concatenate([np.flatnonzero(~answered), np.flatnonzero(answered)])
        parts = [work[rank :: self.comm.size] for rank in range(self.comm.size)]
        senders = [numbers[answered[numbers]] for numbers in self.numbers]
        revealed = np.empty((len(senders[self.comm.rank]), len(answered), SHARE), np.uint8)
        asked = [(client, party) for client, party in self.parties.items() if answered[party.number]]
        for row, (client, party) in zip(revealed, asked, strict=True):
            row[:] = party.reveal(answered)
            self.observe("revealed", client, row)
        shares = self._exchange(revealed, parts, [len(numbers) for numbers in senders])
        self._take_off(parts[self.comm.rank], answered, np.concatenate(senders), shares)

    def _take_off(self, part: np.ndarray, answered: np.ndarray, senders: np.ndarray, shares: np.ndarray) -> None:
        """Remove from the sum what is left of these clients' masks; shares: (senders, clients of `part`, SHARE)."""
        weights = shamir.weights([int(number) + 1 for number in senders[: self.threshold]])
        for column, u in enumerate(part):
            enough = [share.tobytes() for share in shares[: self.threshold, column]]
            secret = shamir.join(enough, weights, SEED if answered[u] else KEY)
            if answered[u]:
                add_mask(self.total, secret, -1)
                continue
            masking = X25519PrivateKey.from_private_bytes(secret)
            for v in np.flatnonzero(answered):
                add_mask(self.total, shared_key(masking, self.keys[v, KEY:], b"hpcdl mask"), -mask_sign(int(v), u))

    def _exchange(self, rows: np.ndarray, columns: list[np.ndarray], counts: list[int]) -> np.ndarray:
        """Send columns[r] of `rows` (own, clients, bytes) to each rank r; return rows received, counts[r] from r."""
        comm, width = self.comm, len(columns[self.comm.rank])
        received = np.empty((sum(counts), width, rows.shape[2]), np.uint8)
        parts = np.split(received, np.cumsum(counts)[:-1])
        parts[comm.rank][:] = rows[:, columns[comm.rank]]
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        requests = [comm.iwait(parts[rank], rank, TAG) for rank in others if parts[rank].size]
        for rank in others:
            message = np.ascontiguousarray(rows[:, columns[rank]])
            if message.size:
                requests.append(comm.ipush(message, rank, TAG))
        for request in requests:
            request.wait()
        return received
