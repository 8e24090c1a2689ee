"""The options of opening a data set, and their checks."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.data.augment import make_augment
from hpcdl.data.formats.recipe import read_recipe
from hpcdl.data.hdf5 import largest_input
from hpcdl.data.partition import check_shards, hold_out, parse_partition
from hpcdl.data.schema import Schema
from hpcdl.data.standard import TARGET, Standard
from hpcdl.errors import UsageError
from hpcdl.random import Random

MOST_WINDOW = 4096  # blocks: 32 GB
MOST_ROUNDING = 1e-3  # rounding error, as a fraction of the deviation
Standardize = bool | str | dict[str, np.ndarray]  # a flag, "auto", or the statistics to use


def check_placement(placement: str, partition: str) -> None:
    """Raise UsageError for a partition of rows that are streamed."""
    if placement == "streamed" and partition != "iid":
        what = "placement streamed shares every block among the ranks"
        raise UsageError(f"{what}: partition {partition!r} needs placement shared or partitioned")


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The options of `open_data`; `dtype` is the model's."""

    partition: str
    dtype: np.dtype
    seed: int
    validation: float
    augment: str
    standardize: Standardize
    parts: tuple[list[int], int] | None = None
    keep: bool = False
    data_seed: int | None = None
    shuffle_window: int = 8
    validation_by: str = ""

    @property
    def drawn_by(self) -> int:
        """The seed of the held-out rows and of a user's function."""
        return self.seed if self.data_seed is None else self.data_seed

    def check_fit(
        self, classes: int, features: tuple[int, ...], rows: int, scale: float, text: bool = False, sparse: bool = False
    ) -> None:
        """Raise UsageError if an option does not fit data with these properties. rows: number of training rows."""
        if sparse and (self.augment or self.standardize not in (False, "auto")):
            raise UsageError("sparse rows cannot be standardized or augmented, for their zeros must stay zero")
        if text and self.standardize not in (False, "auto"):
            raise UsageError("tokens of a text cannot be standardized: they number characters, and are no quantities")
        if self.dtype not in (np.float32, np.float64):
            raise UsageError(f"dtype must be float32 or float64, not {self.dtype}")
        if isinstance(self.standardize, str) and self.standardize != "auto":
            raise UsageError(f"standardize must be True, False, auto or statistics, not {self.standardize!r}")
        largest_input(scale, self.dtype)
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation must be a fraction of 0 or more, below 1, as 0.1, not {self.validation}")
        if not 1 <= self.shuffle_window <= MOST_WINDOW:
            raise UsageError(
                f"--shuffle-window is a number of blocks from 1 to {MOST_WINDOW}, not {self.shuffle_window}"
            )
        check_shards(*parse_partition(self.partition, classes), rows)
        make_augment(self.augment, features, self.seed)

    @property
    def column(self) -> str:
        """NAME of the partition column:NAME; else empty."""
        name, _, column = self.partition.partition(":")
        return column if name == "column" else ""

    def standard(self, measured: Callable[[], dict[str, np.ndarray]], schema: Schema) -> Standard | None:
        """Return the standardization, by given statistics or measured(); None: no standardization ("auto", no table).
        UsageError if `dtype` has too few digits for a feature or target far from 0 with a small deviation."""
        given, dtype = self.standardize, self.dtype
        if given is False or (given == "auto" and schema.recipe is None):
            return None
        if isinstance(given, dict):
            return Standard(given, dtype)
        statistics = measured()
        mean, deviation = statistics["mean"], statistics["deviation"]
        recipe = read_recipe(schema.recipe, mean.shape, "the recipe of the data") if schema.recipe else None
        if recipe is not None:
            texts = recipe.indicators
            statistics = statistics | {"mean": np.where(texts, 0.0, mean), "deviation": np.where(texts, 1.0, deviation)}
        for what, names in (("feature", ("mean", "deviation")), ("value to predict", TARGET)):
            if names[0] in statistics:
                mean, deviation = (statistics[name] for name in names)
                changing = np.where(deviation == 1.0, np.inf, deviation)  # 1: the feature may be constant
                lost = np.finfo(dtype).eps * abs(mean) / changing
                if lost.max() > MOST_ROUNDING:
                    k = int(lost.argmax())
                    name = f" ({recipe.features[k]})" if recipe and what == "feature" else ""
                    far = f"the {what} {k}{name} has mean {mean[k]:g} and deviation {deviation[k]:.3g}"
                    todo = f"take --dtype float64, subtract an offset from the data, or leave the {what} out"
                    raise UsageError(f"{far}, for which {dtype} has too few digits: {todo}")
        return Standard(statistics, dtype)


def model_type(dtype: DTypeLike) -> np.dtype:
    """Return the type of a model's parameters, float32 for bfloat16 (hpcdl/torch/model.py). UsageError: not a type."""
    try:
        return np.dtype("float32" if dtype == "bfloat16" else dtype)
    except TypeError:
        raise UsageError(f"dtype must be float32 or float64, not {dtype!r}") from None


def held_out_rows(labels: np.ndarray, classes: int, options: DataOptions) -> np.ndarray:
    """Return the sorted rows that `validation` holds out; 0: none. UsageError if a fraction above 0 takes 0 or all."""
    rows = hold_out(labels, classes, options.validation, Random(options.drawn_by)("validation"))
    if options.validation and not 0 < len(rows) < len(labels):
        count = f"{len(rows)} of {len(labels)} training rows"
        raise UsageError(f"validation={options.validation} would hold out {count}; hold out 1 or more, but not all")
    return rows


def held_out_owners(owners: np.ndarray, column: str, options: DataOptions) -> np.ndarray:
    """Return the sorted rows of the owners that `validation` holds out with all their rows. owners: of each row.

    Owners are drawn one after the other; an owner is held out if its rows bring their number nearer to the fraction. If
    every owner has too many rows, the one with the fewest is. UsageError: less than half the fraction, or most rows."""
    names, numbers, counts = np.unique(owners, return_inverse=True, return_counts=True)
    wanted, least, chosen, held = options.validation * len(owners), int(counts.min()), list[int](), 0
    drawn = Random(options.drawn_by)("validation", "owners").permutation(len(names))
    for each, rows in zip(drawn.tolist(), counts[drawn].tolist(), strict=True):
        if 2 * (wanted - held) <= least:
            break
        if rows < 2 * (wanted - held):
            chosen.append(each)
            held += rows
    if not chosen:
        chosen = [int(drawn[counts[drawn].argmin()])]
        held = least
    if 2 * held < wanted or held == len(owners) or 2 * held > max(3 * wanted, len(owners)):
        most = int(counts.argmax())
        has = f"the owner {names[most]} has {counts[most]:,} of the {len(owners):,} training rows"
        todo = f"whole owners cannot make up {options.validation:g} of the rows; leave out --validation-by"
        raise UsageError(f"--validation-by {column}: {has}, so {todo}")
    return np.flatnonzero(np.isin(numbers, chosen))
