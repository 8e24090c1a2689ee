"""Simulated clients of federated learning: who is asked in a round, who answers, and on which rank each one works.

    sample         max(1, C K) of the K clients, drawn anew in each round
    toss           each of the K clients with probability C, as private averaging asks for
    fate           whether a client's answer comes, comes a round late, or never comes
    longest_first  the clients of a round on the ranks, so that these finish together

Pure functions of the seed, the round and the client, never of the rank: every rank knows them without a message.
"""

import heapq
from collections.abc import Sequence
from typing import Literal

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


def longest_first(work: dict[int, float], ranks: int) -> list[list[int]]:
    """The clients of each rank: the one with most work left goes to the rank with least so far.

    The busiest rank has at most 4/3 - 1/(3 ranks) times the work that it would have under the best division (Graham,
    "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969). Equal ones go in the order of the clients.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for client in sorted(work, key=lambda client: (-work[client], client)):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(client)
        heapq.heappush(loads, (load + work[client], rank))
    return dealt
