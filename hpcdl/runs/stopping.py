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
from dataclasses import replace
from typing import NamedTuple

from hpcdl.errors import UsageError, nearest, parse_finite
from hpcdl.runs.progress import Progress


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
                found[name] = parse_finite(number)
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


class Due(NamedTuple):
    """What is due after a step.

    epoch_ends    of every so many (--evaluate-every): an evaluation; where that is the best so far, best.h5 is saved
    saving        every --checkpoint-every steps: checkpoint.h5 is saved
    ends          at the last step of the run: both
    """

    epoch_ends: bool
    saving: bool
    ends: bool

    @classmethod
    def after(cls, step: int, per_epoch: int, every: int, steps: int) -> "Due":
        """After a step of so many; every: steps between checkpoints, or 0."""
        return cls(step % per_epoch == 0, bool(every) and step % every == 0, step >= steps)


class Stopping:
    """steps: the last step. patience: evaluations without a better loss that end the run; 0: none do. goal: the test
    accuracy that ends it; 0: none does. tolerance: the duality gap that does; 0: none. budget: what may be used.

    It says why a run is to end, or None, of a run whose progress is that of a step; `Run.stop` writes it down.
    """

    def __init__(self, patience: int = 0, budget: Budget = NONE):
        self.steps, self.patience, self.goal, self.tolerance, self.budget = 0, patience, 0.0, 0.0, budget
        self.pauses = False  # whether the last step is not that of the whole run
        self.pending: str | None = None  # the reason for which the run ends at its horizon

    def plan(self, steps: int, per_epoch: int, pause: float) -> None:
        """The whole run has so many steps, of which this leg does those of the first `pause` epochs; 0: all of them.

        What depends on the number of steps, as the schedule of a rate, is made for the whole run.
        """
        last = max(1, round(pause * per_epoch)) if pause else steps
        self.steps, self.pauses = min(steps, last), last < steps

    def over(self, progress: Progress) -> bool:
        """Whether no step is to follow."""
        return progress.stopped is not None or progress.step >= self.steps

    def told(self, progress: Progress, signalled: bool, late: bool) -> str | None:
        """After an agreement: whether some rank had a signal, whether it is later than the time limit."""
        if progress.step >= self.steps or self.pending is not None:
            return None
        return "signal" if signalled else "time limit" if late else None

    def used(self, progress: Progress, *amounts: float) -> str | None:
        """After an agreement: what the training has used by then, as `Budget.spent` takes it."""
        ends = progress.step < self.steps and self.pending is None and self.budget.spent(*amounts)
        return "budget" if ends else None

    def extend(self, progress: Progress, horizon: int) -> Progress:
        """Told to stop, go on to the horizon where that is later, but never beyond the last step."""
        horizon = min(horizon, self.steps)
        if progress.stopped is None or progress.step >= horizon:
            return progress
        self.pending, self.steps = progress.stopped, horizon
        return replace(progress, stopped=None)

    def judged(self, progress: Progress) -> str | None:
        """After an evaluation, of which it knows the scores, and how many have brought nothing better."""
        if self.patience and progress.waited >= self.patience:
            return "patience"
        return self.reached(progress.scores)

    def reached(self, scores: dict) -> str | None:
        """Whether the goal is reached, or the gap as small as it is to be."""
        if self.goal and (scores.get("test_accuracy") or 0) >= self.goal:
            return "accuracy"
        gap = scores.get("duality_gap")
        return "tolerance" if self.tolerance and gap is not None and gap <= self.tolerance else None

    def ended(self, examples: int = 0) -> str:
        """The loop has ended after so many examples: the steps may have been planned to be as many as may be used."""
        return self.pending or (
            "paused" if self.pauses else "budget" if examples >= self.budget.examples else "finished"
        )
