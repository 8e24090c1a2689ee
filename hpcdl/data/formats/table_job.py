"""The encoding of a table: by a new recipe, or by the recipe of another data file."""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from hpcdl.data.fills import averages
from hpcdl.data.format import Info, find_data_file, read_info
from hpcdl.data.formats.prepare import class_numbers, storage_type
from hpcdl.data.formats.recipe import PARTS, Column, Recipe, buckets, recipe_in
from hpcdl.data.formats.table_names import check_names, column_of, columns_of, has_header
from hpcdl.data.formats.table_rows import known_codes, recipe_column
from hpcdl.data.formats.table_source import ABSENT, Source, is_index, is_number, name_in_shell
from hpcdl.data.formats.table_survey import NUMBER_PATTERNS, Survey, SurveyPlan
from hpcdl.data.formats.target_encoding import cross_fitted, targets_of, text_means
from hpcdl.data.hdf5 import FilePath, short, shown, slabs
from hpcdl.errors import UsageError
from hpcdl.formatting import counted

OWN_COLUMNS = "label, id, group and features must be different columns, outside --drop, with at least one feature"
Labels: TypeAlias = tuple[np.ndarray | None, list | None, int]
MOST_NAMED = 10  # columns that a message names with the line of their first missing value
MANY_CLASSES = 30  # classes named by numbers, from which on --regression is suggested


class TableJob:
    """A table's encoding. like: data file with the recipe; "": none. unseen_texts: cells whose text `like` lacks."""

    plan: SurveyPlan
    like: FilePath = ""
    unseen_texts = 0
    left_out: Sequence[str] = ()  # columns that are no features, and why

    def __init__(self, source: Source):
        self.source = source
        self.fitted: dict[int, np.ndarray] = {}  # by place: features of training rows that are no other rows' (rows, k)

    def check(self, survey: Survey) -> None:
        """Raise UsageError for missing values that are not allowed."""
        if self.plan.group in survey.missing and not self.plan.drop:
            count, row = survey.missing[self.plan.group]
            out = "of the table" if self.like else "by --missing drop"
            empty = f"the group is missing (empty, or a text as NA), in {counted(count, 'row')} altogether"
            todo = f"fill it in, or leave such rows out {out}"
            raise UsageError(f"{self.source.cell(self.source.where(row), self.plan.group)}: {empty}; {todo}")
        if not len(survey.rows):
            raise UsageError(f"{self.source.path}: each row lacks a value, so no row is left; --drop such columns")

    def order(self, survey: Survey) -> dict[int, np.ndarray]:
        """Return for each column of texts (index in plan.features) the rank of each code among the sorted texts."""
        return {}

    def summary(self, survey: Survey, recipe: Recipe, names: list | None) -> list[str]:
        """Return phrases about the encoding, for the message at the end."""
        columns = {each.number for each in recipe.columns}
        summary = [f"{len(recipe.features)} features from {counted(len(columns), 'column')}"]
        texts: dict[str, list[str]] = {"one-hot": [], "hashed": [], "means of the label by": []}
        for each in recipe.columns:
            if each.values is not None:
                how = 2 if each.of else int(each.hashed)
                list(texts.values())[how].append(f"{short(each.name)} ({len(each.values)})")
        summary += [f"{how} {short(', '.join(some), 200)}" for how, some in texts.items() if some]
        if times := [each.name for each in recipe.columns if each.part == "year"]:
            summary.append(f"times {short(', '.join(times), 200)}")
        if self.left_out:
            summary.append(f"left out {short(', '.join(self.left_out), 400)}")
        if survey.unlabelled:
            summary.append(f"{counted(survey.unlabelled, 'row')} without a label left out")
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
            unseen = f"{counted(self.unseen_texts, 'text')} that {short(str(self.like), 200)} does not have"
            summary.append(f"{unseen} became zeros")
        if names:
            summary.append(f"classes {short(', '.join(names), 200)}")
            if len(names) > MANY_CLASSES and all(map(is_number, names)):
                summary.append("if the labels are values to predict, not classes: --regression")
        return summary

    def labels(self, survey: Survey, regression: bool) -> Labels:
        """Return (labels or None, names of the classes or None, number of classes, 0 for targets)."""
        raise NotImplementedError

    def recipe(self, survey: Survey, raw: np.ndarray, train: np.ndarray | None, labels: Labels) -> Recipe:
        """Return the recipe of the encoding. train: numbers of the rows of `raw` to train on; None: no such rows.
        labels: what `labels` returned."""
        raise NotImplementedError

    def kind(self, survey: Survey, recipe: Recipe) -> tuple[np.dtype, float]:
        """Return the type of x and its scale. Bytes with fills or one-hot features are no pixels: their scale is 1."""
        low, high, whole = survey.low, survey.high, survey.whole
        columns = zip(self.plan.features, recipe.columns, strict=True)
        fills = [each.fill for at, each in columns if at in survey.missing and each.fill is not None]
        for fill in fills:
            low, high, whole = min(low, fill), max(high, fill), whole and fill.is_integer()
        whole = whole and not any(each.of for each in recipe.columns)
        kind, scale = storage_type(low, high, whole, np.dtype(np.float64))
        return kind, 1.0 if fills or any(each.values is not None for each in recipe.columns) else scale


