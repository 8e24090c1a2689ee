"""From tables: csv, tsv, Parquet, Arrow; one row per example, and columns of numbers and texts.

    features   numbers as they are; of texts one feature each (one-hot)      what is nothing else, or --columns
    labels     one column of numbers or texts; several of values to predict  --label
    group      says whose each row is: owners are numbered in sorted order   --group
    id         says which row a row is: kept as it is                        --id

The table is read once (table_survey.py); what is done with its columns is kept in the file as its recipe (recipe.py),
and done again with other tables by `like`. Where values are missing, the rows are left out, or numbers become the mean
or the median of their column over the training rows, and texts zeros; numbers are marked then (hpcdl/data/fills.py).
"""

import json
import tempfile
from collections.abc import Iterator

import numpy as np

from hpcdl.data.fills import FILLED, marks
from hpcdl.data.format import FilePath, Info, shown, slabs
from hpcdl.data.formats.prepare import Groups, Output, parts
from hpcdl.data.formats.recipe import MISSING, Recipe
from hpcdl.data.formats.table_job import Again, New, TableJob, known_of
from hpcdl.data.formats.table_rows import encode
from hpcdl.data.formats.table_source import open_table
from hpcdl.data.formats.table_survey import Survey
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
    one_hot: int = 64,
    missing: str | None = None,
    regression: bool = False,
    like: FilePath | None = None,
    no_label: bool = False,
    test_fraction: float | None = None,
    seed: int = 0,
) -> Info:
    """From a table, one row per example. Columns are named, or numbered from 0 (-1: the last); several with commas.

    label: default -1. id, group: columns that are no features. columns: only these are features; drop: these are not;
    text: these hold texts, whatever they look like. header: whether the first line holds names (None: as it looks).
    one_hot: texts that a column may have. missing: one of MISSING. regression: labels are values to predict. like: a
    data file whose recipe is to be done again, with the classes that it has; no_label: on rows to be predicted, which
    then are the one group of the file.
    """
    known = None if like is None else known_of(like)
    source = open_table(path, delimiter if known is None or delimiter is not None else known[0].delimiter)
    named = {"label": label, "id": id, "group": group, "columns": columns, "drop": drop, "text": text}
    job: TableJob
    if like is None or known is None:
        if no_label:
            raise UsageError("--no-label needs --like TRAIN.h5: the data file whose model is to predict")
        if missing not in (None, *MISSING):
            raise UsageError(f"missing values can be treated by {', '.join(MISSING)}, not {shown(missing)}")
        job = New(source, {what: each for what, each in named.items() if each is not None}, header, missing, one_hot)
    else:
        given = [f"--{what}" for what in ("label", "columns", "drop", "text") if named[what] is not None]
        given += ["--missing"] * (missing is not None) + ["--regression"] * regression
        given += ["--scale"] * (output.scale is not None) + ["--test-fraction"] * (
            no_label and test_fraction is not None
        )
        if given:
            raise UsageError(f"--like{' and --no-label' * no_label} already says what {given[0]} would: leave it out")
        job = Again(source, like, *known, id, group, header, not no_label)
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
        y, names, classes = job.labels(survey, regression)
        if y is None:
            rows = {"rows": np.arange(len(raw))}
        else:
            rows = parts(y, classes, 0.2 if test_fraction is None else test_fraction, seed)
        recipe = job.recipe(survey, raw, rows.get("train"))
        kind, scale = job.kind(survey, recipe)
        groups: Groups = {}
        for which, chosen in rows.items():
            others = {"row": survey.rows[chosen]} | ({} if survey.ids is None else {"id": survey.ids[chosen]})
            if job.plan.group is not None:
                others["group"] = np.unique(survey.values(job.plan.group), return_inverse=True)[1][chosen]
            if recipe.missing in ("mean", "median") and any(column.values is None for column in recipe.columns):
                others[FILLED] = marks(raw, chosen, recipe)
            x = _encoded(raw, chosen, recipe, job.order(survey), kind)
            groups[which] = (len(chosen), len(recipe.features)), x, None if y is None else y[chosen], others
        output.said += job.said(survey, recipe, names)
        return output.write(groups, kind, scale, names, classes, table=json.dumps(recipe.describe()))


def _encoded(raw: np.ndarray, rows: np.ndarray, recipe: Recipe, order: dict, kind: np.dtype) -> Iterator[np.ndarray]:
    """Features of these rows, slab by slab. order: of the texts of a column, by their codes, their places."""
    for slab in slabs(len(rows), 8 * max(len(recipe.features), raw.shape[1])):
        part = np.array(raw[rows[slab]])
        for at, places in order.items():
            some = ~np.isnan(part[:, at])
            part[some, at] = places[part[some, at].astype(np.int64)]
        yield encode(part, recipe)[0].astype(kind, copy=False)
