"""Predictions for rows of a file, all ranks together: each takes blocks in turn, rank 0 writes them in their order.

    rank r        blocks r, r + N, r + 2N, ...: parse, predict, put into the form of the file
    rank 0        receives the N blocks of a round, and writes them

So no rank holds more than its block, and rank 0 those of a round. A line of a csv is

    row, id (where rows have one), label (the true one, where it is known), class, probability[, one for each class]
    row, id, label NAME for each output, value NAME for each output                            of a regression

An npz holds the same as arrays, `prediction` the numbers of the classes, `output` what the model puts out; of it rank 0
holds all.
"""

import contextlib
import csv
import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.export import written, written_in_parts
from hpcdl.comm import refuse_together
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.inference.prediction_input import Block, NewRows
from hpcdl.inference.scores import ClassMeasures, ValueMeasures, answers, probabilities
from hpcdl.inference.trained_model import Trained
from hpcdl.plugins import plugin_errors
from hpcdl.runs.evaluation import ROWS, evaluate

COUNTS = ("rows", "dropped", "filled", "unseen")


class PredictionFormat:
    """What a block of predictions looks like in the file. every: whether all probabilities are in it."""

    def __init__(self, trained: Trained, rows: NewRows, every: bool):
        self.trained, self.rows, self.every = trained, rows, every
        self.names = np.array(trained.schema.names(trained.classes), object)
        self.outputs = trained.output_names

    def header(self) -> list[str]:
        """The names of the columns."""
        known = ["row"] + ["id"] * self.rows.ids
        if self.trained.classes:
            known += ["label"] * self.rows.labelled + ["class", "probability"]
            return known + [f"p({name})" for name in self.names] * self.every
        kinds = ["label"] * self.rows.labelled + ["value"]
        return known + [
            f"{kind} {name}".strip() if len(self.outputs) > 1 else kind for kind in kinds for name in self.outputs
        ]

    def arrays(self, block: Block, outputs: Any) -> dict[str, np.ndarray]:
        """A block as the arrays of an npz."""
        found: dict[str, Any] = {"row": block.numbers, "output": outputs}
        if self.trained.classes:
            p = probabilities(outputs)
            found |= {"prediction": answers(p), "probability": p.max(axis=1)}
        else:
            found["prediction"] = outputs
        if block.y is not None:
            found["label"] = block.y
        if block.ids is not None:
            found["id"] = np.array(block.ids, str)
        return found

    def lines(self, block: Block, outputs: Any) -> bytes:
        """A block as lines of a csv."""
        return lines_of(zip(*self.columns(block, outputs), strict=True))

    def columns(self, block: Block, outputs: Any) -> list[Any]:
        """The columns of a csv for a block."""
        columns: list[Any] = [block.numbers.tolist()]
        if block.ids is not None:
            columns.append(block.ids)
        if self.trained.classes:
            p = probabilities(outputs)
            best = answers(p)
            if block.y is not None:
                columns.append(self.names[block.y])
            columns += [self.names[best], self.texts(p[np.arange(len(p)), best])]
            columns += [self.texts(each) for each in p.T] if self.every else []
        else:
            values = [block.y, outputs] if block.y is not None else [outputs]
            columns += [self.texts(each) for both in values for each in both.reshape(len(block.numbers), -1).T]
        return columns

    def texts(self, numbers: np.ndarray) -> list[str]:
        """Numbers as texts."""
        return [str(number).removesuffix(".0") for number in numbers]  # numpy: the shortest that reads back the same


