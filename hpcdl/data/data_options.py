"""How a data set is to be opened, and whether that makes sense for it."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.data.augment import make_augment
from hpcdl.data.format import most_of
from hpcdl.data.formats.recipe import Recipe
from hpcdl.data.partition import check_shards, hold_out, parse_partition
from hpcdl.data.schema import Meaning
from hpcdl.data.standard import TARGET, Standard
from hpcdl.errors import UsageError
from hpcdl.random import Random

COARSE = 1e-3  # of a deviation, that rounding may take away
Standardize = bool | str | dict[str, np.ndarray]  # whether, or "auto", or by which statistics


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """How to open a data set; `dtype` is the model's. keep, data_seed: as `open_data` is told."""

    partition: str
    dtype: np.dtype
    seed: int
    validation: float
    augment: str
    standardize: Standardize
    parts: tuple[list[int], int] | None = None
    keep: bool = False
    data_seed: int | None = None

    @property
    def drawn_by(self) -> int:
        """The seed of what is drawn of the data themselves."""
        return self.seed if self.data_seed is None else self.data_seed

    def check_fit(
        self,
        classes: int,
        features: tuple[int, ...],
        rows: int,
        scale: float,
        text: bool = False,
        sparse: bool = False,
    ) -> None:
        """UsageError if something makes no sense for such data, of so many training rows."""
        if sparse and (self.augment or self.standardize not in (False, "auto")):
            raise UsageError("the zeros of sparse rows stay zero: they cannot be standardized, nor moved as images are")
        if text and self.standardize not in (False, "auto"):
            raise UsageError("tokens of a text are names, not quantities: they cannot be standardized")
        if self.dtype not in (np.float32, np.float64):
            raise UsageError(f"dtype must be float32 or float64, not {self.dtype}")
        if isinstance(self.standardize, str) and self.standardize != "auto":
            raise UsageError(f"standardize must be True, False, auto or statistics, not {self.standardize!r}")
        most_of(scale, self.dtype)
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation must be a fraction from 0 up to 1, as 0.1, not {self.validation}")
        check_shards(*parse_partition(self.partition, classes), rows)
        make_augment(self.augment, features, self.seed)

    @property
    def column(self) -> str:
        """The NAME of the partition column:NAME, or nothing."""
        name, _, column = self.partition.partition(":")
        return column if name == "column" else ""

    def standard(self, measured: Callable[[], dict[str, np.ndarray]], meaning: Meaning) -> Standard | None:
        """What standardizes, if anything is to: by the statistics that were given, or that `measured` computes.

        auto: the columns of a table are, for each has a unit of its own.
        """
        given = self.standardize
        if given is False or (given == "auto" and meaning.recipe is None):
            return None
        if isinstance(given, dict):
            return Standard(given, self.dtype)
        statistics = measured()
        refuse_coarse(statistics, self.dtype, meaning)
        return Standard(statistics, self.dtype)


def refuse_coarse(statistics: dict[str, np.ndarray], dtype: np.dtype, meaning: Meaning) -> None:
    """UsageError where the type has too few digits for what is far from 0 and changes little, as times in seconds."""
    for what, names in (("feature", ("mean", "deviation")), ("value to predict", TARGET)):
        if names[0] in statistics:
            mean, deviation = (statistics[name] for name in names)
            changing = np.where(deviation == 1.0, np.inf, deviation)  # 1: it may be constant
            lost = np.finfo(dtype).eps * abs(mean) / changing
            if lost.max() > COARSE:
                k = int(lost.argmax())
                recipe = Recipe.read(meaning.recipe, "the recipe of the data") if meaning.recipe else None
                name = f" ({recipe.features[k]})" if recipe and what == "feature" else ""
                raise UsageError(
                    f"the {what} {k}{name} is {mean[k]:g} give or take {deviation[k]:.3g}, and {dtype} has too few "
                    "digits for that: take --dtype float64, subtract an offset from the data, or leave it out"
                )


def model_type(dtype: DTypeLike) -> np.dtype:
    """The type that a model's parameters are to have; UsageError for what is none.

    Who computes in bfloat16 (hpcdl/torch/model.py) holds float32.
    """
    try:
        return np.dtype("float32" if dtype == "bfloat16" else dtype)
    except TypeError:
        raise UsageError(f"dtype must be float32 or float64, not {dtype!r}") from None


def held_out_rows(labels: np.ndarray, classes: int, options: DataOptions) -> np.ndarray:
    """The rows (sorted) that validation holds out; empty without."""
    rows = hold_out(labels, classes, options.validation, Random(options.drawn_by)("validation"))
    if options.validation and not 0 < len(rows) < len(labels):
        raise UsageError(f"validation={options.validation} would hold out {len(rows)} of {len(labels)} training rows")
    return rows