class NewTableJob(TableJob):
    """A table whose column types are detected; the encoding becomes a recipe."""

    def __init__(
        self,
        source: Source,
        named: dict[str, str],
        header: bool | None,
        missing: str | None,
        one_hot: int,
        categories: str,
        dates: str,
        seed: int,
    ):
        super().__init__(source)
        self.missing, self.seed = missing, seed
        if one_hot < 1:
            raise UsageError(f"--one-hot, the number of texts that a column may have, must be 1 or more, not {one_hot}")
        how, _, count = categories.partition(":")
        if categories not in ("one-hot", "target") and not (how == "hash" and 1 < _whole(count) <= 10**6):
            raise UsageError(f"--categories is one-hot, target or hash:N, with N from 2 on, not {shown(categories)}")
        self.made: dict[int, Column] = {}  # recipes of columns, by number, that are known before the survey
        self.as_means: list[int] = []  # columns of texts that become means of the labels
        self.left_out: list[str] = []
        if source.width < 2:
            delimiter = f" (delimiter {source.delimiter!r})" if source.csv else ""
            raise UsageError(f"{source.path} has {source.width} columns{delimiter}; it needs 2 or more")
        named = {"label": "-1"} | named
        if source.csv and has_header(source, named, header):
            source.take_header()
        found = {what: columns_of(source, each, what) for what, each in named.items()}
        one = {what: column_of(source, named[what], what) if what in named else None for what in ("group", "id")}
        labels, apart = found["label"], [*found.get("id", []), *found.get("group", [])]
        others, dropped = {*labels, *apart}, set(found.get("drop", []))
        features = [each for each in range(source.width) if each not in others | dropped]
        if "columns" in found:
            features = sorted(set(found["columns"]) - dropped)
        if len(others) < len(labels) + len(apart) or not features or others & {*features, *dropped}:
            raise UsageError(f"{source.path}: {OWN_COLUMNS}")
        if lost := set(found.get("text", [])) - set(features):
            raise UsageError(f"{source.path}: {source.column_label(min(lost))} of --text is no feature")
        check_names(source, [*features, *labels, *found.get("id", [])], features)
        source.hint = "correct it, read the column as texts by --text {}, or leave it out by --drop {}"
        texts = tuple(found.get("text", []))
        asked = {*texts, *found.get("columns", [])}
        for column in [each for each in features if source.rows and source.kind(each) is None]:
            if column in asked:
                todo = f"leave it out by --drop {name_in_shell(source.names[column])}"
                raise UsageError(f"{source.path}: {source.column_label(column)} has no value in any row; {todo}")
            features.remove(column)
            self.left_out.append(f"{short(source.names[column])} without a value")
        features = self._with_times([each for each in features if each not in texts], dates) + list(texts)
        features = self._with_few_texts(sorted(features), texts, asked, one_hot, categories)
        if not features:
            raise UsageError(f"{source.path} has no column left for features; left out: {'; '.join(self.left_out)}")
        hashed = {at: coder for at, made in self.made.items() if (coder := made.coder(ABSENT)) is not None}
        self.plan = SurveyPlan(features, labels, one["group"], one["id"], None, hashed, texts, missing == "drop")

    def _with_times(self, features: list[int], dates: str) -> list[int]:
        """Return the features with the parts of times in the place of columns of times."""
        source, result = self.source, list[int]()
        for column in features:
            formats: list[str] = []
            if source.kind(column) in ("text", "time"):
                own = source.time_formats(column, (dates,)) if dates not in ("parts", "drop") else []
                formats = own or source.time_formats(column)
            if not formats:
                result.append(column)
                continue
            name = name_in_shell(source.names[column])
            if dates == "drop":
                self.left_out.append(f"{short(source.names[column])} holds times (--dates drop)")
                continue
            if len(formats) > 1:
                said = " and ".join(map(repr, formats))
                raise UsageError(
                    f"{source.path}: {source.column_label(column)} holds times in the formats {said}; say which by "
                    f"--dates {shlex.quote(formats[0])}, or leave it out by --drop {name}"
                )
            first, several = source.times(column, formats[0])
            for part in PARTS:
                if part != "hour" or several:
                    at = source.derive(column, formats[0], part, first)
                    self.made[at] = Column(source.names[column], column, None, None, False, part, formats[0], first)
                    result.append(at)
        return result

    def _with_few_texts(
        self, features: list[int], as_texts: tuple[int, ...], asked: set[int], one_hot: int, categories: str
    ) -> list[int]:
        """Return the features without columns whose texts nearly all differ; decide what becomes of many texts.
        as_texts: columns of --text. asked: columns that are named by an option, and stay."""
        source, result = self.source, list[int]()
        different = source.distinct([each for each in features if each in as_texts or source.kind(each) == "text"])
        for column in features:
            texts_of, name = different.get(column, 0), source.names[column]
            if texts_of <= one_hot:
                result.append(column)
            elif 2 * texts_of > source.rows and column not in asked:
                keeps = f"--text {name_in_shell(name)} keeps it"
                self.left_out.append(f"{short(name)} with {counted(texts_of, 'different text')} ({keeps})")
            elif categories == "one-hot":
                raise UsageError(
                    f"{source.path}: {source.column_label(column)} has {texts_of} different texts, a feature each; "
                    f"leave it out by --drop {name_in_shell(name)}, allow more by --one-hot {texts_of}, or hash them "
                    "by --categories hash:64"
                )
            else:
                result.append(column)
                if categories == "target":
                    self.as_means.append(column)
                else:
                    self.made[column] = buckets(name, column, int(categories.removeprefix("hash:")))
        return result

    def check(self, survey: Survey) -> None:
        super().check(survey)
        lost = {
            self.made[column].number if column in self.made else column: survey.missing[column]
            for column in self.plan.features
            if column in survey.missing
        }
        if self.missing is None:
            self.missing = "median" if lost else "refuse"
        elif lost and self.missing == "refuse":
            of, names = self.source.column_label, name_in_shell(",".join(self.source.names[column] for column in lost))
            some = list(lost.items())[:MOST_NAMED]
            said = [f"{count} in {of(at)} (the first in {self.source.where(row)})" for at, (count, row) in some]
            raise UsageError(
                f"{self.source.path}: values are missing: {short(', '.join(said), 400)}; --missing mean or median "
                f"fills them in, --missing drop leaves the rows out, --drop {names} the columns"
            )

    def labels(self, survey: Survey, regression: bool) -> Labels:
        found = [survey.values(column) for column in self.plan.labels]
        if len(found) == 1:
            (y,), names, classes = class_numbers(self.source.path, found, regression)
            return y, names, classes
        return _values(self.source, self.plan.labels, found), None, 0

    def order(self, survey: Survey) -> dict[int, np.ndarray]:
        return {
            at: np.argsort(np.argsort(np.array(list(survey.codes[column]), object), kind="stable"))
            for at, column in enumerate(self.plan.features)
            if column in survey.codes
        }

    def recipe(self, survey: Survey, raw: np.ndarray, train: np.ndarray | None, labels: Labels) -> Recipe:
        source, plan = self.source, self.plan
        fills: dict[int, float] = {}
        if self.missing in ("mean", "median") and survey.numbers:
            if train is None:
                none = "needs training rows, of which --test-fraction 1 leaves none"
                raise UsageError(f"--missing {self.missing} {none}")
            places = [at for at, column in enumerate(plan.features) if column in survey.numbers]

            def known() -> Iterator[np.ndarray]:
                return (raw[train[slab]][:, places] for slab in slabs(len(train), 8 * raw.shape[1]))

            for at, fill in zip(places, averages(self.missing, known, len(places), len(train)), strict=True):
                column = plan.features[at]
                if not np.isfinite(fill):
                    what = f"unknown: no training row has a value; leave it out by --drop {source.names[column]}"
                    what = "infinite" if np.isinf(fill) else short(what, 200)
                    raise UsageError(f"{source.path}: {source.column_label(column)}: the {self.missing} is {what}")
                fills[column] = float(fill)
        texts = {column: tuple(sorted(codes)) for column, codes in survey.codes.items()}
        names, named = source.names, None if plan.id is None else source.names[plan.id]
        columns = tuple(
            dataclasses.replace(self.made[each], fill=fills.get(each))
            if each in self.made
            else Column(names[each], each, texts.get(each), fills.get(each))
            for each in plan.features
        )
        label = tuple(names[each] for each in plan.labels)
        columns = tuple(self._with_means(survey, raw, train, labels, columns))
        missing, decimal = self.missing or "refuse", source.decimal or "."
        return Recipe(columns, label, named, missing, source.header, source.delimiter, decimal)

    def _with_means(
        self, survey: Survey, raw: np.ndarray, train: np.ndarray | None, labels: Labels, columns: Sequence[Column]
    ) -> Iterator[Column]:
        """Yield the columns, those of `as_means` with their means; keep the encodings of the training rows."""
        y, names, classes = labels
        place, order = 0, self.order(survey)
        for at, column in enumerate(columns):
            if column.number in self.as_means and column.values is not None:
                if train is None or y is None:
                    raise UsageError("--categories target needs training rows, of which --test-fraction 1 leaves none")
                targets, count = targets_of(y[train], classes), len(column.values)
                codes = np.append(order[at], count)[known_codes(raw[train, at], count)]
                of = [str(each) for each in (names or range(classes))[classes == 2 :]] if classes else None
                of = of or [self.source.names[each] for each in self.plan.labels]
                means = tuple(map(tuple, text_means(codes, targets, count).tolist()))
                column = dataclasses.replace(column, of=tuple(of), means=means)
                self.fitted[place] = cross_fitted(codes, targets, count, self.seed)
            place += len(column.features)
            yield column


