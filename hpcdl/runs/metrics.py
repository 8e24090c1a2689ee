"""How well a run does: the loss of each step, the scores of each evaluation; written to metrics.jsonl, and shown."""

import math
from collections.abc import Callable

from hpcdl.machine.display import Display
from hpcdl.runs.agreement import Step
from hpcdl.runs.folder import Folder
from hpcdl.runs.progress import Progress


class Metrics:
    """Writes and shows what steps and evaluations have brought.

    rounds: steps are rounds, as in federated learning. per_step: environment steps of a step, where a run acts; else 0.
    learning_rate: the schedule, from updates done to the rate. recent: on each rank the lines of the last meeting, and
    those since; rank 0 has written all lines before them.
    """

    def __init__(self, display: Display, rounds: bool = False, per_step: int = 0):
        self.display, self.rounds, self.per_step = display, rounds, per_step
        self.folder = Folder(None, 0)
        self.per_epoch = 1
        self.learning_rate: Callable[[int], float] = lambda step: math.nan
        self.recent: list[dict] = []

    def open(self, folder: Folder, per_epoch: int, learning_rate: Callable[[int], float]) -> None:
        """From now on lines go to this folder; so many steps are an epoch."""
        self.folder, self.per_epoch, self.learning_rate = folder, per_epoch, learning_rate

    def where(self, step: int) -> dict:
        """How a line says where the run is."""
        where = {"step": step, "epoch": step / self.per_epoch}
        where |= {"environment_steps": step * self.per_step} if self.per_step else {}
        return where | {"round": step} if self.rounds else where

    def record(self, first: int, done: list[Step], progress: Progress, steps: int, rate: float) -> None:
        """Steps from `first` on, with the losses of all ranks; of so many in all, at so many examples per second."""
        lines = []
        for step, each in enumerate(done, first):
            learning_rate = self.learning_rate(step - 1)
            line = {"train_loss": each.mean, "seconds": round(each.seconds, 6)}
            line["learning_rate"] = learning_rate if math.isfinite(learning_rate) else None
            lines.append(self.where(step) | line)
        self.recent = lines
        self.folder.record(lines)
        self._show(lines[-1], progress, steps, rate)

    def evaluated(self, found: dict, progress: Progress, steps: int, rate: float, sent: dict) -> None:
        """An evaluation with the scores `found`, in a run of so many steps; sent: bytes and messages so far."""
        line = self.where(progress.step) | found
        line |= {"train_loss": progress.train_loss, "seconds": round(progress.seconds, 6)} | sent
        self.recent.append(line)
        self.folder.record([line])
        at = "round" if self.rounds else f"epoch {line['epoch']:g}  step"
        unit = self.per_step or 1
        at = "environment step" if self.per_step else at
        at += f" {unit * progress.step}/{unit * steps}  loss {shown(progress.train_loss):.4f}"
        self.display.line(f"{at}  {score(progress.scores)}  {rate:,.0f} examples/s")
        self._show(line, progress, steps, rate)

    def _show(self, line: dict, progress: Progress, steps: int, rate: float) -> None:
        told = shown(progress.train_loss), score(progress.scores), rate
        self.display.update(line["step"], steps, line["epoch"], *told)


def shown(loss: float | None) -> float:
    """As people see it: no number where there is none yet."""
    return math.nan if loss is None else loss


def with_largest(found: dict, before: dict) -> dict:
    """The scores of an evaluation, and beside a consensus distance the largest so far; before: the scores till now."""
    if "consensus_distance" not in found:
        return found
    largest = [before.get(name, 0.0) for name in ("consensus_distance", "consensus_distance_max")]
    return found | {"consensus_distance_max": max(found["consensus_distance"], *largest)}


def score(scores: dict) -> str:
    """The score that counts, for people."""
    for name in ("validation_accuracy", "test_accuracy"):
        if name in scores:
            return f"{name.replace('_', ' ')} {scores[name]:.2%}"
    if "test_return" in scores:
        return f"test return {scores['test_return']:.4g}"
    return f"test rmse {scores['test_rmse']:.4g}" if "test_rmse" in scores else ""
