"""What the rows of a data set mean: scale, names of classes, vocabulary, and how a table became numbers.

    scale        the model sees x * scale
    labels       names of the classes 0, 1, ...; where there are none, a class is named by its number
    vocabulary   what tokens stand for, of a text (hpcdl/data/formats/vocabulary.py)
    recipe       of a table: its columns and what was done with them, as hpcdl/data/formats/recipe.py describes it
    base         of sparse rows: the number, 0 or 1, that libsvm's text gives to their first feature

A data file says it in attributes, and a checkpoint keeps what it was trained on, so that new rows can be read in the
same way, and predictions be given by name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.errors import UsageError, printable

MOST_SHOWN = 5  # names that a message lists


@dataclass(frozen=True)
class Meaning:
    """See above; what is None there is none of."""

    scale: float = 1.0
    labels: tuple[str, ...] | None = None
    vocabulary: Vocabulary | None = None
    recipe: dict | None = None
    base: int | None = None

    def describe(self) -> dict:
        """In JSON's terms."""
        return {
            "scale": self.scale,
            "labels": self.labels and list(self.labels),
            "vocabulary": self.vocabulary and self.vocabulary.characters,
            "recipe": self.recipe,
        } | ({} if self.base is None else {"base": self.base})

    @classmethod
    def read(cls, found: Any, where: str) -> "Meaning":
        """From what `describe` gave; UsageError, which begins with `where`, for anything else."""
        try:
            scale, labels, characters, recipe = (found[name] for name in ("scale", "labels", "vocabulary", "recipe"))
            fits = isinstance(scale, int | float) and math.isfinite(scale) and scale != 0
            fits &= labels is None or (isinstance(labels, list) and all(isinstance(each, str) for each in labels))
            fits &= recipe is None or isinstance(recipe, dict)
            fits &= characters is None or isinstance(characters, str | list)
            base = found.get("base")  # older versions had none
            fits &= base is None or (type(base) is int and base in (0, 1))
        except (TypeError, LookupError, AttributeError):
            fits = False
        if not fits:
            raise UsageError(f"{where} should say scale, labels, vocabulary and recipe of its data")
        vocabulary = None if characters is None else Vocabulary(characters)
        return cls(float(scale), None if labels is None else tuple(labels), vocabulary, recipe, base)

    def names(self, classes: int) -> list[str]:
        """The names of so many classes."""
        if self.vocabulary is not None:
            return [self.vocabulary.decode([token]) for token in range(classes)]
        return [str(number) for number in range(classes)] if self.labels is None else list(self.labels)

    @property
    def outputs(self) -> list[str]:
        """The names of the columns that are predicted; none where they are not known."""
        named = (self.recipe or {}).get("label")
        return [str(each) for each in named] if isinstance(named, list) else []

    def refuse_other_words(self, other: "Meaning", name: str) -> None:
        """UsageError where the rows of other data, called `name`, are not of the same words or columns as these."""
        mine, theirs = (each.vocabulary and each.vocabulary.characters for each in (self, other))
        if mine != theirs:
            said = "no vocabulary" if theirs is None else f"a vocabulary of {len(other.vocabulary or ())} tokens"
            own = "none" if mine is None else f"another one, of {len(self.vocabulary or ())}"
            raise UsageError(f"{name} has {said}, and the model was trained on {own}")
        if self.recipe and other.recipe and self.recipe.get("columns") != other.recipe.get("columns"):
            raise UsageError(
                f"{name} was not made from its table as the training data were from theirs ({unlike(self, other)}): "
                "make it by prepare-data with --like the training data, or let predict read the table itself"
            )

    def numbers_of(self, other: "Meaning", classes: int, theirs: int, name: str) -> np.ndarray | None:
        """The class numbers here of classes 0, 1, ... of other data, called `name`, by their names; None: the same.

        classes, theirs: how many there are here and there. UsageError where one of those has no number here.
        """
        mine, names = self.names(classes), other.names(theirs)
        number = {each: k for k, each in enumerate(mine)}
        if strange := [each for each in names if each not in number]:
            lists = few(strange), few(mine)
            raise UsageError(f"{name} has the class {lists[0]}, which the model does not know; it knows {lists[1]}")
        numbers = np.array([number[each] for each in names], np.int64)
        return None if np.array_equal(numbers, np.arange(theirs)) else numbers


def few(names: Sequence[str]) -> str:
    """The first of these names, in quotes, and how many there are besides."""
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(repr(printable(each, kept="")) for each in names[:MOST_SHOWN]) + more


def unlike(a: Meaning, b: Meaning) -> str:
    """The first column that is another one in two recipes, for people."""
    columns = [[_shown(column) for column in (each.recipe or {}).get("columns") or []] for each in (a, b)]
    for mine, theirs in zip(*columns, strict=False):
        if mine != theirs:
            return f"{theirs} instead of {mine}"
    return f"{len(columns[1])} columns instead of {len(columns[0])}"


def _shown(column: Any) -> str:
    if not isinstance(column, dict):
        return repr(column)
    values = column.get("values")
    kind = "a number" if values is None else f"{len(values)} texts"
    filled = "" if column.get("fill") is None else f", filled with {column['fill']:g}"
    return f"{printable(column.get('name'), kept='')!r} ({kind}{filled})"
