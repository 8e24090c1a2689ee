"""Seconds of a pipeline's step, by the actions of its schedule, on all replicas at once.

    F of virtual stage v, micro-batch i     begins when its stage is free, and F of v - 1, i has arrived
    B of virtual stage v, micro-batch i     begins when its stage is free, and B of v + 1, i has arrived
    W of virtual stage v, micro-batch i     begins when its stage is free

p stages, m micro-batches: without noise and messages a step takes (m + p - 1) / m of its computing, and (p - 1) / (m +
p - 1) of it is idle, if B and W are one action. Virtual stages: timetable.py. (Huang et al., "GPipe", NeurIPS 2019;
Narayanan et al., "PipeDream", SOSP 2019; Qi et al., "Zero bubble pipeline parallelism", ICLR 2024)"""

from typing import NamedTuple

import numpy as np

from hpcdl.parallel.timetable import Action, Placement, split_backwards


class ActionTimes(NamedTuple):
    """Seconds of a micro-batch's actions, (replicas, virtual stages) each. backward: also of the weight gradients,
    which take `weights` of it where they are an action apart."""

    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray

    def of(self, kind: str, split: bool, virtual: int) -> np.ndarray:
        """Return the seconds (replicas,) of an action. split: True if a W follows this B."""
        if kind == "B":
            seconds = self.backward - self.weights if split else self.backward
        else:
            seconds = self.forward if kind == "F" else self.weights
        return seconds[:, virtual]


def last(
    plan: list[list[Action]], times: ActionTimes, message: float, where: Placement | None = None, together: bool = True
) -> np.ndarray:
    """Return the seconds (replicas,) of a step. plan: the actions of each stage. message: seconds of one. where: the
    chunks, by default in turn. together: True if the update waits for all stages, so that a step lasts from the first
    start to the last end; else a step lasts as long as the stage that takes longest."""
    stages, (replicas, parts) = len(plan), times.forward.shape
    where = where or Placement(stages, parts // stages)
    split = [split_backwards(actions) for actions in plan]
    free = np.zeros((stages, replicas))
    begun: list[np.ndarray] = [np.zeros(replicas)] * stages
    done: dict[tuple[str, int, int], np.ndarray] = {}  # kind, virtual stage, micro-batch
    at = [0] * stages
    left = sum(map(len, plan))
    while left:
        before = left
        for stage in range(stages):
            while at[stage] < len(plan[stage]):
                kind, number, chunk = plan[stage][at[stage]]
                place = where.virtual(stage, chunk)
                needs = [("F", place, number)] if kind == "B" else [("B", place, number)] if kind == "W" else []
                beside = {"F": place - 1, "B": place + 1}.get(kind, -1)
                needs += [(kind, beside, number)] if 0 <= beside < parts else []
                if not all(need in done for need in needs):
                    break
                come = [done[need] + (message if where.place(need[1])[0] != stage else 0.0) for need in needs]
                begin = np.maximum.reduce([free[stage], *come])
                if not at[stage]:
                    begun[stage] = begin
                free[stage] = begin + times.of(kind, (number, chunk) in split[stage], place)
                done[kind, place, number] = free[stage].copy()
                at[stage] += 1
                left -= 1
        if left == before:
            raise ValueError("the schedule is deadlocked: each stage waits for another one")
    ended: np.ndarray = free.max(axis=0) if together else (free - np.stack(begun)).max(axis=0)
    return ended
