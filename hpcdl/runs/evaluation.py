"""Scores of a model on a set of examples: the mean loss, and the accuracy (classes) or the root mean squared error."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.chunks import chunk, chunks
from hpcdl.csr import on
from hpcdl.data import Batch
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.models.model import abilities_of, count


class Scores(NamedTuple):
    """Scores of a model on `examples` examples. accuracy: None for regression. rmse: None for classes."""

    loss: float
    accuracy: float | None
    rmse: float | None
    examples: int

    def named(self, prefix: str) -> dict:
        """Return the scores as entries of a metrics line, such as test_loss and test_accuracy or test_rmse."""
        second = {"accuracy": self.accuracy} if self.rmse is None else {"rmse": self.rmse}
        return {f"{prefix}_{name}": value for name, value in ({"loss": self.loss} | second).items()}


def evaluate(model: Any, parameters: Array, split: Any, classes: int, share: tuple[int, int] = (0, 1)) -> np.ndarray:
    """Return sums over this rank's share (rank, size) of a split: [losses, right answers or squared errors, examples].
    For a model without `evaluate`, call `loss_and_gradient`, whose gradient is discarded, and `predict`."""
    can = abilities_of(model)
    scratch = None if can.evaluate else can.device.zeros(parameters.shape, parameters.dtype)

    def score(batch: Batch) -> tuple[float, float]:
        if scratch is None:
            return model.evaluate(parameters, batch)
        loss = model.loss_and_gradient(parameters, batch, scratch)
        return loss, count(can.device.host(model.predict(parameters, batch.x)), can.device.host(batch.y), classes)

    return summed_scores(score, split, share, can.rows_at_once, can.device)


def summed_scores(
    score: Callable[[Batch], Any], split: Any, share: tuple[int, int], rows_at_once: int, device: Device = CPU
) -> np.ndarray:
    """Return [losses, scores, examples] over this rank's share of the split; score(batch) -> (sum of losses, score).
    All ranks call `score` equally often, some without rows, as ranks that share a model score together."""
    rank, size = share
    rows, most, sums = chunk(split.examples, size, rank), chunk(split.examples, size, 0), np.zeros(3)
    for part in chunks(rows.stop - rows.start, -(-(most.stop - most.start) // rows_at_once)):
        start, stop = rows.start + part.start, rows.start + part.stop
        x, y = split.rows(start, stop)
        batch = Batch(on(device, x), device.array(y), stop - start, epoch=0, step=0, index=np.arange(start, stop))
        sums += *score(batch), stop - start
    return sums


def scores(sums: np.ndarray, classes: int, outputs: tuple[int, ...] = (), unit: float = 1.0) -> Scores:
    """Return the scores from all ranks' sums. classes: 0 for regression. outputs: shape of a target. unit: of rmse."""
    loss, score, examples = sums
    examples = int(examples)
    if classes:
        return Scores(loss / examples, score / examples, None, examples)
    return Scores(loss / examples, None, unit * math.sqrt(score / examples / math.prod(outputs)), examples)
