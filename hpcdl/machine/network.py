"""Network speed: ping-pong between hosts, and all-reduce relative to the measured bandwidth.

    latency      half the round trip of 1 byte, the minimum of several (disturbances only lengthen it)
    bandwidth    bytes of a long message divided by half its round trip, the best of several
    all-reduce   K bytes on N ranks: the ring sends 2 (N - 1) / N K bytes over each link, and no algorithm by messages
                 sends less; so 2 (N - 1) / N K / (seconds * bandwidth) is the fraction of the bandwidth reached

Idle ranks nap, as MPI's own waiting occupies a core. (Hockney, "The communication challenge for MPP", 1994; Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009)"""

import time
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.progress import inside, nap_until

LONG, VECTOR = 1 << 20, 4 << 20  # bytes of the long message, and of the vector
SECONDS = 0.05  # of each measurement, without warm-up
ROUNDS = 2, 200  # minimum, maximum
ALL = 6  # hosts up to which every pair is measured; of more hosts, only neighbours


class LinkSpeed(NamedTuple):
    """Speed between two ranks: latency in seconds, bandwidth in bytes per second."""

    a: int
    b: int
    latency: float
    bandwidth: float


def pairs(players: list[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that cover all measured links."""
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
    """Return the speed of the links between these ranks, on all ranks; collective."""
    measured = []
    for games in pairs(players):
        for a, b in games:
            if comm.rank in (a, b):
                with inside(f"ping-pong of ranks {a} and {b}"):
                    short, long = (ping_pong(comm, a, b, size) for size in (1, LONG))
                if comm.rank == a:
                    measured.append(LinkSpeed(a, b, short, LONG / long))
        come = comm.Ibarrier()
        nap_until(come.Test, "round of ping-pong")
    with inside("results of ping-pong"):
        return sorted(link for links in comm.allgather(measured) for link in links)


def ping_pong(comm: MPI.Intracomm, a: int, b: int, size: int) -> float:
    """Return the seconds of a message of `size` bytes between two ranks: half the minimum round trip, on rank a."""
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

    rally(2)  # warm-up: connects, touches the memory
    rounds = np.array([repetitions(taken[-1])])
    if comm.rank == a:  # rank a decides for both
        comm.Send(rounds, other)
    else:
        comm.Recv(rounds, other)
    taken.clear()
    rally(int(rounds[0]))
    return min(taken) / 2


def repetitions(seconds: float) -> int:
    """Return how many repetitions of `seconds` seconds fit into SECONDS, within ROUNDS."""
    least, most = ROUNDS
    return int(min(most, max(least, SECONDS / max(seconds, 1e-9))))


def measure_all_reduce(comm: MPI.Intracomm, name: str) -> float:
    """Return the seconds of an all-reduce of VECTOR bytes by this algorithm: the best time of the slowest rank."""
    function, vector = algorithm(name), np.ones(VECTOR // 4, np.float32)

    def turn() -> float:
        comm.Barrier()
        start = time.perf_counter()
        function(comm, vector)
        return comm.allreduce(time.perf_counter() - start, MPI.MAX)

    with inside(f"all-reduce by {name}"):
        turn()
        return min(turn() for _ in range(repetitions(turn())))


def bandwidth_share(bandwidth: float, ranks: int, seconds: float, size: int = VECTOR) -> float:
    """Return the fraction of a bandwidth that an all-reduce of `size` bytes in `seconds` seconds has reached."""
    return 2 * (ranks - 1) / ranks * size / (seconds * bandwidth)
