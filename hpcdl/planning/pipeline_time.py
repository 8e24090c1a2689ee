"""Seconds of a pipeline's step, by the actions of its schedule, on all replicas at once.

    F of stage s, micro-batch i     begins when s is free, and F of s - 1, i has arrived
    B of stage s, micro-batch i     begins when s is free, and B of s + 1, i has arrived

p stages, m micro-batches: without noise and messages a step takes (m + p - 1) / m of its computing, and (p - 1) / (m +
p - 1) of it is idle. (Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019)"""

from typing import Any

import numpy as np


def last(plan: list[list[Any]], forward: np.ndarray, backward: np.ndarray, message: float) -> np.ndarray:
    """Return the seconds (replicas,) after which all stages have ended. plan: their actions. message: seconds of one.
    forward, backward: (replicas, chunks * stages) seconds of a micro-batch, of chunk c of stage s at c * stages + s."""
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
            raise ValueError("the schedule is deadlocked: each stage waits for another one")
    ended: np.ndarray = free.max(axis=0)
    return ended
