"""Seconds of a pipeline's step, by the actions of its schedule, on all replicas at once.

    F of stage s, micro-batch i     begins when s is free, and F of s - 1, i has come
    B of stage s, micro-batch i     begins when s is free, and B of s + 1, i has come; takes twice as long

p stages of N / p replicas; after the last B the replicas' all-reduce of K / p. Without noise and messages a step takes
(m + p - 1) / m of its computing, and (p - 1) / (m + p - 1) of it is idle.
(Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019)
"""

from typing import Any

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.planning import collective_time
from hpcdl.planning.cluster import Cluster
from hpcdl.random import Random
from hpcdl.strategies.pipeline_schedules import gpipe, one_f_one_b

FORWARD = 1 / 3  # of a micro-batch's computing


def pipeline(
    text: str, settings: dict[str, Any], cluster: Cluster, work: Any, ranks: int, steps: int, random: Random
) -> Any:
    """Simulate steps like `step_simulation.simulate`; work.compute: seconds of a whole step on one rank of a stage."""
    from hpcdl.planning.step_simulation import Simulated

    stages, many = settings["stages"], settings["microbatches"]
    if ranks % stages:
        raise UsageError(f"{text}: {ranks} ranks are not a multiple of {stages} stages")
    replicas = ranks // stages
    schedule = {"gpipe": gpipe, "1f1b": one_f_one_b}[settings["schedule"]]
    plan = [list(schedule(stages, stage, many)) for stage in range(stages)]
    reduced = collective_time.seconds(settings["algorithm"], cluster, replicas, work.bytes / stages)
    total = own = 0.0
    for step in range(steps):
        noise = work.noise.draw(random, step, ranks).reshape(replicas, stages).astype(np.float64)
        own += float(noise.mean()) * work.compute
        each = noise * work.compute / many
        total += float(last(plan, each * FORWARD, each * (1 - FORWARD), cluster.latency).max()) + reduced
    return Simulated(text, ranks, total / steps, own / steps, reduced)


def last(plan: list[list[Any]], forward: np.ndarray, backward: np.ndarray, message: float) -> np.ndarray:
    """Return the seconds (replicas,) after which the last stage ends.

    forward, backward: (replicas, chunks * stages) seconds of a micro-batch, chunk c of stage s at c * stages + s, as in
    the model. message: seconds of a message between stages.
    """
    stages, (replicas, parts) = len(plan), forward.shape
    free = np.zeros((stages, replicas))
    done: dict[tuple[str, int, int], np.ndarray] = {}  # kind, chunk of the model, micro-batch
    at = [0] * stages
    left = sum(map(len, plan))
    while left:
        before = left
        for stage in range(stages):
            while at[stage] < len(plan[stage]):
                kind, number, *more = plan[stage][at[stage]]
                place = stage + stages * (more[0] if more else 0)
                beside = place - 1 if kind == "F" else place + 1
                needs = [("F", place, number)] if kind == "B" else []
                needs += [(kind, beside, number)] if 0 <= beside < parts else []
                if not all(need in done for need in needs):
                    break
                come = [done[need] + (message if need[1] % stages != stage else 0.0) for need in needs]
                begin = np.maximum.reduce([free[stage], *come])
                free[stage] = begin + (forward if kind == "F" else backward)[:, place]
                done[kind, place, number] = free[stage].copy()
                at[stage] += 1
                left -= 1
        if left == before:
            raise ValueError("the schedule waits for itself")
    ended: np.ndarray = free.max(axis=0)
    return ended
