"""A trained model, read from the checkpoint of a run."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.checkpoint.attributes import check_attributes
from hpcdl.checkpoint.buffers import PREFIX, load
from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data.format import find_data_file, read_info
from hpcdl.data.schema import Schema
from hpcdl.data.standard import TARGET, Standard, unit_of_targets
from hpcdl.errors import UsageError
from hpcdl.models import for_data
from hpcdl.plugins import names_in, refuse_untrusted
from hpcdl.runs.evaluation import without_probabilities


class TrainedModel:
    """A trained model: a checkpoint's attributes (`about`), parameters, statistics of standardized data, and schema."""

    sparse = False
    threshold: float | None = None  # from this probability on, class 1 of two is predicted; None: the likelier class
    certain = False  # True if `model` has no probabilities, only classes

    def __init__(self, run: str, trust: Iterable[str] = (), file: str = "", seed: int | None = None):
        """Read `run`, a run's folder or checkpoint; UsageError if damaged, diverged or of reinforcement learning.
        trust: names of code that may be called, as by --trust (hpcdl/plugins.py). file: the checkpoint's name in
        messages about code; default: run. seed: of a user's function that draws data; default: that of the run."""
        checkpoint = Checkpoint.read(Path(run))
        self.name, self.about, self.trust = run, checkpoint.attributes, tuple(trust)
        self.file = file or run  # in messages about names of code
        self.parameters = parameters_of(checkpoint, run)
        self.seed: Any = self.about.get("seed") if seed is None else seed
        if "environment" in self.about:
            name = self.about["environment"]["name"]
            raise UsageError(f"{run} has learned to act in {name}: let it act by hpcdl evaluate {run} --episodes 100")
        self.dtype, data = self.parameters.dtype, self.about["data"]
        self.features, self.classes = tuple(data["features"]), int(data["classes"])
        self.outputs, self.sparse = tuple(data.get("outputs", ())), bool(data.get("sparse"))
        self.extra = {name: each for name, each in checkpoint.vectors.items() if name.startswith(PREFIX)}
        stored, names = checkpoint.vectors, (*STATISTICS, *TARGET)
        self.statistics = {name: stored[f"data/{name}"] for name in names if f"data/{name}" in stored}
        width, shapes = (math.prod(self.features),), {name: each.shape for name, each in self.statistics.items()}
        if shapes and [shapes.get(name) for name in STATISTICS] != [width, width]:
            raise UsageError(f"{run}: its statistics of the data are not {width[0]} means and {width[0]} deviations")
        for name, each in self.statistics.items():
            if not np.isfinite(each).all() or (name.endswith("deviation") and (each <= 0).any()):
                raise UsageError(f"{run}: its statistics of the data are not finite means and positive deviations")
        target = [shapes[name] for name in TARGET if name in shapes]
        if target and (target != 2 * [(math.prod(self.outputs),)] or self.classes):
            raise UsageError(f"{run}: its statistics of the targets are not a mean and deviation of each output")
        self.schema = self._read_schema()
        self.vocabulary = self.schema.vocabulary

    def _read_schema(self) -> Schema:
        if "meaning" in self.about:
            schema = Schema.read(self.about["meaning"], f"{self.name}: its attribute meaning")
            if schema.labels is not None and len(schema.labels) != self.classes:
                raise UsageError(f"{self.name}: attribute meaning names {len(schema.labels)} of {self.classes} classes")
            return schema
        try:  # a checkpoint of an older version has no schema: read the data
            return read_info(find_data_file(self.about["source"])).schema
        except UsageError:
            return Schema()

    @property
    def source(self) -> str:
        """The name of the training data; UsageError if there is none, or if it names code that may not be called."""
        if not self.about["source"]:
            raise UsageError(f"{self.name} was trained on a program's own arrays: give a data set by --data")
        return self.named("source")

    def named(self, attribute: str) -> str:
        """Return an attribute of the checkpoint; UsageError if it names code that may not be called."""
        text: str = self.about[attribute]
        kind = {"source": "data"}.get(attribute, attribute)
        refuse_untrusted([(kind, name) for name in names_in(kind, text)], self.file, self.trust)
        return text

    def model(self, spec: str = "") -> Any:
        """Return the model. Raises UsageError. spec: new name of a user's model; default: name in the checkpoint."""
        name = spec or self.named("model")
        try:
            kind = self.about.get("computing", self.dtype)
            model = for_data(name, self, kind, loss=self.about.get("loss", "squared"))
        except UsageError as error:
            at = self.about.get("launched_in")
            where = f"; its run was started in {at}" if at and "No module named" in str(error) else ""
            raise UsageError(f"{error}{where}") from error
        if model.layout.describe() != self.about["layout"]:
            was = f"the checkpoint's model {self.about['model']!r}"
            what = f"{was} is not one that this program can build"
            raise UsageError(f"{self.name}: {f'--model {spec} is not the same as {was}' if spec else what}")
        load(model, self.extra, self.name)
        self.certain = without_probabilities(model)
        return model

    def set_threshold(self, threshold: float) -> None:
        """Predict class 1 of two from this probability on; 0: the likelier class. Raises UsageError."""
        if not threshold:
            return
        if self.classes != 2 or self.certain:
            what = f"{self.classes} classes" if self.classes else "values"
            what = "classes without probabilities" if self.certain else what
            raise UsageError(f"--threshold is for the probability of one of two classes; {self.name} predicts {what}")
        self.threshold = threshold

    @property
    def of_features(self) -> dict[str, np.ndarray]:
        """Statistics of the features by name; empty if the features were not standardized."""
        return {name: self.statistics[name] for name in STATISTICS if name in self.statistics}

    def standard(self) -> Standard | None:
        """Return the standardization of the features in training; None if these were not standardized."""
        return Standard(self.of_features, self.dtype) if self.statistics else None

    @property
    def output_names(self) -> list[str]:
        """As `Schema.output_names` gives them."""
        return self.schema.output_names(self.outputs)

    def values(self, outputs: np.ndarray) -> np.ndarray:
        """Return outputs (rows,) or (rows, outputs) in the original units of the targets."""
        if TARGET[0] not in self.statistics:
            return outputs
        mean, deviation = (self.statistics[name] if self.outputs else self.statistics[name][0] for name in TARGET)
        return (outputs * deviation + mean).astype(outputs.dtype)

    def standardized(self, y: np.ndarray) -> np.ndarray:
        """Return targets in the units of the loss; class numbers as they are."""
        y = y.copy()
        if TARGET[0] in self.statistics:
            Standard(self.statistics, self.dtype).apply_target(y)
        return y

    @property
    def unit(self) -> float | None:
        """As `unit_of_targets` gives it."""
        return unit_of_targets(self.statistics)

    def check_rows(self, features: tuple[int, ...], name: str) -> None:
        """Raise UsageError if rows of this shape, called `name`, do not fit the model."""
        flat = len(features) == 1 or len(self.features) == 1
        if math.prod(features) != math.prod(self.features) or not (flat or tuple(features) == self.features):
            trained = f"the model was trained on shape {self.features}"
            raise UsageError(f"{name} has examples of shape {tuple(features)}; {trained}")


STATISTICS = ("mean", "deviation")


def parameters_of(checkpoint: Checkpoint, run: str) -> np.ndarray:
    """Return the parameters of a checkpoint; UsageError if they do not fit its layout, or are not finite."""
    check_attributes(checkpoint.attributes, run)
    parameters, tensors = checkpoint.vectors.get("parameters"), checkpoint.attributes["layout"]
    size, dtypes = sum(math.prod(each["shape"]) for each in tensors), {each["dtype"] for each in tensors}
    if parameters is None or parameters.shape != (size,) or {str(parameters.dtype)} != dtypes:
        raise UsageError(f"{run}: parameters are not {size} values of {' and '.join(sorted(dtypes))}, as in its layout")
    if not np.isfinite(parameters).all():
        raise UsageError(f"{run}: the parameters are not finite, as the training diverged; take an older checkpoint")
    return parameters
