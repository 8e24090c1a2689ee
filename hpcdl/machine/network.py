"""How fast messages pass: ping-pong between hosts, and an all-reduce beside what that allows.

    latency      half the round trip of 1 byte, the shortest of some (what disturbs only lengthens)
    bandwidth    bytes of a long message divided by half its round trip, the best of some
    all-reduce   K bytes on N ranks: the ring sends 2 (N - 1) / N K bytes over each link, and no algorithm by messages
                 sends less; so 2 (N - 1) / N K / (seconds * bandwidth) is the part of the bandwidth that is reached

The first rank of each host plays for it; on one host, its first two ranks. Pairs that have no host in common play at
the same time. Ranks that do not play nap, for MPI's own waiting takes a core that a player may need.
Sources: Hockney, "The communication challenge for MPP", 1994; Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009.
"""

import time
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.progress import activity, nap_until

LONG, VECTOR = 1 << 20, 4 << 20  # bytes of the long message, of the vector
SECONDS = 0.05  # to spend on each measurement, after what does not count
ROUNDS = 2, 200  # at least, and at most
ALL = 6  # hosts, up to which every pair plays; more play with the next one only


class LinkSpeed(NamedTuple):
    """What two ranks have measured: seconds, bytes per second."""

    a: int
    b: int
    latency: float
    bandwidth: float


def pairs(players: list[int]) -> list[list[tuple[int, int]]]:
    """Who plays with whom, in rounds in which nobody plays twice."""
    n = len(players)
    games = [(i, j) for i in range(n) for j in range(i + 1, n)] if n <= ALL else [(i, (i + 1) % n) for i in range(n)]
    rounds: list[list[tuple[int, int]]] = []
    for i, j in games:
        game = players[i], players[j]
        free = (each for each in rounds if not {*game} & {player for pair in each for player in pair})
        found = next(free, None)
        if found is None:
            rounds.append([game])
        else:
            found.append(game)
    return rounds


def measure_links(comm: MPI.Intracomm, players: list[int]) -> list[LinkSpeed]:
    """The links between these ranks, on all ranks; collective."""
    measured = []
    for games in pairs(players):
        for a, b in games:
            if comm.rank in (a, b):
                with activity.inside(f"ping-pong of ranks {a} and {b}"):
                    short, long = (ping_pong(comm, a, b, size) for size in (1, LONG))
                if comm.rank == a:
                    measured.append(LinkSpeed(a, b, short, LONG / long))
        come = comm.Ibarrier()
        nap_until(come.Test, "round of ping-pong")
    with activity.inside("results of ping-pong"):
        return sorted(link for links in comm.allgather(measured) for link in links)


def ping_pong(comm: MPI.Intracomm, a: int, b: int, size: int) -> float:
    """Seconds that `size` bytes take from one of two ranks to the other: half the shortest round trip, for rank a."""
    ball, other = np.zeros(size, np.uint8), b if comm.rank == a else a
    taken = []

    def rally(rounds: int) -> None:
        for _ in range(rounds):
            start = time.perf_counter()
            if comm.rank == a:
                comm.Send(ball, other)
            comm.Recv(ball, other)
            if comm.rank == b:
                comm.Send(ball, other)
            taken.append(time.perf_counter() - start)

    rally(2)  # connects, and touches the memory
    rounds = np.array([repetitions(taken[-1])])
    if comm.rank == a:  # who decides for both
        comm.Send(rounds, other)
    else:
        comm.Recv(rounds, other)
    taken.clear()
    rally(int(rounds[0]))
    return min(taken) / 2


def repetitions(seconds: float) -> int:
    """How many repetitions of what takes so long fit into the time there is."""
    least, most = ROUNDS
    return int(min(most, max(least, SECONDS / max(seconds, 1e-9))))


def measure_all_reduce(comm: MPI.Intracomm, name: str) -> float:
    """Seconds of an all-reduce of a vector of VECTOR bytes by this algorithm, the slowest rank's, best of some."""
    function, vector = algorithm(name), np.ones(VECTOR // 4, np.float32)

    def turn() -> float:
        comm.Barrier()
        start = time.perf_counter()
        function(comm, vector)
        return comm.allreduce(time.perf_counter() - start, MPI.MAX)

    with activity.inside(f"all-reduce by {name}"):
        turn()
        return min(turn() for _ in range(repetitions(turn())))


def bandwidth_share(bandwidth: float, ranks: int, seconds: float, size: int = VECTOR) -> float:
    """The part of a bandwidth that an all-reduce of `size` bytes has reached."""
    return 2 * (ranks - 1) / ranks * size / (seconds * bandwidth)
