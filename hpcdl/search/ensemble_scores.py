"""Predictions and scores of an ensemble, and scores of each member; for scores, ranks communicate sums only.

disagreement      mean share of member pairs whose likeliest classes differ for a row
spread            per row: standard deviation over members of the likeliest class's probability, or of the value"""

from typing import Any, BinaryIO

import numpy as np
from mpi4py import MPI
from rich.table import Table

from hpcdl.comm import Communicator
from hpcdl.comm.progress import inside
from hpcdl.data.batch import PredictionRows, RowBlock
from hpcdl.data.standard import TARGET
from hpcdl.errors import printable
from hpcdl.inference.evaluation_report import number_text, report
from hpcdl.inference.predictions import COUNTS, PredictionFormat, deliver, output
from hpcdl.models.scores import ClassMeasures, ValueMeasures, predicted_classes
from hpcdl.runs.evaluation import add_up, scores
from hpcdl.search.combining import disagreement
from hpcdl.search.ensemble import Ensemble, EnsemblePrediction, scored

LISTED = ("accuracy", "loss", "calibration_error", "rmse", "rmse_standardized")  # columns of the table of members
MOST_OUTPUTS = 4  # outputs with a column each


class SpreadFormat(PredictionFormat):
    """Format of a prediction file with the spread over members; with `every`, also the spread of each class."""

    def header(self) -> list[str]:
        if self.trained.classes:
            return [*super().header(), "spread", *[f"spread({name})" for name in self.names] * self.every]
        several = len(self.outputs) > 1
        return [*super().header(), *[f"spread {name}" if several else "spread" for name in self.outputs]]

    def columns(self, block: RowBlock, outputs: EnsemblePrediction) -> list[Any]:
        spread, columns = outputs.spread, super().columns(block, outputs.outputs)
        if not self.trained.classes:
            return columns + [self.texts(each) for each in spread.reshape(len(block.numbers), -1).T]
        best = predicted_classes(outputs.outputs, self.trained.threshold)
        columns.append(self.texts(spread[np.arange(len(best)), best]))
        return columns + ([self.texts(each) for each in spread.T] if self.every else [])

    def arrays(self, block: RowBlock, outputs: EnsemblePrediction) -> dict[str, np.ndarray]:
        return super().arrays(block, outputs.outputs) | {"spread": outputs.spread}


