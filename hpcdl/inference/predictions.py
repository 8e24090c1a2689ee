"""Parallel predictions for the rows of a file: ranks take blocks in turn, and rank 0 writes them in order.

    rank r        blocks r, r + N, r + 2N, ...: parse, predict, encode for the file
    rank 0        receives the N blocks of a round, and writes them

A rank holds one block, rank 0 those of a round. A line of a csv is

    row, id (if rows have one), label (the true one, if known), class, probability[, one for each class]
    row, id, label NAME for each output, value NAME for each output                     (regression)

An npz holds the same as arrays, with class numbers in `prediction` and the model's outputs in `output`; rank 0 holds
all of it.
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

from hpcdl.checkpoint.export import output_file, output_file_in_parts
from hpcdl.comm import refuse_together
from hpcdl.comm.progress import activity
from hpcdl.data.batch import RowBlock
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.inference.prediction_input import PredictionRows
from hpcdl.inference.scores import ClassMeasures, ValueMeasures, predicted_classes, probabilities
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.models.model import abilities_of
from hpcdl.plugins import plugin_errors
from hpcdl.runs.evaluation import evaluate

COUNTS = ("rows", "dropped", "filled", "unseen")


class PredictionFormat:
    """The form of predictions in the file. every: True to write the probabilities of all classes."""

    def __init__(self, trained: TrainedModel, rows: PredictionRows, every: bool):
        self.trained, self.rows, self.every = trained, rows, every
        self.names = np.array(trained.schema.names(trained.classes), object)
        self.outputs = trained.output_names

    def header(self) -> list[str]:
        """Return the names of the columns."""
        known = ["row"] + ["id"] * self.rows.ids
        if self.trained.classes:
            known += ["label"] * self.rows.labelled + ["class", "probability"]
            return known + [f"p({name})" for name in self.names] * self.every
        kinds = ["label"] * self.rows.labelled + ["value"]
        return known + [
            f"{kind} {name}".strip() if len(self.outputs) > 1 else kind for kind in kinds for name in self.outputs
        ]

    def arrays(self, block: RowBlock, outputs: Any) -> dict[str, np.ndarray]:
        """Return a block as the arrays of an npz."""
        arrays_by_name: dict[str, Any] = {"row": block.numbers, "output": outputs}
        if self.trained.classes:
            p = probabilities(outputs)
            arrays_by_name |= {"prediction": predicted_classes(p), "probability": p.max(axis=1)}
        else:
            arrays_by_name["prediction"] = outputs
        if block.y is not None:
            arrays_by_name["label"] = block.y
        if block.ids is not None:
            arrays_by_name["id"] = np.array(block.ids, str)
        return arrays_by_name

    def lines(self, block: RowBlock, outputs: Any) -> bytes:
        """Return a block as lines of a csv."""
        return csv_lines(zip(*self.columns(block, outputs), strict=True))

    def columns(self, block: RowBlock, outputs: Any) -> list[Any]:
        """Return the columns of a csv for a block."""
        columns: list[Any] = [block.numbers.tolist()]
        if block.ids is not None:
            columns.append(block.ids)
        if self.trained.classes:
            p = probabilities(outputs)
            best = predicted_classes(p)
            if block.y is not None:
                columns.append(self.names[block.y])
            columns += [self.names[best], self.texts(p[np.arange(len(p)), best])]
            columns += [self.texts(each) for each in p.T] if self.every else []
        else:
            values = [block.y, outputs] if block.y is not None else [outputs]
            columns += [self.texts(each) for both in values for each in both.reshape(len(block.numbers), -1).T]
        return columns

    def texts(self, numbers: np.ndarray) -> list[str]:
        """Return numbers as texts."""
        return [str(number).removesuffix(".0") for number in numbers]  # numpy: the shortest that round-trips


def predict(model: Any, trained: TrainedModel, block: RowBlock, name: str) -> np.ndarray:
    """Return the model's predictions for a block of the rows `name`, in parts that fit its memory.

    UsageError for predictions of a wrong type or shape, as of a user's model.
    """
    most, x, classes = abilities_of(model).rows_at_once, block.x, trained.classes
    shapes = [(len(x), classes), (len(x),)][: 1 + (classes == 2)] if classes else [(len(x), *trained.outputs)]
    if not len(x):
        return np.zeros(shapes[0], trained.dtype)
    with plugin_errors(f"model {trained.about['model']}"):
        parts = [np.asarray(model.predict(trained.parameters, x[at : at + most])) for at in range(0, len(x), most)]
    with np.errstate(all="ignore"):
        values = trained.values(np.concatenate(parts)) if all(part.ndim for part in parts) else parts[0]
    if values.shape not in shapes or values.dtype.kind != "f":
        wanted = f"{trained.dtype} of shape {shapes[0]}"
        raise UsageError(f"the model predicts {values.dtype} of shape {values.shape}, and should predict {wanted}")
    if not (finite := np.isfinite(values.reshape(len(x), -1)).all(axis=1)).all():
        row = block.numbers[int(np.argmin(finite))]
        raise UsageError(f"{name}: what the model predicts for row {row} is no number; look at the values in that row")
    return values


class CSVPredictions:
    """A csv in a file or a stream: each rank turns blocks into lines, and rank 0 writes them."""

    def __init__(self, form: PredictionFormat, into: Any):
        self.format, self.into, self.read = form, into, True
        if into is not None:
            self.write(csv_lines([form.header()]))

    def pack(self, block: RowBlock, outputs: Any) -> bytes:
        """Return a block as the bytes of its message."""
        return self.format.lines(block, outputs)

    def write(self, packed: bytes) -> None:
        """Write the next block, on rank 0. After a broken pipe (head) nothing more is written."""
        try:
            self.into.write(packed)
        except BrokenPipeError:
            self.read = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for buffered output

    def close(self) -> None:
        """Do nothing: all blocks are written."""


class NPZPredictions:
    """An npz; messages of blocks are npz, too, and rank 0 joins them."""

    read = True

    def __init__(self, form: PredictionFormat, path: Path):
        self.format, self.path = form, path
        self.parts: list[dict[str, np.ndarray]] = []

    def pack(self, block: RowBlock, outputs: Any) -> bytes:
        """Return a block as the bytes of its message."""
        into = io.BytesIO()
        np.savez(into, **self.format.arrays(block, outputs))  # type: ignore[arg-type]
        return into.getvalue()

    def write(self, packed: bytes) -> None:
        """Add the next block, on rank 0."""
        with np.load(io.BytesIO(packed)) as arrays:
            self.parts.append(dict(arrays))

    def close(self) -> None:
        """Join the blocks and write the file."""
        first, *_ = self.parts or [{}]
        joined: dict[str, Any] = {name: np.concatenate([part[name] for part in self.parts]) for name in first}
        with output_file(self.path) as file:
            np.savez(file, **joined, classes=self.format.names.astype(str))


@contextlib.contextmanager
def output(
    world: MPI.Intracomm, form: PredictionFormat, file: str, stream: BinaryIO | None
) -> Iterator[CSVPredictions | NPZPredictions | None]:
    """Yield the writer of NAME.csv, NAME.npz or the stream; None without one."""
    if file.endswith(".npz"):
        yield NPZPredictions(form, Path(file))
    elif file:
        with output_file_in_parts(Path(file)) if world.rank == 0 else contextlib.nullcontext() as into:
            yield CSVPredictions(form, into)
    else:
        yield None if stream is None else CSVPredictions(form, stream if world.rank == 0 else None)


def predict_all(
    world: MPI.Intracomm,
    trained: TrainedModel,
    model: Any,
    rows: PredictionRows,
    file: str = "",
    every: bool = False,
    measures: ClassMeasures | ValueMeasures | None = None,
    stream: BinaryIO | None = None,
    losses: bool = False,
) -> dict[str, Any]:
    """Predict all rows; return the counts of COUNTS, on all ranks. Collective.

    losses: also return `sums`, [losses, right answers or squared errors, rows] as in runs/evaluation.py. file: NAME.csv
    or NAME.npz; stream: for lines of csv from rank 0. measures: gets all rows, and then holds the sums over all ranks.
    Raises AgreedError if a row cannot be read; then no file is written.
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


