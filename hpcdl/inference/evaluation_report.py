"""What an evaluation has found: as one dictionary, for JSON, and as tables for people."""

from typing import Any

from rich.table import Table

from hpcdl.errors import printable
from hpcdl.inference.scores import ClassMeasures, ValueMeasures
from hpcdl.inference.trained_model import Trained
from hpcdl.runs.evaluation import scores

SCHEMA_VERSION = 1
MOST_LISTED = 40  # classes in the table of classes; the worst ones
MOST_CROSSED = 16  # classes in the confusion matrix


def report(
    trained: Trained, name: str, split: str, counts: dict[str, Any], measures: ClassMeasures | ValueMeasures
) -> dict:
    """Everything. counts: of rows, and `sums` as `scores` takes them."""
    found = measures.found()
    plain = scores(counts["sums"], trained.classes, trained.outputs, trained.unit)
    single: dict[str, Any] = plain.named("all")
    named = {key.removeprefix("all_"): value for key, value in single.items()}
    about = {
        "schema_version": SCHEMA_VERSION,
        "run": trained.name,
        "step": trained.about["step"],
        "model": trained.about["model"],
        "data": name,
        "split": split,
        "rows": counts["rows"],
        "scores": named,
    }
    if trained.classes:
        found.pop("accuracy")
        names = trained.schema.names(trained.classes)
        named["calibration_error"] = found.pop("expected_calibration_error")
        rows, precision, recall = (found.pop(key) for key in ("rows_per_class", "precision", "recall"))
        columns = zip(names, rows, precision, recall, strict=True)
        keys = ("name", "rows", "precision", "recall")
        about["text"] = trained.schema.vocabulary is not None
        return about | {"classes": [dict(zip(keys, each, strict=True)) for each in columns]} | found
    names = trained.output_names
    keys = ("name", "rmse", "mae", "r2")
    outputs = [dict(zip(keys, each, strict=True)) for each in zip(names, *found.values(), strict=True)]
    if len(outputs) == 1:
        named |= {key: outputs[0][key] for key in ("mae", "r2") if outputs[0][key] is not None}
    return about | {"outputs": outputs}


def as_tables(found: dict) -> list[Table]:
    """For people: a row for each class, and which class is taken for which; or a row for each of several outputs."""
    tables: list[Table] = []
    if found.get("text"):  # tokens are many, and each is a letter
        return tables
    if "classes" in found:
        listed = found["classes"]
        title = ""
        if len(listed) > MOST_LISTED:
            listed = sorted(listed, key=lambda each: each["recall"] if each["recall"] is not None else 2)[:MOST_LISTED]
            title = f"the {MOST_LISTED} classes of {len(found['classes'])} with the lowest recall"
        tables.append(filled(["class", "rows", "precision", "recall"], listed, title))
        if found["confusion"] is not None and len(found["classes"]) <= MOST_CROSSED:
            names = [each["name"] for each in found["classes"]]
            title = "rows by class (down) and what they are taken for (across)"
            table = Table(title=title, title_justify="left", min_width=len(title))
            table.add_column("")
            for name in names:
                table.add_column(printable(name, allowed=""), justify="right")
            for name, counts in zip(names, found["confusion"], strict=True):
                table.add_row(printable(name, allowed=""), *(str(each) if each else "." for each in counts))
            tables.append(table)
    elif len(found["outputs"]) > 1:
        tables.append(filled(["output", "rmse", "mae", "r2"], found["outputs"]))
    return tables


def filled(headings: list[str], rows: list[dict], title: str = "") -> Table:
    """A table of records whose first entry is a name."""
    table = Table(title=title or None, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        name, *values = row.values()
        table.add_row(printable(name, allowed=""), *map(shown, values))
    return table


def shown(value: Any) -> str:
    """A number, or nothing, in a cell."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