def sums_of(ensemble: Ensemble, outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return [sum of losses, correct predictions or sum of squared errors, rows], as in runs/evaluation.py."""
    about = ensemble.reference
    if about.classes:
        return np.array([*scored(outputs, y, about.threshold), len(y)])
    scale = about.statistics.get(TARGET[1], np.ones(1))  # one standard deviation of the standardized target, per output
    error = float(np.square((outputs.astype(np.float64) - y) / (scale if about.outputs else scale[0])).sum())
    return np.array([error / 2, error, len(y)])


def predict_all(
    world: MPI.Intracomm,
    ensemble: Ensemble,
    rows: dict[Any, PredictionRows],
    file: str = "",
    every: bool = False,
    stream: BinaryIO | None = None,
    around: np.ndarray | None = None,
) -> dict[str, Any]:
    """Predict all rows; collective. Returns by name, on all ranks: row counts (COUNTS), `sums` (as of `sums_of`),
    `measures`, `disagreement`, `spread` and `members`, which has each member's sums and calibration error. file, every,
    stream: as in inference/predictions.py. around: centre of ValueMeasures (values only); None: 0."""
    about, labelled = ensemble.reference, next(iter(rows.values())).labelled
    comm = Communicator(world, "tree")
    outs = about.outputs[0] if about.outputs else 1

    def new_measures(curves: bool = False) -> Any:
        if about.classes:
            return ClassMeasures(about.classes, about.threshold, curves)
        return ValueMeasures(about.output_names, 0.0 if around is None else around)

    measures, local_measures = new_measures(labelled), [new_measures() for _ in ensemble.local_members]
    counts, sums = np.zeros(len(COUNTS), np.int64), np.zeros(3)
    diversity = np.zeros(3)  # [rows, disagreements, spreads]
    members = np.zeros((len(ensemble.members), 4 + (outs if outs > 1 else 0)))
    writer_format = SpreadFormat(about, next(iter(rows.values())), every)
    with output(world, writer_format, file, stream) as out:
        packed, number, more = b"", 0, True
        for block, outputs, combined in ensemble.combined_blocks(comm, rows):
            number += 1
            if labelled and block.y is not None and len(block.y):
                for each, measure, prediction in zip(ensemble.local_members, local_measures, outputs, strict=True):
                    members[each.place, :3] += sums_of(ensemble, prediction, block.y)
                    measure.add(block.y, prediction)
            if combined is not None:
                counts += block.counts
                if labelled and block.y is not None and len(block.y):
                    measures.add(block.y, combined.outputs)
                    sums += sums_of(ensemble, combined.outputs, block.y)
                diversity += diversity_sums(combined)
                packed = b"" if out is None else out.pack(block, combined)
            if out is not None and number % world.size == 0:
                more, packed = deliver(world, packed, out), b""
                if not more:
                    break
        if out is not None and more and number % world.size:
            deliver(world, packed, out)
        if out is not None and world.rank == 0:
            out.close()
    for each, measure in zip(ensemble.local_members, local_measures, strict=True):
        if about.classes:
            members[each.place, 3] = measure.scores()["calibration_error"]
        elif outs > 1:
            members[each.place, 4:] = measure.results()["rmse"]
    with inside("add up the predictions"):
        for array in (counts, sums, diversity, members):
            world.Allreduce(MPI.IN_PLACE, array)
    add_up(world, measures)
    comm.free()
    results = {"sums": sums, "measures": measures, "members": members}
    results |= {"disagreement": diversity[1] / max(1.0, diversity[0]), "spread": diversity[2] / max(1.0, diversity[0])}
    return dict(zip(COUNTS, counts.tolist(), strict=True)) | results


def diversity_sums(combined: EnsemblePrediction) -> list[float]:
    """Return [rows, sum of disagreements, sum of spreads] of a block's rows."""
    rows, spread = len(combined.outputs), combined.spread
    if combined.counts is None:
        return [rows, 0.0, float(spread.reshape(rows, -1).mean(axis=1).sum()) if rows else 0.0]
    best = combined.outputs.argmax(axis=1)
    return [rows, disagreement(combined.counts), float(spread[np.arange(rows), best].sum())]


def evaluation_of(ensemble: Ensemble, rows: PredictionRows, split: str, counts: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation for JSON: fields of a run's evaluation, `members`, `spread`; for classes `disagreement`."""
    about = ensemble.reference
    evaluation = report(about, rows, split, counts, counts["measures"])
    evaluation |= {"run": str(ensemble.folder), "combine": ensemble.combine, "spread": counts["spread"]}
    for of_a_run in ("step", "model"):
        evaluation.pop(of_a_run)
    if about.classes:
        evaluation["disagreement"] = counts["disagreement"]
    evaluation["members"] = [
        {"number": each.number, "run": each.run, "differs": each.differs, "scores": member_scores(about, row)}
        for each, row in zip(ensemble.members, counts["members"].tolist(), strict=True)
    ]
    return evaluation


def member_scores(about: Any, row: list[float]) -> dict[str, float]:
    loss, score, rows, calibration, *each = row
    rows = max(1.0, rows)
    if about.classes:
        return {"loss": loss / rows, "accuracy": score / rows, "calibration_error": calibration}
    total = scores(np.array([loss, score, rows]), 0, about.outputs, about.unit).named("all")
    found = {name.removeprefix("all_"): value for name, value in total.items()}
    return found | dict(zip((f"rmse_{name}" for name in about.output_names), each, strict=False))


def table(evaluation: dict[str, Any]) -> Table:
    """Return a table with a row for each member, one for the members' mean, and one for the ensemble."""
    there = evaluation["members"][0]["scores"]
    columns = [name for name in LISTED if name in there] + [name for name in there if name not in LISTED][:MOST_OUTPUTS]
    grid = Table(title=f"{evaluation['split']} part, {evaluation['rows']:,} rows", title_justify="left")
    for name in ("member", "differs by"):
        grid.add_column(name)
    for name in columns:
        grid.add_column(printable(name.replace("_", " "), allowed=""), justify="right")
    members = [each["scores"] for each in evaluation["members"]]
    for each, own in zip(evaluation["members"], members, strict=True):
        cells = [number_text(own[name]) for name in columns]
        grid.add_row(str(each["number"]), printable(each["differs"], allowed=""), *cells)
    grid.add_section()
    means = (float(np.mean([each[name] for each in members])) for name in columns)
    grid.add_row("mean", "of the members", *map(number_text, means))
    grid.add_row("all", evaluation["combine"], *(number_text(evaluation["scores"].get(name)) for name in columns))
    return grid
