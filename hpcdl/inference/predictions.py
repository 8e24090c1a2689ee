"""Parallel predictions for the rows of a file: rank r of N parses, predicts and encodes the blocks r, r + N, ...

Rank 0 receives the N blocks of a round and writes them in order. It holds N blocks, or all (npz); other ranks hold one.

    csv, classes        row, id (if rows have one), label (the true one, if known), class, probability[, p(NAME) ...]
    csv, regression     row, id, label NAME for each output, value NAME for each output
    npz                 the same as arrays; class numbers in `prediction`, the model's outputs in `output`

Rows of a table have the column `reason`, too: why a row that the model cannot take has no answer (npz: -1 or NaN)."""

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
from hpcdl.comm.progress import inside
from hpcdl.data.batch import PredictionRows, RowBlock
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.models.model import abilities_of
from hpcdl.models.scores import ClassMeasures, ValueMeasures, predicted_classes, probabilities
from hpcdl.plugins import plugin_errors
from hpcdl.runs.evaluation import add_up, evaluate

COUNTS = ("rows", "refused", "filled", "unseen")  # of RowBlock.counts


class PredictionFormat:
    """The columns and arrays of predictions in a file. every: True to write the probabilities of all classes."""

    def __init__(self, trained: TrainedModel, rows: PredictionRows, every: bool):
        self.trained, self.rows, self.every = trained, rows, every
        self.names = np.array(trained.schema.names(trained.classes), object)
        self.outputs = trained.output_names

    def header(self) -> list[str]:
        known = ["row"] + ["id"] * self.rows.ids
        if self.trained.classes:
            known += ["label"] * self.rows.labelled + ["class", "probability"]
            return known + [f"p({name})" for name in self.names] * self.every
        kinds = ["label"] * self.rows.labelled + ["value"]
        names = self.outputs if len(self.outputs) > 1 else [""]
        return known + [f"{kind} {name}".strip() for kind in kinds for name in names]

    def arrays(self, block: RowBlock, outputs: Any) -> dict[str, np.ndarray]:
        arrays_by_name: dict[str, Any] = {"row": block.numbers, "output": outputs}
        if self.trained.classes:
            p = probabilities(outputs)
            best = predicted_classes(p, self.trained.threshold)
            arrays_by_name |= {"prediction": best, "probability": p[np.arange(len(p)), best]}
        else:
            arrays_by_name["prediction"] = outputs
        if block.y is not None:
            arrays_by_name["label"] = block.y
        if block.ids is not None:
            arrays_by_name["id"] = np.array(block.ids, str)
        return arrays_by_name

    def columns(self, block: RowBlock, outputs: Any) -> list[Any]:
        arrays = PredictionFormat.arrays(self, block, outputs)  # without what a subclass adds
        columns: list[Any] = [block.numbers.tolist(), *([] if block.ids is None else [block.ids])]
        known = [arrays[name] for name in ("label", "prediction") if name in arrays]
        if self.trained.classes:
            columns += [*(self.names[each] for each in known), self.texts(arrays["probability"])]
            return columns + ([self.texts(each) for each in probabilities(outputs).T] if self.every else [])
        return columns + [self.texts(each) for both in known for each in both.reshape(len(block.numbers), -1).T]

    def csv_header(self) -> list[str]:
        return self.header() + ["reason"] * self.rows.reasons

    def csv_columns(self, block: RowBlock, outputs: Any) -> list[Any]:
        """Return `columns` with empty answers of rows that the model cannot take, and the column of reasons."""
        columns = self.columns(block, outputs)
        if block.reasons is not None:
            refused, first = np.array(block.reasons, bool), 1 + (block.ids is not None)
            answers = (np.where(refused, "", np.array(each, object)) for each in columns[first:])
            columns = [*columns[:first], *answers, block.reasons]
        return columns

    def npz_arrays(self, block: RowBlock, outputs: Any) -> dict[str, np.ndarray]:
        """Return `arrays` with -1 or NaN for rows that the model cannot take, and the reasons."""
        arrays = self.arrays(block, outputs)
        if block.reasons is not None:
            refused = np.array(block.reasons, bool)
            for name in arrays.keys() - {"row", "id"}:
                arrays[name] = arrays[name].copy()
                arrays[name][refused] = -1 if arrays[name].dtype.kind == "i" else np.nan
            arrays["reason"] = np.array(block.reasons, str)
        return arrays

    def texts(self, numbers: np.ndarray) -> list[str]:
        """Return for each number the shortest text that reads as this number again."""
        return [str(number).removesuffix(".0") for number in numbers]  # numpy: the shortest that round-trips


def predict(model: Any, trained: TrainedModel, block: RowBlock, name: str) -> np.ndarray:
    """Return the predictions of a block. name: of its rows, for errors. UsageError: wrong shape, no finite floats."""
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
        raise UsageError(f"{name}: the prediction for row {row} is NaN or infinite; look at the values in that row")
    return values


