"""Simulated clients of federated learning: who is asked in a round, who answers, and on which rank each one works.

    sample    max(1, C K) of the K clients, drawn anew in each round
    toss      each of the K clients with probability C, as private averaging asks for
    fate      whether a client's answer comes, comes a round late, or never comes
    deal      the clients of a round to the ranks, so that these finish together

Pure functions of the seed, the round and the client, never of the rank: every rank knows them without a message.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from hpcdl.chunks import longest_first
from hpcdl.random import Random

Fate = Literal["answers", "late", "dropped"]


def sample(random: Random, turn: int, clients: Sequence[int], count: int) -> list[int]:
    """The clients that are asked in round `turn`, sorted: `count` of them, or all where there are fewer."""
    count = min(count, len(clients))
    return sorted(int(client) for client in random("clients", turn).choice(clients, count, replace=False))


def toss(random: Random, turn: int, clients: Sequence[int], probability: float) -> list[int]:
    """The clients that are asked in round `turn` when each tosses a coin of its own: any number, even none."""
    coins = random("clients", turn).random(len(clients))
    return [int(client) for client, coin in zip(clients, coins, strict=True) if coin < probability]


def fate(random: Random, turn: int, client: int, drop_out: float, late: float) -> Fate:
    """What becomes of a client's answer of round `turn`: dropped with probability drop_out, else late with `late`."""
    dropped, delayed = random("fate", turn, client).random(2)
    return "dropped" if dropped < drop_out else "late" if delayed < late else "answers"


def deal(work: Mapping[int, float], ranks: int) -> list[list[int]]:
    """The clients of each rank, by their work the longest first (hpcdl/chunks.py); equal ones in their own order."""
    clients = sorted(work, key=lambda client: (-work[client], client))
    owners = longest_first([work[client] for client in clients], ranks)
    return [[client for client, owner in zip(clients, owners, strict=True) if owner == rank] for rank in range(ranks)]
