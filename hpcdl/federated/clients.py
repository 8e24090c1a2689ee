"""Simulated clients: their sampling, fate and rank in a round. All ranks know these, as functions of the seed."""

from collections.abc import Mapping, Sequence
from typing import Literal

from hpcdl.chunks import longest_first
from hpcdl.random import Random

Fate = Literal["answers", "late", "dropped"]


def sample(random: Random, turn: int, clients: Sequence[int], count: int) -> list[int]:
    """Return `count` of the clients for round `turn`, sorted; all clients if there are fewer."""
    count = min(count, len(clients))
    return sorted(int(client) for client in random("clients", turn).choice(clients, count, replace=False))


def poisson_sample(random: Random, turn: int, clients: Sequence[int], probability: float) -> list[int]:
    """Return the clients for round `turn`, each with this probability independently; possibly none."""
    coins = random("clients", turn).random(len(clients))
    return [int(client) for client, coin in zip(clients, coins, strict=True) if coin < probability]


def fate(random: Random, turn: int, client: int, drop_out: float, late: float) -> Fate:
    """Return the fate of a client's answer: dropped with probability drop_out, else late with probability late."""
    dropped, delayed = random("fate", turn, client).random(2)
    return "dropped" if dropped < drop_out else "late" if delayed < late else "answers"


def deal(work: Mapping[int, float], ranks: int) -> list[list[int]]:
    """Return the clients of each rank, assigned by decreasing work (hpcdl/chunks.py); ties in client order."""
    clients = sorted(work, key=lambda client: (-work[client], client))
    owners = longest_first([work[client] for client in clients], ranks)
    return [[client for client, owner in zip(clients, owners, strict=True) if owner == rank] for rank in range(ranks)]