class CSVPredictions:
    """A csv in a file or a stream: each rank turns blocks into lines, and rank 0 writes them."""

    def __init__(self, form: PredictionFormat, into: Any):
        self.format, self.into, self.read = form, into, True
        if into is not None:
            self.write(csv_lines([form.csv_header()]))

    def pack(self, block: RowBlock, outputs: Any) -> bytes:
        return csv_lines(zip(*self.format.csv_columns(block, outputs), strict=True))

    def write(self, packed: bytes) -> None:
        """Write the next block, on rank 0. If the pipe is broken (by `| head`), set `read` to False: write no more."""
        try:
            self.into.write(packed)
        except BrokenPipeError:
            self.read = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for buffered output

    def close(self) -> None:
        """Do nothing: all blocks are written."""


class NPZPredictions:
    """An npz file; ranks send their blocks as npz, and rank 0 joins them."""

    read = True

    def __init__(self, form: PredictionFormat, path: Path):
        self.format, self.path = form, path
        self.parts: list[dict[str, np.ndarray]] = []

    def pack(self, block: RowBlock, outputs: Any) -> bytes:
        into = io.BytesIO()
        np.savez(into, **self.format.npz_arrays(block, outputs))  # type: ignore[arg-type]
        return into.getvalue()

    def write(self, packed: bytes) -> None:
        with np.load(io.BytesIO(packed)) as arrays:
            self.parts.append(dict(arrays))

    def close(self) -> None:
        first, *_ = self.parts or [{}]
        joined: dict[str, Any] = {name: np.concatenate([part[name] for part in self.parts]) for name in first}
        with output_file(self.path) as file:
            np.savez(file, **joined, classes=self.format.names.astype(str))


@contextlib.contextmanager
def output(
    world: MPI.Intracomm, form: PredictionFormat, file: str, stream: BinaryIO | None
) -> Iterator[CSVPredictions | NPZPredictions | None]:
    """Yield the writer of NAME.csv, of NAME.npz or of the stream; None if there is neither a file nor a stream."""
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
    """Predict all rows; return the numbers that COUNTS names, by name, summed over all ranks. Collective.

    losses: also return `sums`, [losses, right answers or squared errors, rows] as in runs/evaluation.py. file: NAME.csv
    or NAME.npz. every: write the probabilities of all classes. stream: for lines of csv from rank 0. measures: to
    which labelled rows are added, by `add_up` over all ranks. AgreedError if a row cannot be read: no file is
    written."""
    counts, sums = np.zeros(len(COUNTS), np.int64), np.zeros(3)
    with output(world, PredictionFormat(trained, rows, every), file, stream) as out:
        for turn in rounds(world, rows):
            packed = b""
            with refuse_together(world):
                if turn is not None:
                    block = turn()
                    outputs = predict(model, trained, block, rows.name)
                    counts += block.counts
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
    with inside("add up the predictions"):
        for each in (counts, sums):
            world.Allreduce(MPI.IN_PLACE, each)
    if measures is not None:
        add_up(world, measures)
    return dict(zip(COUNTS, counts.tolist(), strict=True)) | ({"sums": sums} if losses else {})


def rounds(world: MPI.Intracomm, rows: PredictionRows) -> Iterator[Any]:
    """Yield, for each round of N blocks, the parser of this rank's block; None: no block. Collective; AgreedError."""
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
    """Write the packed blocks of a round on rank 0; return False if the pipe of the csv is broken. Collective."""
    with inside("gather predictions"):
        mine, sizes = np.frombuffer(packed, np.uint8), np.zeros(world.size, np.int64)
        world.Gather(np.array([len(mine)]), sizes)
        everything = np.empty(int(sizes.sum()), np.uint8)
        world.Gatherv(mine, [everything, sizes])
    if world.rank == 0:
        for part in np.split(everything, np.cumsum(sizes)[:-1]):
            if len(part) and out.read:
                out.write(part.tobytes())
    wanted = np.array([out.read])
    with inside("ask whether more is wanted"):
        world.Bcast(wanted)
    return bool(wanted[0])


def csv_lines(table: Iterable[Iterable[Any]]) -> bytes:
    into = io.StringIO()
    csv.writer(into, lineterminator="\n").writerows(table)
    return into.getvalue().encode("utf-8", "replace")


def describe_counts(counts: dict[str, int]) -> str:
    """Return a text with the number of rows, and those of the other counts that are not 0."""
    phrases = {
        "rows": counted(counts["rows"], "row", ","),
        "refused": f"{counted(counts['refused'], 'row', ',')} without an answer (the column reason says why)",
        "filled": f"{counted(counts['filled'], 'missing value', ',')} filled in",
        "unseen": f"{counted(counts['unseen'], 'text', ',')} that the training data do not have",
    }
    return ", ".join(phrase for name, phrase in phrases.items() if counts[name] or name == "rows")


def refuse_existing(option: str, path: str, force: bool, others: dict[str, str] | None = None) -> None:
    """Raise UsageError if `path` exists (without `force`), or is one of the files `others` (description -> path)."""
    for what, other in (others or {}).items():
        if path and other and os.path.realpath(path) == os.path.realpath(other):
            raise UsageError(f"{option} {path} is {what}, too; give another name")
    if path and os.path.exists(path) and not force:
        raise UsageError(f"{option} {path} exists already; give another name, or --force to replace it")
