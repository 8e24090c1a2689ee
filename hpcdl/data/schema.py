"""The schema of a data set: scale, class names, vocabulary, and how a table became numbers.

    scale        the model sees x * scale
    labels       names of the classes 0, 1, ...; None: a class is named by its number
    vocabulary   text only: what tokens stand for (hpcdl/data/formats/vocabulary.py)
    token_bytes  text only: bytes of the source per token, by group, for bits per byte; None: unknown
    recipe       table only: its columns and their encoding (hpcdl/data/formats/recipe.py)
    base         sparse rows only: the index, 0 or 1, of the first feature in libsvm's text

Data files store the schema in attributes; checkpoints store it to read new rows alike and to name predicted classes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.data.formats.vocabulary import Vocabulary, vocabulary_from
from hpcdl.errors import UsageError, printable

MOST_SHOWN = 5  # names that a message lists


@dataclass(frozen=True)
class Schema:
    """The schema of a data set (fields: see the head of this file); a field is None if it does not apply."""

    scale: float = 1.0
    labels: tuple[str, ...] | None = None
    vocabulary: Vocabulary | None = None
    recipe: dict | None = None
    base: int | None = None
    token_bytes: dict[str, float] | None = None

    def describe(self) -> dict:
        """Return the schema as a JSON object."""
        return {
            "scale": self.scale,
            "labels": self.labels and list(self.labels),
            "vocabulary": self.vocabulary and self.vocabulary.description,
            "recipe": self.recipe,
        } | {name: value for name in ("base", "token_bytes") if (value := getattr(self, name)) is not None}

    @classmethod
    def read(cls, value: Any, where: str) -> "Schema":
        """Return the schema that `describe` gave; UsageError, which begins with `where`, for other values."""
        try:
            scale, labels, characters, recipe = (value[name] for name in ("scale", "labels", "vocabulary", "recipe"))
            fits = isinstance(scale, int | float) and math.isfinite(scale) and scale != 0
            fits &= labels is None or (isinstance(labels, list) and all(isinstance(each, str) for each in labels))
            fits &= recipe is None or isinstance(recipe, dict)
            fits &= characters is None or isinstance(characters, str | list | dict)
            base, token_bytes = value.get("base"), value.get("token_bytes")  # older versions had none
            fits &= token_bytes is None or all(math.isfinite(each) and each > 0 for each in token_bytes.values())
            fits &= base is None or (type(base) is int and base in (0, 1))
        except (TypeError, LookupError, AttributeError):
            fits = False
        if not fits:
            raise UsageError(f"{where} should have valid values of scale, labels, vocabulary and recipe")
        vocabulary = None if characters is None else vocabulary_from(characters)
        named = None if labels is None else tuple(labels)
        return cls(float(scale), named, vocabulary, recipe, base, token_bytes)

    def names(self, classes: int) -> list[str]:
        """Return the names of all classes, of which there are `classes`."""
        if self.vocabulary is not None:
            return [self.vocabulary.decode([token]) for token in range(classes)]
        return [str(number) for number in range(classes)] if self.labels is None else list(self.labels)

    @property
    def outputs(self) -> list[str]:
        """Names of the predicted columns; empty if unknown."""
        named = (self.recipe or {}).get("label")
        return [str(each) for each in named] if isinstance(named, list) else []

    def output_names(self, outputs: tuple[int, ...]) -> list[str]:
        """Return the names of the outputs, whose shape is given; without names: numbers, or "" for a single output."""
        count = math.prod(outputs)
        named = self.outputs if len(self.outputs) == count else []
        return named or ([""] if count == 1 else [str(number) for number in range(count)])

    def refuse_other_columns(self, other: "Schema", name: str) -> None:
        """Raise UsageError if other data, called `name`, have another vocabulary or other columns."""
        mine, theirs = (each.vocabulary and each.vocabulary.description for each in (self, other))
        if mine != theirs:
            their_words = "no vocabulary" if theirs is None else f"a vocabulary of {len(other.vocabulary or ())} tokens"
            my_words = "none" if mine is None else f"another vocabulary, of {len(self.vocabulary or ())} tokens"
            raise UsageError(f"{name} has {their_words}, but the model was trained with {my_words}")
        if self.recipe and other.recipe and self.recipe.get("columns") != other.recipe.get("columns"):
            problem = f"has other columns than the training data ({first_difference(self, other)})"
            todo = "make it by prepare-data --like TRAIN.h5 (the training data), or let predict read the table itself"
            raise UsageError(f"{name} {problem}: {todo}")

    def class_numbers(self, other: "Schema", classes: int, theirs: int, name: str) -> np.ndarray | None:
        """Return this schema's numbers of the `theirs` classes of `name`; None: equal. UsageError: unknown class."""
        if self.vocabulary is not None:  # `refuse_other_columns` compares them; tokens may have no text of their own
            return None
        mine, names = self.names(classes), other.names(theirs)
        number = {each: k for k, each in enumerate(mine)}
        if strange := [each for each in names if each not in number]:
            lists = name_list(strange), name_list(mine)
            raise UsageError(f"{name} has the class {lists[0]}, which the model does not know; it knows {lists[1]}")
        numbers = np.array([number[each] for each in names], np.int64)
        return None if np.array_equal(numbers, np.arange(theirs)) else numbers


def name_list(names: Sequence[str], most: int = MOST_SHOWN, plain: bool = False) -> str:
    """Return the first `most` names, in quotes or plain, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(each if plain else repr(printable(each, allowed="")) for each in names[:most]) + more


def first_difference(a: Schema, b: Schema) -> str:
    """Return a text about the first column in which two recipes differ, for a message."""
    columns = [[_describe_column(column) for column in (each.recipe or {}).get("columns") or []] for each in (a, b)]
    for mine, theirs in zip(*columns, strict=False):
        if mine != theirs:
            return f"{theirs} instead of {mine}"
    return f"{len(columns[1])} columns instead of {len(columns[0])}"


def _describe_column(column: Any) -> str:
    if not isinstance(column, dict):
        return repr(column)
    values = column.get("values")
    kind = "a number" if values is None else f"{len(values)} texts"
    filled = "" if column.get("fill") is None else f", filled with {column['fill']:g}"
    return f"{printable(column.get('name'), allowed='')!r} ({kind}{filled})"
