"""The encoding of a table: by a new recipe, or by the recipe of another data file.

NewTableJob        column types are detected; the encoding becomes a recipe
RepeatedTableJob   a data file gives the recipe and the names of the classes
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from hpcdl.data.fills import means, medians
from hpcdl.data.format import Info, find_data_file, read_info
from hpcdl.data.formats.prepare import class_numbers, storage_type
from hpcdl.data.formats.recipe import Column, Recipe, recipe_in
from hpcdl.data.formats.table_names import check_names, column_of, columns_of, has_header
from hpcdl.data.formats.table_source import CsvSource, Source, fixed_coder, is_number
from hpcdl.data.formats.table_survey import NUMBER_PATTERNS, Survey, SurveyPlan
from hpcdl.data.hdf5 import FilePath, short, slabs
from hpcdl.errors import UsageError
from hpcdl.formatting import counted

MANY_CLASSES = 30  # classes named by numbers, from which on --regression is suggested


class TableJob:
    """The encoding of a table. like: the data file with the recipe; unseen_texts: number of texts that it lacks."""

    plan: SurveyPlan
    like: FilePath = ""
    unseen_texts = 0

    def __init__(self, source: Source):
        self.source = source

    def check(self, survey: Survey) -> None:
        """Raise UsageError for missing values that are not allowed."""
        for what, columns in (("label", self.plan.labels), ("group", [self.plan.group])):
            for column in columns:
                if column in survey.missing and not self.plan.drop:
                    count, where = survey.missing[column]
                    out = "of the table" if self.like else "by --missing drop"
                    raise UsageError(
                        f"{self.source.cell(where, column)}: a row has an empty {what} (or a text that says so, "
                        f"as NA), {count} of them in all; fill them in, or leave such rows out {out}"
                    )
        if not len(survey.rows):
            raise UsageError(f"{self.source.path}: each row lacks a value, so that none is left; see --drop")

    def order(self, survey: Survey) -> dict[int, np.ndarray]:
        """Return, by place of a text column among the features, the place of each text code."""
        return {}

    def summary(self, survey: Survey, recipe: Recipe, names: list | None) -> list[str]:
        """Return phrases about the encoding, for the message at its end."""
        summary = [f"{len(recipe.features)} features from {counted(len(recipe.columns), 'column')}"]
        texts = [f"{short(each.name)} ({len(each.values)})" for each in recipe.columns if each.values is not None]
        if texts:
            summary.append(f"one-hot {short(', '.join(texts), 200)}")
        if survey.dropped:
            summary.append(f"{counted(survey.dropped, 'row')} with missing values left out")
        elif recipe.missing != "drop":
            lost = {column: survey.missing.get(column, (0,))[0] for column in self.plan.features}
            numbers = sum(count for column, count in lost.items() if column in survey.numbers)
            if numbers:
                summary.append(f"{counted(numbers, 'missing number')} became the {recipe.missing}")
            if rest := sum(lost.values()) - numbers:
                summary.append(f"{counted(rest, 'missing text')} became zeros")
        if self.unseen_texts:
            summary.append(
                f"{counted(self.unseen_texts, 'text')} that {short(str(self.like), 200)} does not have became zeros"
            )
        if names:
            summary.append(f"classes {short(', '.join(names), 200)}")
            if len(names) > MANY_CLASSES and all(map(is_number, names)):
                summary.append("if these are values to predict, and no classes: --regression")
        return summary

    def labels(self, survey: Survey, regression: bool) -> tuple[np.ndarray | None, list | None, int]:
        """Return labels, names of the classes, number of classes."""
        raise NotImplementedError

    def recipe(self, survey: Survey, raw: np.ndarray, train: np.ndarray | None) -> Recipe:
        """Return the recipe of the encoding. train: rows of `raw` that are for training."""
        raise NotImplementedError

    def kind(self, survey: Survey, recipe: Recipe) -> tuple[np.dtype, float]:
        """Return the type of x and its scale. Bytes with fills or one-hot features are no pixels: their scale is 1."""
        low, high, whole = survey.low, survey.high, survey.whole
        columns = zip(self.plan.features, recipe.columns, strict=True)
        fills = [each.fill for at, each in columns if at in survey.missing and each.fill is not None]
        for fill in fills:
            low, high, whole = min(low, fill), max(high, fill), whole and fill.is_integer()
        kind, scale = storage_type(low, high, whole, np.dtype(np.float64))
        return kind, 1.0 if fills or any(each.values is not None for each in recipe.columns) else scale


class NewTableJob(TableJob):
    """A table with detected column types."""

    def __init__(self, source: Source, named: dict[str, str], header: bool | None, missing: str | None, one_hot: int):
        super().__init__(source)
        self.missing = missing or "refuse"
        if one_hot < 1:
            raise UsageError(f"--one-hot is the number of texts that a column may have, 1 or more, not {one_hot}")
        if source.width < 2:
            delimiter = f" (delimiter {source.delimiter!r})" if isinstance(source, CsvSource) else ""
            raise UsageError(f"{source.path} has {source.width} columns{delimiter}; it needs 2 or more")
        named = {"label": "-1"} | named
        if isinstance(source, CsvSource) and has_header(source, named, header):
            source.take_header()
        found = {what: columns_of(source, each, what) for what, each in named.items()}
        one = {what: column_of(source, named[what], what) if what in named else None for what in ("group", "id")}
        labels, apart = found["label"], [*found.get("id", []), *found.get("group", [])]
        others, dropped = {*labels, *apart}, set(found.get("drop", []))
        features = [each for each in range(source.width) if each not in others | dropped]
        if "columns" in found:
            features = sorted(set(found["columns"]) - dropped)
        if len(others) < len(labels) + len(apart) or not features or others & {*features, *dropped}:
            raise UsageError(
                f"{source.path}: the label, the group and the features are columns of their own, as is an id"
            )
        if lost := set(found.get("text", [])) - set(features):
            raise UsageError(f"{source.path}: {source.column_label(min(lost))} is no feature, so --text is not for it")
        check_names(source, [*features, *labels, *found.get("id", [])], features)
        source.hint = "correct it, take all as texts by --text {}, or leave the column out by --drop {}"
        as_texts = tuple(found.get("text", []))
        self.plan = SurveyPlan(
            features, labels, one["group"], one["id"], as_texts=as_texts, one_hot=one_hot, drop=missing == "drop"
        )

    def check(self, survey: Survey) -> None:
        """Check features for missing values, too; the message names three remedies."""
        super().check(survey)
        lost = {column: survey.missing[column] for column in self.plan.features if column in survey.missing}
        if lost and self.missing == "refuse":
            said = [
                f"{count} in {self.source.column_label(at)} (the first in {where})"
                for at, (count, where) in lost.items()
            ]
            names = ",".join(self.source.names[column] for column in lost)
            raise UsageError(
                f"{self.source.path}: values are missing: {short(', '.join(said), 400)}; --missing mean or median "
                f"fills them in, --missing drop leaves the rows out, --drop {short(names, 200)} the columns"
            )
        if survey.undecided:
            column = min(survey.undecided)
            name = short(self.source.names[column])
            raise UsageError(
                f"{self.source.path}: {self.source.column_label(column)} has no value at all; --drop {name}"
            )

    def labels(self, survey: Survey, regression: bool) -> tuple[np.ndarray | None, list | None, int]:
        """Return labels by their type; several columns are targets."""
        found = [survey.values(column) for column in self.plan.labels]
        if len(found) == 1:
            (y,), names, classes = class_numbers(self.source.path, found, regression)
            return y, names, classes
        return _values(self.source, self.plan.labels, found), None, 0

    def order(self, survey: Survey) -> dict[int, np.ndarray]:
        """Return the places of the sorted texts."""
        order = {}
        for at, column in enumerate(self.plan.features):
            if column in survey.codes:
                order[at] = np.argsort(np.argsort(np.array(list(survey.codes[column]), object), kind="stable"))
        return order

    def recipe(self, survey: Survey, raw: np.ndarray, train: np.ndarray | None) -> Recipe:
        """Return the recipe; missing numbers become the mean or median of the training rows."""
        source, plan = self.source, self.plan
        fills: dict[int, float] = {}
        if self.missing in ("mean", "median") and survey.numbers:
            if train is None:
                raise UsageError(
                    f"--missing {self.missing} is that of the training rows, and --test-fraction 1 has none"
                )
            places = [at for at, column in enumerate(plan.features) if column in survey.numbers]

            def known() -> Iterator[np.ndarray]:
                return (raw[train[slab]][:, places] for slab in slabs(len(train), 8 * raw.shape[1]))

            found = means(known(), len(places)) if self.missing == "mean" else medians(known, len(places), len(train))
            for at, fill in zip(places, found, strict=True):
                column = plan.features[at]
                if not np.isfinite(fill):
                    what = (
                        "infinite"
                        if np.isinf(fill)
                        else f"unknown: no training row has a value; --drop {source.names[column]}"
                    )
                    raise UsageError(
                        f"{source.path}: {source.column_label(column)}: the {self.missing} is {short(what, 200)}"
                    )
                fills[column] = float(fill)
        columns = tuple(
            Column(
                source.names[column],
                column,
                tuple(sorted(survey.codes[column])) if column in survey.codes else None,
                fills.get(column),
            )
            for column in plan.features
        )
        return Recipe(
            columns,
            tuple(source.names[column] for column in plan.labels),
            None if plan.id is None else source.names[plan.id],
            self.missing,
            source.header,
            source.delimiter,
        )


class RepeatedTableJob(TableJob):
    """A table encoded by the recipe of a data file."""

    def __init__(
        self,
        source: Source,
        like: FilePath,
        known: Recipe,
        info: Info,
        id: str | None,
        group: str | None,
        header: bool | None,
        labelled: bool,
    ):
        """like: the data file; known, info: of `recipe_and_info`."""
        super().__init__(source)
        names = info.schema.labels
        self.like, self.info, self.names = like, info, None if names is None else list(names)
        if header is not None:
            known = dataclasses.replace(known, header=header)
        if known.header and isinstance(source, CsvSource):
            source.take_header()
        source.hint = f"{short(str(like), 200)} has numbers in column {{}}"
        self.known, by_name = known, known.header
        features = [self._find(each.name, each.number) for each in known.columns]
        if labelled and not known.label:
            raise UsageError(f"--like {like} names no column of labels: add --no-label")
        labels = [self._find(each, None) for each in known.label] if labelled else []
        if id is not None:
            known = self.known = dataclasses.replace(known, id=source.names[column_of(source, id, "id")])
        place = -1 if known.id is None else source.recipe_column(known.id, None, by_name)
        owner = None if group is None else column_of(source, group, "group")
        used = [*features, *labels, *([] if place < 0 else [place]), *([] if owner is None else [owner])]
        if len(set(used)) < len(used):
            raise UsageError(
                f"{source.path}: the label, the group and the features are columns of their own, as is an id"
            )
        texts = {
            at: fixed_coder({text: code for code, text in enumerate(column.values)})
            for at, column in zip(features, known.columns, strict=True)
            if column.values is not None
        }
        self.plan = SurveyPlan(
            features, labels, owner, None if place < 0 else place, texts, drop=known.missing == "drop"
        )

    def _find(self, name: str, number: int | None) -> int:
        found = self.source.recipe_column(name, number, self.known.header)
        if found < 0:
            raise self.source.missing_column(
                name if self.known.header or number is None else str(number), self.known.header
            )
        return found

    def check(self, survey: Survey) -> None:
        """Check features for missing values that the recipe refuses, too."""
        super().check(survey)
        for column in self.plan.features:
            if column in survey.missing and self.known.missing == "refuse":
                count, where = survey.missing[column]
                raise UsageError(
                    f"{self.source.cell(where, column)}: a value is missing, {count} in the column, and "
                    f"{short(str(self.like), 200)} refuses that; fill it in, or make both with another --missing"
                )

    def labels(self, survey: Survey, regression: bool) -> tuple[np.ndarray | None, list | None, int]:
        """Return labels by the names of the known classes."""
        classes = self.info.classes
        if not self.plan.labels:
            return None, self.names, classes
        if not classes:
            found = [survey.values(column) for column in self.plan.labels]
            y = _values(self.source, self.plan.labels, found)
            return (y[:, 0] if len(found) == 1 else y), None, 0
        (column,) = self.plan.labels
        known = {name: number for number, name in enumerate(self.names or map(str, range(classes)))}
        numbers = {}
        for text in survey.codes[column]:
            plain = str(int(text)) if NUMBER_PATTERNS[int].fullmatch(text) and len(text) < 20 else text
            numbers[text] = known.get(text, known.get(plain, -1))
        if lost := [text for text, number in numbers.items() if number < 0]:
            said = f"{short(str(self.like), 200)} has no such class: {short(', '.join(map(repr, sorted(lost))), 200)}"
            raise UsageError(f"{self.source.path}: {said}; it has {short(', '.join(known), 200)}")
        return np.array(list(numbers.values()))[survey.label_codes(column)], self.names, classes

    def recipe(self, survey: Survey, raw: np.ndarray, train: np.ndarray | None) -> Recipe:
        """Return the known recipe with this table's delimiter; count unseen texts."""
        for slab in slabs(len(raw), raw.shape[1] * 8):
            for at, column in enumerate(self.known.columns):
                if column.values is not None:
                    self.unseen_texts += int((raw[slab, at] < 0).sum())
        return dataclasses.replace(self.known, delimiter=self.source.delimiter, like=True)

    def kind(self, survey: Survey, recipe: Recipe) -> tuple[np.dtype, float]:
        """Return the type of x and the scale of the data file, which the model was trained with."""
        return super().kind(survey, recipe)[0], self.info.scale


def recipe_and_info(like: FilePath) -> tuple[Recipe, Info]:
    """Return the recipe and the structure of a data file that was made from a table."""
    info = read_info(find_data_file(str(like)))
    recipe = recipe_in(info)
    if recipe is None:
        raise UsageError(f"--like {like}: it was not made from a table; prepare-data csv and table make such files")
    if info.classes and len(recipe.label) > 1:
        raise UsageError(f"--like {like}: its recipe has {len(recipe.label)} columns of labels, and they are classes")
    return recipe, info


def _values(source: Source, columns: list[int], found: list[np.ndarray]) -> np.ndarray:
    """Return targets (rows, outputs) of several columns."""
    for column, values in zip(columns, found, strict=True):
        if values.dtype.kind not in "iuf":
            raise UsageError(
                f"{source.path}: {source.column_label(column)} has texts; values to predict must be numbers"
            )
    return np.stack([values.astype(np.float64) for values in found], axis=1)
