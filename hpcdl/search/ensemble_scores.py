"""Scores and predictions of an ensemble: of each member, and of all together.

    accuracy, log loss, calibration error (classes) or rmse (values)     of each member, and of the ensemble
    disagreement      mean share of member pairs whose likeliest classes differ for a row
    spread            per row: standard deviation over members of the likeliest class's probability, or of the value

Each rank scores its own members from all of their predictions; for the ensemble each rank scores the blocks that it
combines (ensemble.py). At the end only sums are communicated.
"""

from typing import Any, BinaryIO

import numpy as np
from mpi4py import MPI
from rich.table import Table

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.data.batch import RowBlock
from hpcdl.data.standard import TARGET
from hpcdl.errors import printable
from hpcdl.inference.evaluation_report import number_text, report
from hpcdl.inference.prediction_input import PredictionRows
from hpcdl.inference.predictions import COUNTS, PredictionFormat, deliver, output
from hpcdl.inference.scores import ClassMeasures, ValueMeasures
from hpcdl.search.combining import disagreement
from hpcdl.search.ensemble import Ensemble, EnsemblePrediction, calibration_error, scored

LISTED = ("accuracy", "loss", "calibration_error", "rmse")  # columns of the table of members


class SpreadFormat(PredictionFormat):
    """Prediction file with the standard deviation over members; for every class if all probabilities are written."""

    def header(self) -> list[str]:
        """Return the names of the columns."""
        if self.trained.classes:
            return [*super().header(), "spread", *[f"spread({name})" for name in self.names] * self.every]
        several = len(self.outputs) > 1
        return [*super().header(), *[f"spread {name}" if several else "spread" for name in self.outputs]]

    def columns(self, block: RowBlock, outputs: EnsemblePrediction) -> list[Any]:
        """Return the csv columns of a block."""
        spread, columns = outputs.spread, super().columns(block, outputs.outputs)
        if not self.trained.classes:
            return columns + [self.texts(each) for each in spread.reshape(len(block.numbers), -1).T]
        best = outputs.outputs.argmax(axis=1)
        columns.append(self.texts(spread[np.arange(len(best)), best]))
        return columns + ([self.texts(each) for each in spread.T] if self.every else [])

    def arrays(self, block: RowBlock, outputs: EnsemblePrediction) -> dict[str, np.ndarray]:
        """Return the npz arrays of a block."""
        return super().arrays(block, outputs.outputs) | {"spread": outputs.spread}


def target_scale(ensemble: Ensemble) -> Any:
    """Return the size of one standard deviation of the standardized target, per output."""
    scale = ensemble.reference.statistics.get(TARGET[1], np.ones(1))
    return scale if ensemble.reference.outputs else scale[0]


def sums_of(ensemble: Ensemble, outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return [losses, correct predictions or squared errors, rows], as runs/evaluation.py defines them."""
    if ensemble.reference.classes:
        return np.array([*scored(outputs, y), len(y)])
    error = float(np.square((outputs.astype(np.float64) - y) / target_scale(ensemble)).sum())
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
    """Predict all rows; collective. Returns, on all ranks, counts of rows, `sums`, `measures`, `members` (per member
    [losses, correct predictions or squared errors, rows, calibration error]), `disagreement`, `spread`.

    file, every, stream: as in inference/predictions.py. around: for values, the centre of ValueMeasures.
    """
    about, labelled = ensemble.reference, next(iter(rows.values())).labelled
    comm = Communicator(world, "tree")
    outs = about.outputs[0] if about.outputs else 1

    def new_measures() -> Any:
        if about.classes:
            return ClassMeasures(about.classes)
        return ValueMeasures(outs, np.zeros(outs) if around is None else around)

    measures, local_measures = new_measures(), [new_measures() for _ in ensemble.local_members]
    counts, sums, diversity = (
        np.zeros(len(COUNTS), np.int64),
        np.zeros(3),
        np.zeros(3),
    )  # [rows, disagreements, spreads]
    members = np.zeros((len(ensemble.members), 4))
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
                counts += [len(block.x), block.dropped, block.filled, block.unseen]
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
        members[each.place, 3] = calibration_error(measure) if about.classes else 0.0
    with activity.inside("add up the predictions"):
        for array in (counts, sums, diversity, members, *measures.sums):
            world.Allreduce(MPI.IN_PLACE, array)
    comm.free()
    results = {"sums": sums, "measures": measures, "members": members}
    results |= {"disagreement": diversity[1] / max(1.0, diversity[0]), "spread": diversity[2] / max(1.0, diversity[0])}
    return dict(zip(COUNTS, counts.tolist(), strict=True)) | results


def diversity_sums(combined: EnsemblePrediction) -> list[float]:
    """Return [rows, sum of disagreements, sum of spreads]."""
    rows, spread = len(combined.outputs), combined.spread
    if combined.counts is None:
        return [rows, 0.0, float(spread.reshape(rows, -1).mean(axis=1).sum()) if rows else 0.0]
    best = combined.outputs.argmax(axis=1)
    return [rows, disagreement(combined.counts), float(spread[np.arange(rows), best].sum())]


def evaluation_of(ensemble: Ensemble, name: str, split: str, counts: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation for JSON: a run's fields, and `members`, `disagreement` (classes only) and `spread`."""
    about = ensemble.reference
    evaluation = report(about, name, split, counts, counts["measures"])
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
    """Return the scores of a member by name."""
    loss, score, rows, calibration = row
    rows = max(1.0, rows)
    if about.classes:
        return {"loss": loss / rows, "accuracy": score / rows, "calibration_error": calibration}
    outputs = about.outputs[0] if about.outputs else 1
    return {"loss": loss / rows, "rmse": about.unit * float(np.sqrt(score / rows / outputs))}


def table(evaluation: dict[str, Any]) -> Table:
    """Return a table with a row per member, their mean, and the ensemble."""
    columns = [name for name in LISTED if name in evaluation["members"][0]["scores"]]
    grid = Table(title=f"{evaluation['split']} part, {evaluation['rows']:,} rows", title_justify="left")
    for name in ("member", "differs by"):
        grid.add_column(name)
    for name in columns:
        grid.add_column(name.replace("_", " "), justify="right")
    members = [each["scores"] for each in evaluation["members"]]
    for each in evaluation["members"]:
        cells = [number_text(each["scores"][name]) for name in columns]
        grid.add_row(str(each["number"]), printable(each["differs"], allowed=""), *cells)
    grid.add_section()
    grid.add_row(
        "mean", "of the members", *(number_text(float(np.mean([each[name] for each in members]))) for name in columns)
    )
    grid.add_row("all", evaluation["combine"], *(number_text(evaluation["scores"].get(name)) for name in columns))
    return grid