class RepeatedTableJob(TableJob):
    """A table encoded by the recipe of the data file `like`. known, info: what `recipe_and_info` returns for it."""

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
        super().__init__(source)
        names = info.schema.labels
        self.like, self.info, self.names = like, info, None if names is None else list(names)
        if header is not None:
            known = dataclasses.replace(known, header=header)
        if known.header:
            source.take_header()
        source.hint = f"{short(str(like), 200)} has numbers in column {{}}"
        self.known = known
        features = [recipe_column(source, each, known.header) for each in known.columns]
        if labelled and not known.label:
            raise UsageError(f"--like {like} has no column of labels: add --no-label")
        labels = [source.recipe_column(each, None, known.header) for each in known.label] if labelled else []
        if id is not None:
            known = self.known = dataclasses.replace(known, id=source.names[column_of(source, id, "id")])
        place = -1 if known.id is None else source.recipe_column(known.id, None, self.known.header, False)
        owner = None if group is None else column_of(source, group, "group")
        used = [*features, *labels, *([] if place < 0 else [place]), *([] if owner is None else [owner])]
        if len(set(used)) < len(used):
            raise UsageError(f"{source.path}: {OWN_COLUMNS}")
        columns = zip(features, known.columns, strict=True)
        texts = {at: coder for at, each in columns if (coder := each.coder(ABSENT)) is not None}
        named = None if place < 0 else place
        self.plan = SurveyPlan(features, labels, owner, named, texts, drop=known.missing == "drop")

    def check(self, survey: Survey) -> None:
        super().check(survey)
        for column in self.plan.features:
            if column in survey.missing and self.known.missing == "refuse":
                count, row = survey.missing[column]
                why = f"a value is missing ({count} in the column), which {short(str(self.like), 200)} refuses"
                todo = "fill it in, or make both files with another --missing"
                raise UsageError(f"{self.source.cell(self.source.where(row), column)}: {why}; {todo}")

    def labels(self, survey: Survey, regression: bool) -> Labels:
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
            said = f"does not have the class {short(', '.join(map(repr, sorted(lost))), 200)}"
            its = f"it has {short(', '.join(known), 200)}"
            raise UsageError(f"{self.source.path}: {short(str(self.like), 200)} {said}; {its}")
        return np.array(list(numbers.values()))[survey.label_codes(column)], self.names, classes

    def recipe(self, survey: Survey, raw: np.ndarray, train: np.ndarray | None, labels: Labels) -> Recipe:
        """Return the known recipe with this table's delimiter; count unseen texts."""
        texts = [at for at, column in enumerate(self.known.columns) if column.values is not None]
        self.unseen_texts += sum(int((raw[slab][:, texts] < 0).sum()) for slab in slabs(len(raw), raw.shape[1] * 8))
        return dataclasses.replace(
            self.known, delimiter=self.source.delimiter, decimal=self.source.decimal or ".", like=True
        )

    def kind(self, survey: Survey, recipe: Recipe) -> tuple[np.dtype, float]:
        """Return the type of x, and the scale of the data file `like`, which the model was trained with."""
        return super().kind(survey, recipe)[0], self.info.scale


def recipe_and_info(like: FilePath) -> tuple[Recipe, Info]:
    """Return the recipe and the structure of a data file that was made from a table. Raises UsageError."""
    info = read_info(find_data_file(str(like)))
    recipe = recipe_in(info)
    if recipe is None:
        raise UsageError(f"--like {like} was not made from a table; give a file that prepare-data csv or table made")
    if info.classes and len(recipe.label) > 1:
        count = len(recipe.label)
        raise UsageError(f"--like {like}: classes need one column of labels, but its recipe has {count} of them")
    return recipe, info


def _whole(text: str) -> int:
    return int(text) if is_index(text) and len(text) < 10 else 0


def _values(source: Source, columns: list[int], found: list[np.ndarray]) -> np.ndarray:
    """Return the values `found` in several columns as targets (rows, outputs); UsageError for texts."""
    for column, values in zip(columns, found, strict=True):
        if values.dtype.kind not in "iuf":
            where = f"{source.path}: {source.column_label(column)}"
            raise UsageError(f"{where} has texts; values to predict must be numbers")
    return np.stack([values.astype(np.float64) for values in found], axis=1)
