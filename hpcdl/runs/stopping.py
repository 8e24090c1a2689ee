"""When a run ends, and why: its steps are done, or a limit, a goal, a signal or lost patience ends it before.

    finished       all steps are done
    signal         the process was told to end
    time limit     so many seconds have passed
    patience       so many evaluations have brought nothing better
    goal           a score has reached the value of --goal
    accuracy       the test accuracy has reached that of --rounds-to
    tolerance      the duality gap is small enough
    budget         so many seconds of training, bytes or examples have been used
    paused         this leg of a longer run ends here: a rung of a search

All ranks decide alike, from what all know alike. If steps are in flight when a run is told to stop (a pipeline is
filled, workers compute what servers have given out), the last of them, the horizon, becomes the last step."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hpcdl.errors import UsageError, nearest, parse_finite
from hpcdl.metric_lines import CLASS_SCORES, SCORES, USUAL_SCORES, VALUE_SCORES, base_of, larger_is_better
from hpcdl.runs.progress import Progress


class Budget(NamedTuple):
    """Limits of a training: seconds of steps and their data, bytes sent by all ranks, examples; infinite: no limit."""

    seconds: float = math.inf
    bytes: float = math.inf
    examples: float = math.inf

    @classmethod
    def read(cls, text: str) -> "Budget":
        """Parse an option such as seconds=60,bytes=1e9; "": no limit. Raises UsageError."""
        found: dict[str, float] = {}
        for item in filter(None, text.split(",")):
            name, _, number = item.partition("=")
            if name not in cls._fields:
                what = f"there is no {name!r}{nearest(name, cls._fields)}"
                raise UsageError(f"--budget {text}: {what}; give seconds=60, bytes=1e9 or examples=1e6")
            try:
                found[name] = parse_finite(number)
            except ValueError:
                found[name] = 0
            if found[name] <= 0:
                raise UsageError(f"--budget {item}: {name} must be a number greater than 0, as {name}=1e6")
        return cls(**found)

    def spent(self, *used: float) -> bool:
        """True if one of the amounts, in the order of the fields, reaches its limit; NaN (unknown) never does."""
        return any(amount >= limit for amount, limit in zip(used, self, strict=True))

    def steps(self, steps: int, batch: int) -> int:
        """Return how many of `steps` steps of `batch` examples the limit of examples allows."""
        return steps if math.isinf(self.examples) else min(steps, math.ceil(self.examples / batch))


NONE = Budget()


class Goal(NamedTuple):
    """The value of a score at which a run ends."""

    name: str
    value: float
    reason: str = "goal"

    @classmethod
    def read(cls, text: str) -> "Goal | None":
        """Parse an option such as validation_f1=0.8; "": None. Raises UsageError."""
        if not text:
            return None
        name, _, number = text.partition("=")
        known = [f"{part}{score}" for part in SCORES for score in (*USUAL_SCORES, *CLASS_SCORES, *VALUE_SCORES)]
        if not name.startswith(SCORES) or f"test_{base_of(name)}" not in known:
            guess = nearest(name, known)
            raise UsageError(
                f"--goal {text}: there is no score {name!r}{guess}; give one as test_accuracy=0.95 or validation_f1=0.8"
            )
        try:
            return cls(name, parse_finite(number))
        except ValueError:
            raise UsageError(f"--goal {text}: give a number, as {name}=0.95") from None

    def reached(self, scores: dict) -> bool:
        """True if the score is there, and at least as good as the value."""
        found = scores.get(self.name)
        if found is None:
            return False
        return bool(found >= self.value if larger_is_better(self.name) else found <= self.value)


class Due(NamedTuple):
    """What is due after a step. epoch_ends: an epoch is done, and every --evaluate-every epochs an evaluation is due
    (best.h5, if the best). saving: checkpoint.h5, every --checkpoint-every steps. ends: both, after the last step."""

    epoch_ends: bool
    saving: bool
    ends: bool

    @classmethod
    def after(cls, step: int, per_epoch: int, every: int, steps: int) -> "Due":
        """Return what is due after `step` of `steps`; every: steps between checkpoints, or 0."""
        return cls(step % per_epoch == 0, bool(every) and step % every == 0, step >= steps)


class Stopping:
    """Tells why a run ends; `Run.stop` notes it. steps: the last step. A run ends after `patience` evaluations without
    a better loss, when a score reaches one of `goals`, or at duality gap `tolerance` (0: never). budget: further
    limits."""

    def __init__(self, patience: int = 0, budget: Budget = NONE, goals: Sequence[Goal] = ()):
        self.steps, self.patience, self.goals, self.tolerance, self.budget = 0, patience, list(goals), 0.0, budget
        self.pauses = False  # True if the last step is not that of the whole run
        self.pending: str | None = None  # the reason for which the run ends at its horizon

    def plan(self, steps: int, per_epoch: int, pause: float) -> None:
        """Set the last step: the run's, or that of epoch `pause` (0: no pause). Schedules span the whole run."""
        last = max(1, round(pause * per_epoch)) if pause else steps
        self.steps, self.pauses = min(steps, last), last < steps

    def over(self, progress: Progress) -> bool:
        """True if no step is to follow."""
        return progress.stopped is not None or progress.step >= self.steps

    def told(self, progress: Progress, signalled: bool, late: bool) -> str | None:
        """Return why the run ends after an agreement: a signal of some rank, the time limit, or None."""
        if progress.step >= self.steps or self.pending is not None:
            return None
        return "signal" if signalled else "time limit" if late else None

    def used(self, progress: Progress, *amounts: float) -> str | None:
        """Return "budget" after an agreement if these amounts, as `Budget.spent` takes them, reach a limit."""
        ends = progress.step < self.steps and self.pending is None and self.budget.spent(*amounts)
        return "budget" if ends else None

    def extend(self, progress: Progress, horizon: int) -> Progress:
        """Let a stopped run go on to the horizon if the horizon is later, but never beyond the last step."""
        horizon = min(horizon, self.steps)
        if progress.stopped is None or progress.step >= horizon:
            return progress
        self.pending, self.steps = progress.stopped, horizon
        return replace(progress, stopped=None)

    def judged(self, progress: Progress) -> str | None:
        """Return why the run ends after an evaluation: patience, a goal, or None."""
        if self.patience and progress.waited >= self.patience:
            return "patience"
        return self.reached(progress.scores)

    def reached(self, scores: dict) -> str | None:
        """Return a goal's reason, or "tolerance", if it is reached; else None."""
        for goal in self.goals:
            if goal.reached(scores):
                return goal.reason
        gap = scores.get("duality_gap")
        return "tolerance" if self.tolerance and gap is not None and gap <= self.tolerance else None

    def ended(self, examples: int = 0) -> str:
        """Return why the loop has ended. examples: trained on so far; "budget" if the budget allows no more of them."""
        planned = "budget" if examples >= self.budget.examples else "finished"
        return self.pending or ("paused" if self.pauses else planned)