def rounds(world: MPI.Intracomm, rows: PredictionRows) -> Iterator[Any]:
    """Yield this rank's block of each round of N blocks, or None in the last round. Collective; refuses a bad file."""
    blocks, ended = rows.blocks(), False
    while not ended:
        mine = None
        with refuse_together(world):
            for place in range(world.size):
                block = next(blocks, None)
                ended |= block is None
                mine = block if place == world.rank else mine
        yield mine


def deliver(world: MPI.Intracomm, packed: bytes, out: CSVPredictions | NPZPredictions) -> bool:
    """Write the packed blocks of a round on rank 0; return False if the reader wants no more. Collective."""
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


def csv_lines(table: Iterable[Iterable[Any]]) -> bytes:
    """Return the lines of a csv."""
    into = io.StringIO()
    csv.writer(into, lineterminator="\n").writerows(table)
    return into.getvalue().encode("utf-8", "replace")


def describe_counts(counts: dict[str, int]) -> str:
    """Return a sentence about the counts that are not 0."""
    phrases = [counted(counts["rows"], "row", ",")]
    if counts["dropped"]:
        phrases.append(f"{counts['dropped']:,} left out for missing values")
    if counts["filled"]:
        phrases.append(f"{counted(counts['filled'], 'missing value', ',')} filled in")
    if counts["unseen"]:
        phrases.append(f"{counted(counts['unseen'], 'text', ',')} that the training data do not have")
    return ", ".join(phrases)


def refuse_existing(option: str, path: str, force: bool, others: dict[str, str] | None = None) -> None:
    """Raise UsageError for an existing file, without `force`. others: files that it must not be."""
    for what, other in (others or {}).items():
        if path and other and os.path.realpath(path) == os.path.realpath(other):
            raise UsageError(f"{option} {path} is {what}, too; give another name")
    if path and os.path.exists(path) and not force:
        raise UsageError(f"{option} {path} exists already; give another name, or --force to replace it")
