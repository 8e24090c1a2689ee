"""Workers and a parameter server as a closed queue: who waits for whom, step by step. CPU only.

    worker, for ever     compute c; the push waits for the server's port in, takes s; the answer waits for its port out,
                         takes s; latency each way
    ssp                  ... but it may compute its clock k only when the slowest has made k - bound pushes

All servers hold as much and are asked at the same times, so that one stands for all. What comes first is served first:
a heap of the times at which the workers' pushes come. (Ho et al., NeurIPS 2013, for ssp)
"""

import numpy as np

from hpcdl.kernels.bind import exact, on_cpu


@exact
def sift_down(times, workers, count):
    """Bring the first of a heap of (time, worker) to its place."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= count:
            return
        if child + 1 < count and times[child + 1] < times[child]:
            child += 1
        if times[at] <= times[child]:
            return
        times[at], times[child] = times[child], times[at]
        workers[at], workers[child] = workers[child], workers[at]
        at = child


@exact
def sift_up(times, workers, at):
    """Bring the last of a heap to its place."""
    while at > 0:
        parent = (at - 1) // 2
        if times[parent] <= times[at]:
            return
        times[at], times[parent] = times[parent], times[at]
        workers[at], workers[parent] = workers[parent], workers[at]
        at = parent


@on_cpu
def _queue(compute, service, latency, bound, times, workers, clocks, pulled, waiting, counts, told):
    ranks, steps = compute.shape
    inwards = outwards = 0.0  # when the ports are free
    count, slowest, applied, ended, stale, parked = 0, 0, 0, 0.0, 0.0, 0
    for worker in range(ranks):
        times[count], workers[count] = compute[worker, 0] + latency, worker
        sift_up(times, workers, count)
        count += 1
    counts[0] = ranks
    while count > 0:
        now, worker = times[0], workers[0]
        count -= 1
        times[0], workers[0] = times[count], workers[count]
        sift_down(times, workers, count)
        inwards = max(now, inwards) + service
        stale += applied - pulled[worker]
        applied += 1
        outwards = max(inwards, outwards) + service
        back = outwards + latency
        ended = max(ended, back)
        clock = clocks[worker]
        counts[clock] -= 1
        clocks[worker] = clock + 1
        if clock + 1 < steps:
            counts[clock + 1] += 1
        pulled[worker] = applied
        released = slowest
        while slowest < steps and counts[slowest] == 0:
            slowest += 1
        if clock + 1 < steps:
            waiting[worker] = back
            if clock + 1 - slowest > bound:
                parked += 1
            else:
                times[count], workers[count] = back + compute[worker, clock + 1] + latency, worker
                sift_up(times, workers, count)
                count += 1
        if slowest > released and parked > 0:
            for other in range(ranks):  # those that waited for the slowest; now is when they hear of it
                k = clocks[other]
                if (
                    other != worker
                    and k < steps
                    and waiting[other] >= 0
                    and k - released > bound
                    and k - slowest <= bound
                ):
                    parked -= 1
                    pulled[other] = applied
                    times[count], workers[count] = max(back, waiting[other]) + compute[other, k] + latency, other
                    sift_up(times, workers, count)
                    count += 1
    told[0], told[1], told[2] = ended, stale / max(1, applied), applied


def queue(compute: np.ndarray, service: float, latency: float, bound: float) -> tuple[float, float]:
    """(seconds until all have ended, mean staleness in updates) of compute (ranks, steps) seconds.

    service: seconds of the server's port for a push, and for its answer. bound: of ssp, in clocks; infinite: async.
    """
    ranks, steps = compute.shape
    limit = steps if bound == np.inf else int(bound)
    told = np.zeros(3)
    _queue(
        np.ascontiguousarray(compute, np.float64), float(service), float(latency), limit, np.zeros(ranks + 1),
        np.zeros(ranks + 1, np.int64), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.full(ranks, -1.0),
        np.zeros(steps + 1, np.int64), told,
    )  # fmt: skip
    return float(told[0]), float(told[1])
