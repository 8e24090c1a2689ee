"""Where a run is, in one record: what a checkpoint, a recovery point and a server's note hold of it."""

import math
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Progress:
    """Where a run is after `step` steps. A run replaces it whole, so whoever keeps one has it as it was.

    examples: trained on, by all ranks. updates: of the optimizer. scores: of the last evaluation, by name. train_loss:
    the mean loss of the last step that had examples, None before there is one. best: the smallest loss of all
    evaluations. waited: evaluations since that one. stopped: why the run ended (stopping.py), None while it goes on.
    seconds: of steps and data, those before a resumption included.
    """

    step: int = 0
    examples: int = 0
    updates: int = 0
    scores: dict = field(default_factory=dict)
    train_loss: float | None = None
    best: float = math.inf
    waited: int = 0
    stopped: str | None = None
    seconds: float = 0.0

    def after_step(self, examples: int) -> "Progress":
        """After one more step, of so many examples. Called at each step: `replace` takes three times as long."""
        there = object.__new__(Progress)
        vars(there).update(vars(self), step=self.step + 1, examples=self.examples + examples)
        return there

    def scored(self, scores: dict, loss: float) -> "Progress":
        """After an evaluation; loss: what is to become smaller."""
        better = loss < self.best
        return replace(self, scores=scores, best=loss if better else self.best, waited=0 if better else self.waited + 1)

    def attributes(self) -> dict[str, Any]:
        """As a checkpoint holds it. It has no reason to stop: who goes on from it has steps of its own left."""
        return {
            "step": self.step,
            "updates": self.updates,
            "examples": self.examples,
            "best": None if math.isinf(self.best) else self.best,
            "waited": self.waited,
            "scores": self.scores,
            "train_loss": self.train_loss,
            "seconds": self.seconds,
        }

    @classmethod
    def read(cls, attributes: dict[str, Any]) -> "Progress":
        """Of a checkpoint's attributes."""
        found = {name: attributes[name] for name in cls().attributes()}
        return cls(**found | {"best": math.inf if found["best"] is None else found["best"]})
