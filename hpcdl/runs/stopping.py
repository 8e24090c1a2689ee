"""When a run ends, and why: its steps are done, or a limit, a goal, a signal or lost patience ends it before.

    finished       all steps are done
    signal         the process was told to end
    time limit     so many seconds have passed
    patience       so many evaluations have brought nothing better
    accuracy       the goal is reached
    tolerance      the duality gap is small enough
    budget         so many seconds of training, bytes or examples have been used
    paused         as far as this leg is to go, of a run that is to be gone on with: a rung of a search

Pure: it is told what all ranks know alike, so all ranks decide alike.

Steps may be under way when a run is told to stop (a pipeline is filled, workers compute what servers have given out).
It then goes on to the end of these, the horizon, as if that had been its last step all the time.
"""

import math
from typing import NamedTuple

from hpcdl.errors import UsageError, finite, nearest


class Budget(NamedTuple):
    """What a training may use: seconds of steps and their data, bytes sent by all ranks, examples; infinite: any."""

    seconds: float = math.inf
    bytes: float = math.inf
    examples: float = math.inf

    @classmethod
    def read(cls, text: str) -> "Budget":
        """The budget that an option says, as seconds=60,bytes=1e9; "": anything. Raises UsageError."""
        found: dict[str, float] = {}
        for item in filter(None, text.split(",")):
            name, _, number = item.partition("=")
            if name not in cls._fields:
                raise UsageError(
                    f"--budget {text}: there is no {name!r}{nearest(name, cls._fields)}; say seconds=60, bytes=1e9 or "
                    "examples=1e6"
                )
            try:
                found[name] = finite(number)
            except ValueError:
                found[name] = 0
            if found[name] <= 0:
                raise UsageError(f"--budget {item}: it is a number greater than 0, as {name}=1e6")
        return cls(**found)

    def spent(self, *used: float) -> bool:
        """Whether so much, in the order of the fields, is all of it; what is not known, NaN, is no limit."""
        return any(amount >= limit for amount, limit in zip(used, self, strict=True))

    def steps(self, steps: int, batch: int) -> int:
        """Of so many steps of `batch` examples each those that its examples allow."""
        return steps if math.isinf(self.examples) else min(steps, math.ceil(self.examples / batch))


NONE = Budget()


class Stopping:
    """steps: the last step. patience: evaluations without a better loss that end the run; 0: none do. goal: the test
    accuracy that ends it; 0: none does. tolerance: the duality gap that does; 0: none. budget: what may be used.
    `reason` is why the run ended, None while it goes on.
    """

    def __init__(self, patience: int = 0, budget: Budget = NONE):
        self.steps, self.patience, self.goal, self.tolerance, self.budget = 0, patience, 0.0, 0.0, budget
        self.pauses = False  # whether the last step is not that of the whole run
        self.reason: str | None = None
        self.pending: str | None = None  # the reason for which the run ends at its horizon
        self.best, self.evaluations_since_best, self.improved = math.inf, 0, False

    def plan(self, steps: int, per_epoch: int, pause: float) -> None:
        """The whole run has so many steps, of which this leg does those of the first `pause` epochs; 0: all of them.

        What depends on the number of steps, as the schedule of a rate, is made for the whole run.
        """
        last = max(1, round(pause * per_epoch)) if pause else steps
        self.steps, self.pauses = min(steps, last), last < steps

    def over(self, step: int) -> bool:
        """Whether no step is to follow the first `step` steps."""
        return self.reason is not None or step >= self.steps

    def told(self, step: int, signalled: bool, late: bool) -> None:
        """After an agreement: whether some rank had a signal, whether it is later than the time limit."""
        if step < self.steps and self.pending is None:
            self.reason = "signal" if signalled else "time limit" if late else None

    def used(self, step: int, *amounts: float) -> None:
        """After an agreement: what the training has used by then, as `Budget.spent` takes it."""
        if step < self.steps and self.pending is None and self.reason is None and self.budget.spent(*amounts):
            self.reason = "budget"

    def extend(self, step: int, horizon: int) -> None:
        """Told to stop after `step`, go on to the horizon where that is later, but never beyond the last step."""
        horizon = min(horizon, self.steps)
        if self.reason is not None and step < horizon:
            self.pending, self.reason, self.steps = self.reason, None, horizon

    def judge(self, loss: float, accuracy: float | None, gap: float | None = None) -> None:
        """An evaluation: the loss that is to become smaller, the accuracy on the test part and the gap where known."""
        self.improved = loss < self.best
        self.best = loss if self.improved else self.best
        self.evaluations_since_best = 0 if self.improved else self.evaluations_since_best + 1
        if self.patience and self.evaluations_since_best >= self.patience and self.reason is None:
            self.reason = "patience"
        self.reach(accuracy, gap)

    def reach(self, accuracy: float | None, gap: float | None = None) -> None:
        """End where the goal is reached, or the gap as small as it is to be."""
        if self.goal and (accuracy or 0) >= self.goal and self.reason is None:
            self.reason = "accuracy"
        if self.tolerance and gap is not None and gap <= self.tolerance and self.reason is None:
            self.reason = "tolerance"

    def end(self, examples: int = 0) -> None:
        """The loop has ended after so many examples: the steps may have been planned to be as many as may be used."""
        ended = "paused" if self.pauses else "budget" if examples >= self.budget.examples else "finished"
        self.reason = self.reason or self.pending or ended
