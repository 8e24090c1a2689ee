"""Synchronization costs between threads pinned to processors, and timing of threads that run together.

    line       two threads increment a word in turn: half a round trip of its cache line between cores
    barrier    each thread increments the word on its own line, and waits for all others
    lock       acquired by an exchange, released by a store: by one thread alone, and by several that contend

A time is from the first thread's start to the last one's end, divided by enough rounds to hide thread start-up. Of
REPEATS times the median and the minimum, the least disturbed, are reported."""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np

from hpcdl.kernels.bind import prepare
from hpcdl.kernels.device import CPU
from hpcdl.kernels.probes import LINE, SPINS, meet, ping_pong, take_turns
from hpcdl.machine.topology import MachineTopology

REPEATS = 25
MOST_ROUNDS = 1 << 40


class RoundTime(NamedTuple):
    """Seconds of a round: the median and the minimum."""

    median: float
    best: float

    def rate(self, name: str, amount: float) -> dict[str, float]:
        """Return row entries: an amount divided by each of the two times."""
        return {name: amount / self.median, f"{name}_best": amount / self.best}

    def nanoseconds(self, parts: int = 1) -> dict[str, float]:
        """Return row entries: nanoseconds of one of `parts` parts of a round."""
        return {"nanoseconds": 1e9 * self.median / parts, "nanoseconds_best": 1e9 * self.best / parts}


def run_threads(cpus: list[int], body: Callable[[int], Any], first: Callable[[int], Any] | None = None) -> float:
    """Run body(i) on each processor cpus[i]; return seconds from first start to last end. first(i): untimed, before."""
    barrier = Barrier(len(cpus))

    def work(i: int) -> tuple[float, float]:
        try:
            os.sched_setaffinity(0, {cpus[i]})  # affects this thread only
            if first is not None:
                first(i)
        except BaseException:
            barrier.abort()
            raise
        barrier.wait()
        start = time.perf_counter()
        body(i)
        return start, time.perf_counter()

    with ThreadPoolExecutor(len(cpus)) as pool:
        started, ended = zip(*pool.map(work, range(len(cpus))), strict=True)
    return max(ended) - min(started)


def per_round(run: Callable[[int], float], seconds: float) -> RoundTime:
    """Return the seconds of a round; run(rounds) -> seconds of so many rounds. Takes about `seconds` in all."""
    rounds, share = 1, seconds / REPEATS
    run(1)  # warm-up: compiles, touches the memory
    # The minimum of three: a single, interrupted run would lead to too few rounds.
    while (taken := min(run(rounds) for _ in range(3))) < share / 2 and rounds < MOST_ROUNDS:
        rounds *= int(min(100, max(2, share / max(taken, 1e-7))))
    each = [taken / rounds, *(run(rounds) / rounds for _ in range(REPEATS - 1))]
    return RoundTime(statistics.median(each), max(min(each), 1e-12))


def between_cores(found: MachineTopology, seconds: float) -> list[dict]:
    """Return rows of cache-line transfers, barriers and locks."""
    words = CPU.zeros(LINE * max(2, len(found.usable)), np.int64)
    prepare(ping_pong, words, 0, 1)
    prepare(meet, words, 0, 1, 1, SPINS)
    prepare(take_turns, words, 1, SPINS)
    cores, rows = found.one_per_core(), list[dict]()

    def timed(cpus: list[int], body: Callable[[int, int], Any]) -> RoundTime:
        def run(rounds: int) -> float:
            words[:] = 0
            return run_threads(cpus, lambda i: body(i, rounds))

        return per_round(run, seconds)

    for pair in pairs(found):
        spent = timed([*pair], lambda i, rounds: ping_pong(words, i, rounds))
        about = {"what": "cache line", "between": found.relation(*pair), "processors": [*pair]}
        rows.append(about | spent.nanoseconds(2))
    for count in thread_counts(len(cores))[1:]:
        spent = timed(cores[:count], lambda i, rounds, n=count: meet(words, i, n, rounds, SPINS))  # type: ignore[misc]
        rows.append({"what": "barrier", "threads": count, **spent.nanoseconds()})
    for count in thread_counts(len(cores)):
        spent = per_round(lambda rounds, n=count: lock_seconds(words, cores[:n], rounds), seconds)  # type: ignore[misc]
        rows.append({"what": "lock", "threads": count, **spent.nanoseconds(count)})
        if count > 1:
            del rows[-1]["nanoseconds_best"]  # the best time has the least contention
    return rows


def thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most`."""
    return [1 << k for k in range(most.bit_length()) if 1 << k < most] + [most]


def pairs(found: MachineTopology) -> list[tuple[int, int]]:
    """Return the first pair of processors for each kind of relation."""
    chosen: dict[str, tuple[int, int]] = {}
    a = found.usable[0]
    for start in (a, *(numbers[0] for numbers in found.nodes().values() if numbers[0] != a)):
        for b in found.usable:
            if b != start:
                chosen.setdefault(found.relation(start, b), (start, b))
    return list(chosen.values())


def lock_seconds(words: np.ndarray, cpus: list[int], rounds: int) -> float:
    """Return the seconds in which each thread acquires the lock `rounds` times. RuntimeError if exclusion fails."""
    words[:] = 0
    taken = run_threads(cpus, lambda i: take_turns(words, rounds, SPINS))
    if words[LINE] != rounds * len(cpus):
        raise RuntimeError(f"the lock failed: {len(cpus)} threads counted {words[LINE]}, not {rounds * len(cpus)}")
    return taken
