"""Preparation of tables (csv, tsv, Parquet, Arrow): one row per example, columns of numbers and texts.

    features   numbers as they are; texts one-hot, hashed, or as means       all other columns, or --columns
    labels     one column of numbers or texts; several columns of targets    --label
    group      the owner of each row, numbered in sorted order               --group
    id         the name of each row, stored as it is                         --id

The file stores the encoding of its columns as a recipe (recipe.py), which `like` applies to other tables. Missing
numbers become the median or mean of the column over the training rows (marked: hpcdl/data/fills.py), and missing texts
zeros; or such rows are left out, or refused."""

import json
import os
import tempfile
from collections.abc import Iterator

import numpy as np

from hpcdl.data.fills import FILLED, marks
from hpcdl.data.format import Info
from hpcdl.data.formats.prepare import Groups, Output, split_by_group
from hpcdl.data.formats.recipe import MISSING, Recipe
from hpcdl.data.formats.table_job import NewTableJob, RepeatedTableJob, TableJob, recipe_and_info
from hpcdl.data.formats.table_rows import encode
from hpcdl.data.formats.table_source import Source
from hpcdl.data.formats.table_survey import Survey
from hpcdl.data.hdf5 import FilePath, shown, slabs
from hpcdl.errors import UsageError


def prepare_table(
    path: FilePath,
    output: Output,
    *,
    label: str | None = None,
    id: str | None = None,
    group: str | None = None,
    columns: str | None = None,
    drop: str | None = None,
    text: str | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    decimal: str | None = None,
    one_hot: int = 64,
    categories: str | None = None,
    dates: str | None = None,
    missing: str | None = None,
    regression: bool = False,
    like: FilePath | None = None,
    no_label: bool = False,
    test_fraction: float | None = None,
    seed: int = 0,
) -> Info:
    """Make a data file of a table. Columns are given by name or number from 0 (-1: the last), several with commas.
    label: default -1. id, group: columns that are no features. columns: the only features; drop: columns that are no
    features; text: columns of texts, even if these look like numbers. header: True if the first line holds names; None:
    detect. one_hot: most texts of a column that get a feature each. categories: of more texts: "one-hot" (they are
    refused), "target" (means of the label) or "hash:N", by default hash:64. dates: "parts" (the default), "drop", or
    the format of times. missing: one of MISSING; by default the median, if values are missing. regression: labels are
    targets. like: a data file whose recipe and classes are used. no_label: the file gets only rows to predict. Raises
    UsageError."""
    known = None if like is None else recipe_and_info(like)
    if known is not None:
        delimiter, decimal = delimiter or known[0].delimiter, decimal or known[0].decimal
    source = Source(path, delimiter, decimal, len(os.sched_getaffinity(0)))
    named = {"label": label, "id": id, "group": group, "columns": columns, "drop": drop, "text": text}
    job: TableJob
    if like is None or known is None:
        if no_label:
            raise UsageError("--no-label needs --like TRAIN.h5, the data file that the model was trained on")
        if missing not in (None, *MISSING):
            raise UsageError(f"missing values can be treated by {', '.join(MISSING)}, not {shown(missing)}")
        columns_of = {what: each for what, each in named.items() if each is not None}
        job = NewTableJob(source, columns_of, header, missing, one_hot, categories or "hash:64", dates or "parts", seed)
    else:
        given = [f"--{what}" for what in ("label", "columns", "drop", "text") if named[what] is not None]
        later = {"--missing": missing, "--categories": categories, "--dates": dates}
        given += [option for option, value in later.items() if value is not None] + ["--regression"] * regression
        given += ["--scale"] * (output.scale is not None)
        given += ["--test-fraction"] * (no_label and test_fraction is not None)
        if given:
            what = f"--like{' and --no-label' * no_label}"
            raise UsageError(f"{what} already says what {given[0]} would say: leave {given[0]} out")
        job = RepeatedTableJob(source, like, *known, id, group, header, not no_label)
    with output.blamed():
        spool_file = tempfile.TemporaryFile(dir=output.path.parent)  # noqa: SIM115 - closed below
    with spool_file as spool:

        def keep(raw: np.ndarray) -> None:
            with output.blamed():  # a full disk is not the table's fault
                spool.write(raw.tobytes())
                spool.flush()

        survey = Survey(source, job.plan, keep)
        job.check(survey)
        raw = np.memmap(spool, np.float64, "r", shape=(len(survey.rows), len(job.plan.features)))
        y, names, classes = labels = job.labels(survey, regression)
        rows = {"rows": np.arange(len(raw))} if y is None else split_by_group(y, classes, test_fraction, seed)
        recipe = job.recipe(survey, raw, rows.get("train"), labels)
        kind, scale = job.kind(survey, recipe)
        groups: Groups = {}
        for which, chosen in rows.items():
            others = {"row": survey.rows[chosen]} | ({} if survey.ids is None else {"id": survey.ids[chosen]})
            if job.plan.group is not None:
                others["group"] = np.unique(survey.values(job.plan.group), return_inverse=True)[1][chosen]
            if recipe.missing in ("mean", "median") and any(column.values is None for column in recipe.columns):
                others[FILLED] = marks(raw, chosen, recipe)
            x = _encoded(raw, chosen, recipe, job.order(survey), kind, job.fitted if which == "train" else {})
            groups[which] = (len(chosen), len(recipe.features)), x, None if y is None else y[chosen], others
        output.summary += job.summary(survey, recipe, names)
        return output.write(groups, kind, scale, names, classes, table=json.dumps(recipe.describe()))


def _encoded(
    raw: np.ndarray, rows: np.ndarray, recipe: Recipe, order: dict, kind: np.dtype, fitted: dict[int, np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the features of these rows slab by slab. order: for each column of texts, the sorted place of each code.
    fitted: by place, features of these rows that have been computed."""
    for slab in slabs(len(rows), 8 * max(len(recipe.features), raw.shape[1])):
        part = np.array(raw[rows[slab]])
        for at, places in order.items():
            some = ~np.isnan(part[:, at])
            part[some, at] = places[part[some, at].astype(np.int64)]
        x = encode(part, recipe)[0]
        for place, values in fitted.items():
            x[:, place : place + values.shape[1]] = values[slab]
        yield x.astype(kind, copy=False)
