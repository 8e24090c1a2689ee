"""Simulation of workers and a parameter server as a closed queue, event by event. CPU only.

    a worker, repeatedly    computes for c seconds; its push waits for the server's input port and takes s there; the
                            reply waits for the output port and takes s there; latency each way
    ssp                     a worker may begin its clock k only when the slowest worker has made k - bound pushes

One server stands for all, since all hold slices of one size and get requests at the same times. It serves first come,
first served; a heap holds the times of arrival. (ssp: Ho et al., NeurIPS 2013)"""

import numpy as np

from hpcdl.kernels.bind import exact, on_cpu


@exact
def sift_down(times, workers, count):
    """Restore the order of a heap of (time, worker) whose first entry was replaced."""
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
def push(times, workers, at, time, worker):
    """Add (time, worker) to a heap of `at` entries."""
    times[at], workers[at] = time, worker
    while at > 0:
        parent = (at - 1) // 2
        if times[parent] <= times[at]:
            return
        times[at], times[parent] = times[parent], times[at]
        workers[at], workers[parent] = workers[parent], workers[at]
        at = parent


@on_cpu
def _queue(compute, service, latency, bound, times, workers, clocks, pulled, waiting, counts, results):
    ranks, steps = compute.shape
    inwards = outwards = 0.0  # when the input port and the output port are free
    count, slowest, applied, ended, stale, parked = 0, 0, 0, 0.0, 0.0, 0
    for worker in range(ranks):
        push(times, workers, count, compute[worker, 0] + latency, worker)
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
                push(times, workers, count, back + compute[worker, clock + 1] + latency, worker)
                count += 1
        if slowest > released and parked > 0:
            for other in range(ranks):  # workers that waited for the slowest one continue
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
                    push(times, workers, count, max(back, waiting[other]) + compute[other, k] + latency, other)
                    count += 1
    results[0], results[1], results[2] = ended, stale / max(1, applied), applied


def queue(compute: np.ndarray, service: float, latency: float, bound: float) -> tuple[float, float]:
    """Return (seconds until all workers have ended, mean staleness in updates); compute: (ranks, steps) seconds.
    service: a port's seconds for a push or a reply. latency: seconds each way. bound: ssp's, in clocks; inf: async."""
    ranks, steps = compute.shape
    limit = steps if bound == np.inf else int(bound)
    results = np.zeros(3)
    _queue(
        np.ascontiguousarray(compute, np.float64), float(service), float(latency), limit, np.zeros(ranks + 1),
        np.zeros(ranks + 1, np.int64), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.full(ranks, -1.0),
        np.zeros(steps + 1, np.int64), results,
    )  # fmt: skip
    return float(results[0]), float(results[1])
