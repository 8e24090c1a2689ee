"""samples.h5, a run's samples of a posterior, beside its checkpoint; and predictions that are means over samples.

    samples    (chains, samples, parameters)
    steps      (samples,) steps after which they were taken, ascending
    weights    (samples,) the rates of these steps; equal weights if absent, as in files of older versions

The file is rewritten before each checkpoint; a reader of the checkpoint leaves out samples after its step."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpcdl.checkpoint.rollback import folder_of
from hpcdl.data.hdf5 import dataset, new_file
from hpcdl.errors import UsageError, blamed_on, refuse_beyond
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.memory import available
from hpcdl.models.model import Abilities, ModelWrapper, abilities_of, count
from hpcdl.models.scores import probabilities

FILE, FORMAT, VERSION = "samples.h5", "hpcdl samples", 1


class Samples(NamedTuple):
    """Samples: steps (samples,), vectors (chains, samples, parameters), weights (samples,) or None (equal)."""

    steps: np.ndarray
    vectors: np.ndarray
    weights: np.ndarray | None = None

    def write(self, folder: Path) -> None:
        """Write the file into `folder`. If an error of h5py is raised, an existing file stays as it was."""
        with new_file(folder / FILE) as file:
            file["samples"], file["steps"] = self.vectors, self.steps
            if self.weights is not None:
                file["weights"] = self.weights
            file.attrs["format"], file.attrs["version"] = FORMAT, VERSION

    @classmethod
    def read(cls, folder: Path, step: int, size: int, dtype: np.dtype) -> "Samples":
        """Read the samples up to `step`. size: number of parameters. UsageError for a missing or invalid file."""
        path = folder / FILE
        if not path.is_file():
            raise UsageError(f"there is no {path}: only runs of train-sgld have samples")
        with blamed_on(f"{path} is damaged or cut off"), h5py.File(path, "r") as file:
            if file.attrs.get("format") != FORMAT or file.attrs["version"] != VERSION:
                raise UsageError(f"{path} is not a file of samples that this version can read")
            for name in ("steps", "samples", "weights"):
                if name in file:
                    dataset(file, name)  # refuses links to other files
            steps, samples = file["steps"], file["samples"]
            valid = steps.ndim == 1 and steps.dtype == np.int64 and samples.ndim == 3 and samples.dtype == dtype
            weights = file["weights"][()] if "weights" in file else None
            if not valid or samples.shape[1:] != (len(steps), size) or not samples.shape[0]:
                raise UsageError(f"{path} does not hold samples of {size} parameters of {dtype}")
            steps = steps[()]
            fit = weights is None or (weights.shape == steps.shape and weights.dtype == np.float64)
            if not fit or (weights is not None and not (weights > 0).all()):
                raise UsageError(f"{path}: its weights are not one number above 0 for each sample")
            if (np.diff(steps) <= 0).any():
                raise UsageError(f"{path}: its steps are not in ascending order")
            there = int(np.searchsorted(steps, step, side="right"))
            refuse_beyond(f"{path}", samples.shape[0] * there * size * dtype.itemsize, available())
            stored = cls(steps[:there], samples[:, :there], None if weights is None else weights[:there])
        if not np.isfinite(stored.vectors).all():
            raise UsageError(f"{path}: a sample is not finite")
        return stored


class Predictive(ModelWrapper):
    """A model whose predictions are means over samples (number, parameters); parameters passed to it are ignored.
    weights (number,): of the samples; None: equal. For classes the means are probabilities, the posterior predictive
    distribution, and the loss is -log of it. For values the loss is half the squared error of the mean values."""

    def __init__(self, model: Any, samples: np.ndarray, classes: int, weights: np.ndarray | None = None):
        super().__init__(model)
        self.samples, self.classes = samples, classes
        self.weights = np.ones(len(samples)) if weights is None else weights

    @property
    def abilities(self) -> Abilities:
        return dataclasses.replace(abilities_of(self.model), evaluate=True)

    def predict(self, parameters: np.ndarray, x: Any) -> np.ndarray:
        total = 0.0
        for sample, weight in zip(self.samples, self.weights, strict=True):
            total = total + weight * self.model.predict(sample, x).astype(np.float64)
        return (total / self.weights.sum()).astype(self.samples.dtype)  # type: ignore[attr-defined]

    def evaluate(self, parameters: np.ndarray, batch: Any) -> tuple[float, float]:
        """Return (sum of losses, number of right answers or sum of squared errors) of a batch."""
        predictions = self.predict(parameters, batch.x)
        score = count(predictions, batch.y, self.classes)
        if not self.classes:
            return score / 2, score
        p = probabilities(predictions)[np.arange(len(batch.y)), batch.y].astype(np.float64)
        return float(-np.log(np.maximum(p, np.finfo(np.float64).tiny)).sum()), score


def predictive(run: str, trained: TrainedModel, model: Any) -> Predictive:
    """Return the predictive model of a run's samples up to its checkpoint's step. UsageError if there are none."""
    if abilities_of(model).generate:
        raise UsageError("--samples: a text model has no mean prediction over samples; leave out --samples")
    samples = Samples.read(folder_of(run), trained.about["step"], model.layout.size, np.dtype(trained.dtype))
    if not len(samples.steps):
        raise UsageError(f"{run} has no samples up to step {trained.about['step']}; see --burn-in and --thin")
    weights = None if samples.weights is None else np.tile(samples.weights, len(samples.vectors))
    return Predictive(model, samples.vectors.reshape(-1, model.layout.size), trained.classes, weights)
