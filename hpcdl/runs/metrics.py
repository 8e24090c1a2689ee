"""How well a run does: the loss of each step, the scores of each evaluation; written to metrics.jsonl, and shown."""

import math
from collections.abc import Callable

from hpcdl.runs.agreement import Step
from hpcdl.runs.folder import Folder
from hpcdl.runs.options import Options
from hpcdl.runs.progress import Display


class Metrics:
    """scores: of the last evaluation, by name. train_loss: the mean of the last step that had examples.

    rounds: steps are rounds, as in federated learning. per_step: environment steps of a step, where a run acts; else 0.
    learning_rate: the schedule, from updates done to the rate. recent: on each rank the lines of the last meeting, and
    those since; rank 0 has written all lines before them.
    """

    def __init__(self, display: Display, options: Options):
        self.display, self.rounds, self.per_step = display, hasattr(options, "rounds"), options.per_step
        self.folder = Folder(None, 0)
        self.per_epoch = 1
        self.learning_rate: Callable[[int], float] = lambda step: math.nan
        self.scores: dict = {}
        self.train_loss = math.nan
        self.recent: list[dict] = []

    def open(self, folder: Folder, per_epoch: int, learning_rate: Callable[[int], float]) -> None:
        """From now on lines go to this folder; so many steps are an epoch."""
        self.folder, self.per_epoch, self.learning_rate = folder, per_epoch, learning_rate

    @property
    def known_loss(self) -> float | None:
        """The mean loss of the last step that had examples; None before there was one."""
        return None if math.isnan(self.train_loss) else self.train_loss

    def where(self, step: int) -> dict:
        """How a line says where the run is."""
        where = {"step": step, "epoch": step / self.per_epoch}
        where |= {"environment_steps": step * self.per_step} if self.per_step else {}
        return where | {"round": step} if self.rounds else where

    def record(self, first: int, done: list[Step], steps: int, rate: float) -> None:
        """Steps from `first` on, with the losses of all ranks; of so many in all, at so many examples per second."""
        lines = []
        for step, (loss, total, seconds) in enumerate(done, first):
            train_loss = loss / total if total else None  # in a round of which all clients stay away
            self.train_loss = self.train_loss if train_loss is None else train_loss
            learning_rate = self.learning_rate(step - 1)
            line = {"train_loss": train_loss, "seconds": round(seconds, 6)}
            line["learning_rate"] = learning_rate if math.isfinite(learning_rate) else None
            lines.append(self.where(step) | line)
        self.recent = lines
        self.folder.record(lines)
        last = lines[-1]
        self.display.update(last["step"], steps, last["epoch"], self.train_loss, self.score(), rate)

    def with_largest(self, found: dict) -> dict:
        """The scores of an evaluation, and beside a consensus distance the largest so far."""
        if "consensus_distance" not in found:
            return found
        before = [self.scores.get(name, 0.0) for name in ("consensus_distance", "consensus_distance_max")]
        return found | {"consensus_distance_max": max(found["consensus_distance"], *before)}

    def evaluated(self, step: int, steps: int, scores: dict, seconds: float, rate: float, sent: dict) -> None:
        """An evaluation after `step` of `steps`; sent: bytes and messages so far."""
        line = self.where(step) | scores | {"train_loss": self.known_loss, "seconds": round(seconds, 6)} | sent
        self.recent.append(line)
        self.folder.record([line])
        at = "round" if self.rounds else f"epoch {line['epoch']:g}  step"
        unit = self.per_step or 1
        at = "environment step" if self.per_step else at
        at += f" {unit * step}/{unit * steps}  loss {self.train_loss:.4f}"
        self.display.line(f"{at}  {self.score()}  {rate:,.0f} examples/s")
        self.display.update(step, steps, line["epoch"], self.train_loss, self.score(), rate)

    def score(self) -> str:
        """The score that counts, for people."""
        for name in ("validation_accuracy", "test_accuracy"):
            if name in self.scores:
                return f"{name.replace('_', ' ')} {self.scores[name]:.2%}"
        if "test_return" in self.scores:
            return f"test return {self.scores['test_return']:.4g}"
        return f"test rmse {self.scores['test_rmse']:.4g}" if "test_rmse" in self.scores else ""
