"""Scores and predictions of an ensemble: of each member, and of all together.

    accuracy, log loss, calibration error (classes) or rmse (values)     of each member, and of the whole
    disagreement      mean share of pairs of members that take a row for different classes
    spread            of a row: the deviation over members of the probability of its likeliest class, or of the value

Each rank has all that its own members predict, and scores them by itself; of the whole each rank scores the blocks that
it combines (ensemble.py). In the end sums travel.
"""

from typing import Any, BinaryIO

import numpy as np
from mpi4py import MPI
from rich.table import Table

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.data.standard import TARGET
from hpcdl.errors import printable
from hpcdl.inference.evaluation_report import report, shown
from hpcdl.inference.prediction_input import Block, NewRows
from hpcdl.inference.predictions import COUNTS, PredictionFormat, deliver, output
from hpcdl.inference.scores import ClassMeasures, ValueMeasures
from hpcdl.search.combining import disagreement
from hpcdl.search.ensemble import Combined, Ensemble, calibration_error, scored

LISTED = ("accuracy", "loss", "calibration_error", "rmse")  # columns of the table of members


class SpreadForm(PredictionFormat):
    """With the deviation over the members; of all classes where all their probabilities are written."""

    def header(self) -> list[str]:
        """The names of the columns."""
        if self.trained.classes:
            return [*super().header(), "spread", *[f"spread({name})" for name in self.names] * self.every]
        several = len(self.outputs) > 1
        return [*super().header(), *[f"spread {name}" if several else "spread" for name in self.outputs]]

    def columns(self, block: Block, outputs: Combined) -> list[Any]:
        """The columns of a csv for a block."""
        spread, found = outputs.spread, super().columns(block, outputs.outputs)
        if not self.trained.classes:
            return found + [self.texts(each) for each in spread.reshape(len(block.numbers), -1).T]
        best = outputs.outputs.argmax(axis=1)
        found.append(self.texts(spread[np.arange(len(best)), best]))
        return found + ([self.texts(each) for each in spread.T] if self.every else [])

    def arrays(self, block: Block, outputs: Combined) -> dict[str, np.ndarray]:
        """A block as the arrays of an npz."""
        return super().arrays(block, outputs.outputs) | {"spread": outputs.spread}


def unit(ensemble: Ensemble) -> Any:
    """What a difference of 1 between standardized values to predict means, for each output."""
    found = ensemble.about.statistics.get(TARGET[1], np.ones(1))
    return found if ensemble.about.outputs else found[0]