def predict(model: Any, trained: Trained, block: Block, name: str) -> np.ndarray:
    """What the model predicts for these rows of `name`, so many at once as it has memory for.

    UsageError where that is not what a model should predict: one's own may do anything.
    """
    most, x, classes = getattr(model, "rows_at_once", ROWS), block.x, trained.classes
    shapes = [(len(x), classes), (len(x),)][: 1 + (classes == 2)] if classes else [(len(x), *trained.outputs)]
    if not len(x):
        return np.zeros(shapes[0], trained.dtype)
    with plugin_errors(f"model {trained.about['model']}"):
        parts = [np.asarray(model.predict(trained.parameters, x[at : at + most])) for at in range(0, len(x), most)]
    with np.errstate(all="ignore"):
        found = trained.values(np.concatenate(parts)) if all(part.ndim for part in parts) else parts[0]
    if found.shape not in shapes or found.dtype.kind != "f":
        wanted = f"{trained.dtype} of shape {shapes[0]}"
        raise UsageError(f"the model predicts {found.dtype} of shape {found.shape}, and should predict {wanted}")
    if not (finite := np.isfinite(found.reshape(len(x), -1)).all(axis=1)).all():
        row = block.numbers[int(np.argmin(finite))]
        raise UsageError(f"{name}: what the model predicts for row {row} is no number; look at the values in that row")
    return found


class CSVPredictions:
    """A csv, into a file or a stream: blocks become lines on their ranks, which rank 0 writes."""

    def __init__(self, form: PredictionFormat, into: Any):
        self.format, self.into, self.read = form, into, True
        if into is not None:
            self.write(lines_of([form.header()]))

    def pack(self, block: Block, outputs: Any) -> bytes:
        """A block as it travels."""
        return self.format.lines(block, outputs)

    def write(self, packed: bytes) -> None:
        """The next block, on rank 0. Who reads a stream may have enough (head): then nothing more is written."""
        try:
            self.into.write(packed)
        except BrokenPipeError:
            self.read = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes there

    def close(self) -> None:
        """All blocks are written."""


class Arrays:
    """An npz: blocks travel as npz, too, and are put together by rank 0."""

    read = True

    def __init__(self, form: PredictionFormat, path: Path):
        self.format, self.path = form, path
        self.parts: list[dict[str, np.ndarray]] = []

    def pack(self, block: Block, outputs: Any) -> bytes:
        """A block as it travels."""
        into = io.BytesIO()
        np.savez(into, **self.format.arrays(block, outputs))  # type: ignore[arg-type]
        return into.getvalue()

    def write(self, packed: bytes) -> None:
        """The next block, on rank 0."""
        with np.load(io.BytesIO(packed)) as arrays:
            self.parts.append(dict(arrays))

    def close(self) -> None:
        """All blocks are there."""
        first, *_ = self.parts or [{}]
        joined: dict[str, Any] = {name: np.concatenate([part[name] for part in self.parts]) for name in first}
        with written(self.path) as file:
            np.savez(file, **joined, classes=self.format.names.astype(str))


@contextlib.contextmanager
def output(
    world: MPI.Intracomm, form: PredictionFormat, file: str, stream: BinaryIO | None
) -> Iterator[CSVPredictions | Arrays | None]:
    """Where predictions go: to NAME.csv, NAME.npz, the stream, or nowhere."""
    if file.endswith(".npz"):
        yield Arrays(form, Path(file))
    elif file:
        with written_in_parts(Path(file)) if world.rank == 0 else contextlib.nullcontext() as into:
            yield CSVPredictions(form, into)
    else:
        yield None if stream is None else CSVPredictions(form, stream if world.rank == 0 else None)


