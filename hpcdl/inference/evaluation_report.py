"""The report of an evaluation, as a dictionary for JSON and as tables."""

from typing import Any

from rich.table import Table

from hpcdl.errors import printable
from hpcdl.inference.scores import ClassMeasures, ValueMeasures
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.runs.evaluation import scores

SCHEMA_VERSION = 1
MOST_LISTED = 40  # classes in the table of classes, the worst ones
MOST_CROSSED = 16  # classes in the confusion matrix


def report(
    trained: TrainedModel, name: str, split: str, counts: dict[str, Any], measures: ClassMeasures | ValueMeasures
) -> dict:
    """Return the report as a JSON object. name, split: of the data. counts: of `predict_all` with losses=True."""
    results, about = measures.results(), trained.about
    plain = scores(counts["sums"], trained.classes, trained.outputs, trained.unit)
    named: dict[str, Any] = {key.removeprefix("all_"): value for key, value in plain.named("all").items()}
    header = {"schema_version": SCHEMA_VERSION, "run": trained.name, "step": about["step"], "model": about["model"]}
    header |= {"data": name, "split": split, "rows": counts["rows"], "scores": named}
    if trained.classes:
        results.pop("accuracy")
        names = trained.schema.names(trained.classes)
        named["calibration_error"] = results.pop("expected_calibration_error")
        rows, precision, recall = (results.pop(key) for key in ("rows_per_class", "precision", "recall"))
        columns = zip(names, rows, precision, recall, strict=True)
        keys = ("name", "rows", "precision", "recall")
        header["text"] = trained.schema.vocabulary is not None
        return header | {"classes": [dict(zip(keys, each, strict=True)) for each in columns]} | results
    names = trained.output_names
    keys = ("name", "rmse", "mae", "r2")
    outputs = [dict(zip(keys, each, strict=True)) for each in zip(names, *results.values(), strict=True)]
    if len(outputs) == 1:
        named |= {key: outputs[0][key] for key in ("mae", "r2") if outputs[0][key] is not None}
    return header | {"outputs": outputs}


def as_tables(report: dict) -> list[Table]:
    """Return the tables of a report: of classes (measures, confusion matrix) or several outputs; a text has none."""
    tables: list[Table] = []
    if report.get("text"):  # a table of tokens would be long
        return tables
    if "classes" in report:
        listed = report["classes"]
        title = ""
        if len(listed) > MOST_LISTED:
            listed = sorted(listed, key=lambda each: each["recall"] if each["recall"] is not None else 2)[:MOST_LISTED]
            title = f"the {MOST_LISTED} classes of {len(report['classes'])} with the lowest recall"
        tables.append(record_table(["class", "rows", "precision", "recall"], listed, title))
        if report["confusion"] is not None and len(report["classes"]) <= MOST_CROSSED:
            names = [each["name"] for each in report["classes"]]
            title = "rows by class (down) and what they are taken for (across)"
            table = Table(title=title, title_justify="left", min_width=len(title))
            table.add_column("")
            for name in names:
                table.add_column(printable(name, allowed=""), justify="right")
            for name, counts in zip(names, report["confusion"], strict=True):
                table.add_row(printable(name, allowed=""), *(str(each) if each else "." for each in counts))
            tables.append(table)
    elif len(report["outputs"]) > 1:
        tables.append(record_table(["output", "rmse", "mae", "r2"], report["outputs"]))
    return tables


def record_table(headings: list[str], rows: list[dict], title: str = "") -> Table:
    table = Table(title=title or None, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        name, *values = row.values()
        table.add_row(printable(name, allowed=""), *map(number_text, values))
    return table


def number_text(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
