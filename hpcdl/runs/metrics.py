"""Metrics of a run: the loss of each step and the scores of each evaluation, written to metrics.jsonl and shown."""

import math
from collections.abc import Callable

from hpcdl.errors import printable
from hpcdl.machine.display import Display
from hpcdl.runs.agreement import Step
from hpcdl.runs.folder import Folder
from hpcdl.runs.progress import Progress


class Metrics:
    """Writes and shows the results of steps and evaluations. rounds: steps are rounds, as in federated learning.
    per_step: environment steps of a step, if the run acts; else 0. learning_rate: the rate by updates done. recent: on
    each rank the lines of the last meeting and all lines since; rank 0 has written all earlier lines."""

    def __init__(self, display: Display, rounds: bool = False, per_step: int = 0):
        self.display, self.rounds, self.per_step = display, rounds, per_step
        self.folder = Folder(None, 0)
        self.per_epoch = 1
        self.learning_rate: Callable[[int], float] = lambda step: math.nan
        self.recent: list[dict] = []

    def open(self, folder: Folder, per_epoch: int, learning_rate: Callable[[int], float]) -> None:
        """Write lines to this folder from now on. per_epoch: steps of an epoch. learning_rate: by updates done."""
        self.folder, self.per_epoch, self.learning_rate = folder, per_epoch, learning_rate

    def where(self, step: int) -> dict:
        """Return the entries of a line that tell where the run is."""
        where = {"step": step, "epoch": step / self.per_epoch}
        where |= {"environment_steps": step * self.per_step} if self.per_step else {}
        return where | {"round": step} if self.rounds else where

    def record(self, first: int, done: list[Step], progress: Progress, steps: int, rate: float) -> None:
        """Record the steps `done`, from `first` on, with all ranks' losses. steps: the run's last. rate: examples/s."""
        self.recent = []
        for step, each in enumerate(done, first):
            learning_rate = self.learning_rate(step - 1)
            line = self.where(step) | {"train_loss": each.mean, "seconds": round(each.seconds, 6)}
            self.recent.append(line | {"learning_rate": learning_rate if math.isfinite(learning_rate) else None})
        self.folder.record(self.recent)
        self._show(self.recent[-1], progress, steps, rate)

    def evaluated(self, found: dict, progress: Progress, steps: int, rate: float, sent: dict) -> None:
        """Record an evaluation with the scores `found`. steps: the last. sent: entries of bytes and messages so far."""
        line = self.where(progress.step) | found
        line |= {"train_loss": progress.train_loss, "seconds": round(progress.seconds, 6)} | sent
        self.recent.append(line)
        self.folder.record([line])
        at = "round" if self.rounds else f"epoch {line['epoch']:g}  step"
        at, unit = ("environment step", self.per_step) if self.per_step else (at, 1)
        at += f" {unit * progress.step}/{unit * steps}  loss {shown(progress.train_loss):.4f}"
        self.display.line(f"{at}  {score(progress.scores)}  {rate:,.0f} examples/s")
        self._show(line, progress, steps, rate)

    def _show(self, line: dict, progress: Progress, steps: int, rate: float) -> None:
        loss = shown(progress.train_loss)
        self.display.update(line["step"], steps, line["epoch"], loss, score(progress.scores), rate)


def shown(loss: float | None) -> float:
    """Return the loss, NaN if there is none yet."""
    return math.nan if loss is None else loss


def score(scores: dict) -> str:
    """Return the validation accuracy, test accuracy, test return or test rmse as text, the first one known; else ""."""
    for name in ("validation_accuracy", "test_accuracy"):
        if name in scores:
            return f"{name.replace('_', ' ')} {scores[name]:.2%}"
    if "test_return" in scores:
        return f"test return {scores['test_return']:.4g}"
    known = [name for name in scores if name.startswith("test_rmse")]  # of several outputs: the first one, after all
    return f"{printable(known[0].replace('_', ' '))} {scores[known[0]]:.4g}" if known else ""