def predict_all(
    world: MPI.Intracomm,
    trained: Trained,
    model: Any,
    rows: NewRows,
    file: str = "",
    every: bool = False,
    measures: ClassMeasures | ValueMeasures | None = None,
    stream: BinaryIO | None = None,
    losses: bool = False,
) -> dict[str, Any]:
    """Predict all rows; collective. Returns counts, on all ranks: rows, and those of COUNTS that sources have.

    losses: with the counts come `sums`, [losses, right answers or squared errors, rows] as runs/evaluation.py has them.
    file: NAME.csv or NAME.npz; or stream: where rank 0 writes lines of csv. measures: is told of all rows, and then
    holds the sums over all ranks. Raises AgreedError where a row cannot be read; then no file is written.
    """
    counts, sums = np.zeros(len(COUNTS), np.int64), np.zeros(3)
    with output(world, PredictionFormat(trained, rows, every), file, stream) as out:
        for turn in rounds(world, rows):
            packed = b""
            with refuse_together(world):
                if turn is not None:
                    block = turn()
                    outputs = predict(model, trained, block, rows.name)
                    counts += [len(block.x), block.dropped, block.filled, block.unseen]
                    if block.y is not None and len(block.y):
                        if measures is not None:
                            measures.add(block.y, outputs)
                        if losses:
                            seen = block._replace(y=trained.standardized(block.y))
                            sums += evaluate(model, trained.parameters, seen, trained.classes)
                    packed = b"" if out is None else out.pack(block, outputs)
            if out is not None and not deliver(world, packed, out):
                break
        if out is not None and world.rank == 0:
            out.close()
    with activity.inside("add up the predictions"):
        world.Allreduce(MPI.IN_PLACE, counts)
        for each in [sums, *([] if measures is None else measures.sums)]:
            world.Allreduce(MPI.IN_PLACE, each)
    return dict(zip(COUNTS, counts.tolist(), strict=True)) | ({"sums": sums} if losses else {})


def rounds(world: MPI.Intracomm, rows: NewRows) -> Iterator[Any]:
    """This rank's block of each round of as many blocks as ranks, or None in the last one; a bad file is refused."""
    blocks, ended = rows.blocks(), False
    while not ended:
        mine = None
        with refuse_together(world):
            for place in range(world.size):
                block = next(blocks, None)
                ended |= block is None
                mine = block if place == world.rank else mine
        yield mine


def deliver(world: MPI.Intracomm, packed: bytes, out: CSVPredictions | Arrays) -> bool:
    """What the ranks have packed in this round is written by rank 0; whether more is wanted, on all. Collective."""
    with activity.inside("gather predictions"):
        mine, sizes = np.frombuffer(packed, np.uint8), np.zeros(world.size, np.int64)
        world.Gather(np.array([len(mine)]), sizes)
        everything = np.empty(int(sizes.sum()), np.uint8)
        world.Gatherv(mine, [everything, sizes])
    if world.rank == 0:
        for part in np.split(everything, np.cumsum(sizes)[:-1]):
            if len(part) and out.read:
                out.write(part.tobytes())
    wanted = np.array([out.read])
    with activity.inside("ask whether more is wanted"):
        world.Bcast(wanted)
    return bool(wanted[0])


def lines_of(table: Iterable[Iterable[Any]]) -> bytes:
    """Lines of a csv."""
    into = io.StringIO()
    csv.writer(into, lineterminator="\n").writerows(table)
    return into.getvalue().encode("utf-8", "replace")


def said(counts: dict[str, int]) -> str:
    """Counts for people, without those of which there are none."""
    found = [counted(counts["rows"], "row", ",")]
    if counts["dropped"]:
        found.append(f"{counts['dropped']:,} left out for missing values")
    if counts["filled"]:
        found.append(f"{counted(counts['filled'], 'missing value', ',')} filled in")
    if counts["unseen"]:
        found.append(f"{counted(counts['unseen'], 'text', ',')} that the training data do not have")
    return ", ".join(found)


def refuse_existing(told: str, path: str, force: bool, others: dict[str, str] | None = None) -> None:
    """UsageError where a file is there already, unless it may be replaced. others: files that it must not be."""
    for what, other in (others or {}).items():
        if path and other and os.path.realpath(path) == os.path.realpath(other):
            raise UsageError(f"{told} {path} is {what}, too; give another name")
    if path and os.path.exists(path) and not force:
        raise UsageError(f"{told} {path} exists already; give another name, or --force to replace it")