def sums_of(ensemble: Ensemble, outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[losses, right answers or squared errors, rows], as runs/evaluation.py has them."""
    if ensemble.about.classes:
        return np.array([*scored(outputs, y), len(y)])
    error = float(np.square((outputs.astype(np.float64) - y) / unit(ensemble)).sum())
    return np.array([error / 2, error, len(y)])


def predict_all(
    world: MPI.Intracomm,
    ensemble: Ensemble,
    rows: dict[Any, NewRows],
    file: str = "",
    every: bool = False,
    stream: BinaryIO | None = None,
    around: np.ndarray | None = None,
) -> dict[str, Any]:
    """Predict all rows; collective. Returns on all ranks the counts of rows, and `sums`, `measures`, `members` (a row
    for each of [losses, right answers or squared errors, rows, calibration error]), `disagreement`, `spread`.

    file, every, stream: as in inference/predictions.py. around: of values, where ValueMeasures counts from.
    """
    about, labelled = ensemble.about, next(iter(rows.values())).labelled
    comm = Communicator(world, "tree")
    outs = about.outputs[0] if about.outputs else 1

    def measuring() -> Any:
        if about.classes:
            return ClassMeasures(about.classes)
        return ValueMeasures(outs, np.zeros(outs) if around is None else around)

    measures, own = measuring(), [measuring() for _ in ensemble.own]
    counts, sums, apart = np.zeros(len(COUNTS), np.int64), np.zeros(3), np.zeros(3)  # apart: rows, differ, spread
    members = np.zeros((len(ensemble.members), 4))
    form = SpreadForm(about, next(iter(rows.values())), every)
    with output(world, form, file, stream) as out:
        packed, number, more = b"", 0, True
        for block, outputs, found in ensemble.together(comm, rows):
            number += 1
            if labelled and block.y is not None and len(block.y):
                for each, mine, one in zip(ensemble.own, own, outputs, strict=True):
                    members[each.place, :3] += sums_of(ensemble, one, block.y)
                    mine.add(block.y, one)
            if found is not None:
                counts += [len(block.x), block.dropped, block.filled, block.unseen]
                if labelled and block.y is not None and len(block.y):
                    measures.add(block.y, found.outputs)
                    sums += sums_of(ensemble, found.outputs, block.y)
                apart += told_apart(found)
                packed = b"" if out is None else out.pack(block, found)
            if out is not None and number % world.size == 0:
                more, packed = deliver(world, packed, out), b""
                if not more:
                    break
        if out is not None and more and number % world.size:
            deliver(world, packed, out)
        if out is not None and world.rank == 0:
            out.close()
    for each, mine in zip(ensemble.own, own, strict=True):
        members[each.place, 3] = calibration_error(mine) if about.classes else 0.0
    with activity.inside("add up the predictions"):
        for array in (counts, sums, apart, members, *measures.sums):
            world.Allreduce(MPI.IN_PLACE, array)
    comm.free()
    found_all = {"sums": sums, "measures": measures, "members": members}
    found_all |= {"disagreement": apart[1] / max(1.0, apart[0]), "spread": apart[2] / max(1.0, apart[0])}
    return dict(zip(COUNTS, counts.tolist(), strict=True)) | found_all


def told_apart(found: Combined) -> list[float]:
    """[rows, the sum of their disagreements, the sum of their spreads]."""
    rows, spread = len(found.outputs), found.spread
    if found.counts is None:
        return [rows, 0.0, float(spread.reshape(rows, -1).mean(axis=1).sum()) if rows else 0.0]
    best = found.outputs.argmax(axis=1)
    return [rows, disagreement(found.counts), float(spread[np.arange(rows), best].sum())]


def reported(ensemble: Ensemble, name: str, split: str, counts: dict[str, Any]) -> dict[str, Any]:
    """All that an evaluation finds, for JSON: as of a run, and `members`, `disagreement` (of classes) and `spread`."""
    about = ensemble.about
    found = report(about, name, split, counts, counts["measures"])
    found |= {"run": str(ensemble.folder), "combine": ensemble.combine, "spread": counts["spread"]}
    for of_a_run in ("step", "model"):
        found.pop(of_a_run)
    if about.classes:
        found["disagreement"] = counts["disagreement"]
    found["members"] = [
        {"number": each.number, "run": each.run, "differs": each.differs, "scores": named(about, row)}
        for each, row in zip(ensemble.members, counts["members"].tolist(), strict=True)
    ]
    return found


def named(about: Any, row: list[float]) -> dict[str, float]:
    """The scores of a member."""
    loss, score, rows, calibration = row
    rows = max(1.0, rows)
    if about.classes:
        return {"loss": loss / rows, "accuracy": score / rows, "calibration_error": calibration}
    outputs = about.outputs[0] if about.outputs else 1
    return {"loss": loss / rows, "rmse": about.unit * float(np.sqrt(score / rows / outputs))}


def table(found: dict[str, Any]) -> Table:
    """A row for each member, their mean, and all together."""
    columns = [name for name in LISTED if name in found["members"][0]["scores"]]
    made = Table(title=f"{found['split']} part, {found['rows']:,} rows", title_justify="left")
    for name in ("member", "differs by"):
        made.add_column(name)
    for name in columns:
        made.add_column(name.replace("_", " "), justify="right")
    members = [each["scores"] for each in found["members"]]
    for each in found["members"]:
        cells = [shown(each["scores"][name]) for name in columns]
        made.add_row(str(each["number"]), printable(each["differs"], kept=""), *cells)
    made.add_section()
    made.add_row(
        "mean", "of the members", *(shown(float(np.mean([each[name] for each in members]))) for name in columns)
    )
    made.add_row("all", found["combine"], *(shown(found["scores"].get(name)) for name in columns))
    return made
