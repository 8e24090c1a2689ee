"""The report of an evaluation, as a dictionary for JSON and as tables."""

from typing import Any

from rich.table import Table

from hpcdl.data.batch import PredictionRows
from hpcdl.errors import printable
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.metric_lines import PAIR, VALUE_SCORES
from hpcdl.models.scores import ClassMeasures, ValueMeasures
from hpcdl.runs.evaluation import scores, text_scores

SCHEMA_VERSION = 1
MOST_LISTED = 40  # classes in the table of classes, the worst ones
MOST_CROSSED = 16  # classes in the confusion matrix
FIRST = ("loss", "accuracy", "calibration_error")  # of classes, in the first line
TOTALS = ("loss", "rmse", "rmse_standardized")  # scores of all outputs together
TABLED = (*PAIR, *(f"macro_{name}" for name in PAIR))  # scores that stand in the table of classes


def report(
    trained: TrainedModel,
    rows: PredictionRows,
    split: str,
    counts: dict[str, Any],
    measures: ClassMeasures | ValueMeasures,
) -> dict:
    """Return the report as a JSON object. split: of the data. counts: of `predict_all` with losses=True."""
    results, about = measures.results(), trained.about
    plain = scores(counts["sums"], trained.classes, trained.outputs, trained.unit)
    named: dict[str, Any] = {key.removeprefix("all_"): value for key, value in plain.named("all").items()}
    header = {"schema_version": SCHEMA_VERSION, "run": trained.name, "step": about["step"], "model": about["model"]}
    header |= {"data": rows.name, "split": split, "rows": counts["rows"], "scores": named}
    if trained.classes:
        found, text = results.pop("scores"), trained.schema.vocabulary is not None
        if trained.threshold is not None:
            header["threshold"], named["accuracy"] = trained.threshold, found["accuracy"]
        if "calibration_error" in found:
            named["calibration_error"] = found["calibration_error"]
        named |= text_scores(plain.loss, rows.schema, rows.group)
        named |= {} if text else {score: value for score, value in found.items() if score not in named}
        names = trained.schema.names(trained.classes)
        keys = ("rows", *PAIR)
        columns = zip(results.pop("rows_per_class"), *(results.pop(key) for key in PAIR), strict=True)
        header["text"] = text
        header["classes"] = [
            {"name": of} | dict(zip(keys, each, strict=True)) for of, each in zip(names, columns, strict=True)
        ]
        for curve in results["curves"]:
            curve["class"] = names[curve["class"]]
        return header | results
    keys = ("name", *VALUE_SCORES)
    outputs = [dict(zip(keys, each, strict=True)) for each in zip(trained.output_names, *results.values(), strict=True)]
    named |= {name: value for name, value in measures.scores().items() if name not in named}
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
        means = {name: report["scores"].get(f"macro_{name}") for name in PAIR}
        macro = {"name": "macro", "rows": report["rows"]} | means
        tables.append(record_table(["class", "rows", *PAIR], listed, title, macro))
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
        tables.append(record_table(["output", *VALUE_SCORES], report["outputs"]))
    return tables


def as_lines(report: dict) -> list[str]:
    """Return the scores of a report as lines of text, those of the training first; others stand in the table."""
    scores = report["scores"]
    if "outputs" not in report:
        first, more = FIRST, [name for name in scores if name not in (*FIRST, *TABLED)]
    elif len(report["outputs"]) == 1:
        first, more = tuple(scores), []
    else:
        first, more = TOTALS, []
    lines = ([name for name in names if name in scores] for names in (first, more))
    return ["  ".join(f"{report['split']}_{name} {scores[name]:.6g}" for name in line) for line in lines if line]


def record_table(headings: list[str], rows: list[dict], title: str = "", last: dict | None = None) -> Table:
    """Return a table of records, their first entry a name; last: a row below a line."""
    table = Table(title=title or None, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in [*rows, *([] if last is None else [last])]:
        if row is last:
            table.add_section()
        name, *values = row.values()
        table.add_row(printable(name, allowed=""), *map(number_text, values))
    return table


def number_text(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
