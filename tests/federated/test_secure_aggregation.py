"""Secure aggregation: the sum to the bit whoever drops out, and nothing but noise in what the server receives."""

import math

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from hpcdl.comm import Communicator
from hpcdl.errors import LoneError
from hpcdl.federated import shamir
from hpcdl.federated.secure_aggregation import BLOCK, KEY, SEALED, SEED, Party, SecureAggregator, add_mask, shared_key

LENGTH = 5000  # enough bytes for a chi-square test


def updates(clients, length, seed=0):
    """A vector for each client, of any int64 values: their sum wraps around."""
    return np.random.default_rng(seed).integers(-(2**63), 2**63, (clients, length))


def rounds(bare, vectors, dropped=(), owners=None, times=1, **options):
    """The aggregator, the sum, and what the server received: (kind, client) -> message, one dict for each round.
    owners: the rank of each client, in ascending order."""
    comm, names = Communicator(bare, allreduce="ring"), [100 + 7 * k for k in range(len(vectors))]
    owners = [k * comm.size // len(vectors) for k in range(len(vectors))] if owners is None else owners
    dealt = [[name for name, owner in zip(names, owners, strict=True) if owner == rank] for rank in range(comm.size)]
    received, heard = [], {}
    aggregator = SecureAggregator(
        comm,
        vectors.shape[1],
        observe=lambda kind, name, message: heard.update({(kind, names.index(name)): message.copy()}),
        **options,
    )
    for _ in range(times):
        heard.clear()
        aggregator.begin(dealt)
        for k, name in enumerate(names):
            if owners[k] == comm.rank and k not in dropped:
                aggregator.add(name, vectors[k].copy())
        total = aggregator.finish().copy()
        received.append({key: each for part in bare.allgather(dict(heard)) for key, each in part.items()})
    comm.free()
    return aggregator, total, received


@pytest.mark.parametrize(
    ("clients", "dropped", "length"),
    [(2, (), 0), (3, (1,), 1), (5, (), 11), (5, (0,), 11), (9, (0, 3, 7, 8), 2 * BLOCK + 5)],
    ids=str,
)
def test_the_sum_is_exact(comm, clients, dropped, length):
    vectors = updates(clients, length)
    left = [k for k in range(clients) if k not in dropped]
    for owners in (None, [comm.size - 1] * clients):
        aggregator, total, _ = rounds(comm, vectors, dropped, owners)
        assert np.array_equal(total, vectors[left].sum(axis=0))
        assert aggregator.abandoned == 0


def chi_square(message) -> float:
    """How far the frequencies of the 256 byte values are from equal, in deviations of what is expected."""
    counts = np.bincount(np.ascontiguousarray(message).view(np.uint8).reshape(-1), minlength=256)
    expected = counts.sum() / 256
    return (((counts - expected) ** 2 / expected).sum() - 255) / math.sqrt(2 * 255)


SECRETS = {
    "zeros": np.zeros(LENGTH, np.int64),
    "a constant": np.full(LENGTH, 123456789),
    "a ramp": np.arange(LENGTH) * (2**62 // LENGTH),
}


@pytest.mark.parametrize("secret", SECRETS)
def test_the_server_receives_noise(world, secret):
    """Client 2 drops out. What is left of y_0 when all that was revealed is taken off is still noise."""
    x, clients, dropped = SECRETS[secret], 5, 2
    _, total, (first, second) = rounds(world, np.tile(x, (clients, 1)), (dropped,), times=2)
    assert np.array_equal(total, 4 * x)
    without_own = []
    for heard in (first, second):
        masked = {k: heard["masked", k] for k in range(clients) if k != dropped}
        own = {k: revealed(heard, k, answered=True) for k in masked}
        of_dropped = X25519PrivateKey.from_private_bytes(revealed(heard, dropped, answered=False))
        for k, y in masked.items():
            left = y.copy()
            add_mask(left, own[k], -1)
            add_mask(left, shared_key(of_dropped, heard["keys", k][KEY:], b"hpcdl mask"), 1 if k > dropped else -1)
            without_own.append(left)
            for noise in (y, left):
                assert abs(chi_square(noise)) < 8
                assert all(abs(chi_square(noise.view(np.uint8)[place::8])) < 8 for place in range(8))
                assert not (noise == x).any()
                assert x.std() == 0 or abs(np.corrcoef(noise, x)[0, 1]) < 6 / math.sqrt(LENGTH)
        several = list(masked.values())
        assert not any((a == b).any() for i, a in enumerate(several) for b in several[:i])
        assert abs(chi_square(np.concatenate([heard["shares", k] for k in range(clients)]))) < 8
    assert not any((a == b).any() for i, a in enumerate(without_own) for b in without_own[:i])
    assert not any((first[key] == second[key]).all() for key in first)
    assert not any((first["masked", k] == second["masked", k]).any() for k in (0, 1, 3, 4))


def revealed(heard, client, answered) -> bytes:
    """The secret of a client that the server puts together from what the others have revealed."""
    senders = [k for kind, k in heard if kind == "revealed"]
    shares = [heard["revealed", k][client].tobytes() for k in senders[-3:]]
    return shamir.join(shares, shamir.weights([k + 1 for k in senders[-3:]]), SEED if answered else KEY)


def test_what_the_server_receives_is_what_the_table_says(world):
    """Of 7 clients 2 drop out, which have advertised and shared keys by then."""
    vectors = updates(7, 11)
    _, _, (heard,) = rounds(world, vectors, dropped=(1, 6))
    left = {0, 2, 3, 4, 5}
    sizes = {"keys": 64, "shares": 82 * 7, "masked": 8 * 11, "revealed": 33 * 7}
    for kind, size in sizes.items():
        messages = {k: each.nbytes for (said, k), each in heard.items() if said == kind}
        assert messages == dict.fromkeys(range(7) if kind in ("keys", "shares") else left, size)


@pytest.mark.parametrize(
    ("clients", "dropped", "fraction"),
    [(0, (), 0.5), (1, (), 0.5), (2, (0,), 0.5), (6, (1, 3, 5), 0.5), (6, (2,), 1), (6, (1, 2), 0.7)],
    ids=str,
)
def test_with_fewer_than_the_threshold_the_sum_is_nothing(comm, clients, dropped, fraction):
    """No client reveals anything then; and the round after that is none the worse for it."""
    vectors = updates(clients, 11)
    aggregator, total, received = rounds(comm, vectors, dropped, fraction=fraction, times=2)
    assert aggregator.abandoned == 2 and not total.any()
    assert not any(kind == "revealed" for heard in received for kind, _ in heard)
    assert {kind for kind, _ in received[0]} <= {"keys", "shares", "masked"}


@pytest.mark.parametrize(("clients", "dropped"), [(6, (1, 2)), (6, ()), (2, ())], ids=str)
def test_at_the_threshold_it_works(world, clients, dropped):
    fraction = (clients - len(dropped) - 1) / clients
    aggregator, total, _ = rounds(world, updates(clients, 3), dropped, fraction=fraction)
    assert aggregator.abandoned == 0 and total.any()


def parties(count, threshold):
    """Clients that have shared their keys."""
    made = [Party(number) for number in range(count)]
    keys = np.array([each.advertise() for each in made])
    sealed = np.array([each.share(keys, threshold) for each in made])
    for each in made:
        each.sealed = sealed[:, each.number]
    return made, sealed


def test_a_client_reveals_once_and_only_for_enough():
    made, _ = parties(5, 3)
    answered = np.array([True, True, True, False, False])
    with pytest.raises(LoneError, match="2 more answered"):
        made[0].reveal(np.array([True, True, False, False, False]))
    with pytest.raises(LoneError, match="only if it and"):
        made[3].reveal(answered)
    shares = made[0].reveal(answered)
    assert shares.shape == (5, 33)
    for again in (answered, ~answered, np.ones(5, bool)):
        with pytest.raises(LoneError, match="once"):
            made[0].reveal(again)


def test_a_server_that_lies_gets_one_of_the_two_secrets():
    """It tells some that client 4 has answered, and the others that it has not: only one side has enough shares."""
    for told in range(1, 5):
        made, _ = parties(5, 3)
        answered = np.ones((4, 5), bool)
        answered[told:, 4] = False
        shares = [made[k].reveal(answered[k])[4].tobytes() for k in range(4)]
        sides = {"seed": range(told), "key": range(told, 4)}
        secrets = {"seed": made[4].seed, "key": made[4].masking.private_bytes_raw()}
        found = {}
        for name, side in sides.items():
            total = sum(
                int.from_bytes(shares[k], "little") * weight
                for k, weight in zip(side, shamir.weights([k + 1 for k in side]), strict=True)
            )
            found[name] = total % shamir.PRIME == int.from_bytes(secrets[name], "little")
        assert found == {name: len(side) >= 3 for name, side in sides.items()}


def test_shares_are_sealed_for_their_receiver_and_their_sender():
    """Another client cannot open them; one that was changed, or comes from somebody else, is not taken."""
    made, sealed = parties(3, 2)
    assert sealed.shape == (3, 3, SEALED)
    answered = np.ones(3, bool)
    for spoil in (lambda rows: rows[[1, 0, 2]], lambda rows: rows ^ 1):
        made[2].sealed = spoil(sealed[:, 2])
        with pytest.raises(InvalidTag):
            made[2].reveal(answered)


def test_the_mask_is_one_key_stream():
    key = bytes(range(16))
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    stream = np.frombuffer(cipher.update(bytes(8 * (2 * BLOCK + 5))), np.int64)
    vector = np.arange(stream.size)
    add_mask(vector, key)
    assert np.array_equal(vector, np.arange(stream.size) + stream)
    add_mask(vector, key, -1)
    assert np.array_equal(vector, np.arange(stream.size))
