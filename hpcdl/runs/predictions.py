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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.runs.evaluation import ROWS, evaluate
from hpcdl.runs.export import written, written_in_parts
from hpcdl.runs.measures import ClassMeasures, ValueMeasures, answers, probabilities
from hpcdl.runs.new_rows import Block, NewRows
from hpcdl.runs.trained import Trained
from hpcdl.words import counted

COUNTS = ("rows", "dropped", "filled", "unseen")


class Form:
    """What a block of predictions looks like in the file. every: whether all probabilities are in it."""

    def __init__(self, trained: Trained, rows: NewRows, every: bool):
        self.trained, self.rows, self.every = trained, rows, every
        self.names = np.array(trained.meaning.names(trained.classes), object)
        self.outputs = trained.meaning.outputs or [""] * (trained.outputs[0] if trained.outputs else 1)
        self.digits = np.finfo(trained.dtype).precision + 3  # with so many, a number read back is the same

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

    def arrays(self, block: Block, outputs: np.ndarray) -> dict[str, np.ndarray]:
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

    def lines(self, block: Block, outputs: np.ndarray) -> bytes:
        """A block as lines of a csv."""
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
        into = io.StringIO()
        csv.writer(into, lineterminator="\n").writerows(zip(*columns, strict=True))
        return into.getvalue().encode("utf-8", "replace")

    def texts(self, numbers: np.ndarray) -> list[str]:
        """Numbers as texts."""
        form = f".{self.digits}g"
        return [format(number, form) for number in numbers.tolist()]


def predict(model: Any, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What the model predicts for these rows, so many at once as it has memory for."""
    most = getattr(model, "rows_at_once", ROWS)
    return np.concatenate([model.predict(parameters, x[at : at + most]) for at in range(0, max(1, len(x)), most)])


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
    form, counts, sums = Form(trained, rows, every), np.zeros(len(COUNTS), np.int64), np.zeros(3)
    parts: list[dict[str, np.ndarray]] = []
    with contextlib.ExitStack() as open_files:
        into: Any = stream if world.rank == 0 else None
        if world.rank == 0 and file.endswith(".csv"):
            into = open_files.enter_context(written_in_parts(Path(file)))
        if into is not None:
            into.write(lines_of([form.header()]))
        for turn in rounds(world, rows):
            payload = b""
            with refuse_together(world):
                if turn is not None:
                    block = turn()
                    outputs = trained.values(predict(model, trained.parameters, block.x))
                    counts += [len(block.x), block.dropped, block.filled, block.unseen]
                    if block.y is not None and len(block.y):
                        if measures is not None:
                            measures.add(block.y, outputs)
                        if losses:
                            seen = block._replace(y=trained.standardized(block.y))
                            sums += evaluate(model, trained.parameters, seen, trained.classes)
                    if file.endswith(".npz"):
                        payload = packed(form.arrays(block, outputs))
                    elif file or stream is not None:
                        payload = form.lines(block, outputs)
            for each in gathered(world, payload):
                if each and file.endswith(".npz"):
                    with np.load(io.BytesIO(each)) as arrays:
                        parts.append(dict(arrays))
                elif each and into is not None:
                    into.write(each)
    if world.rank == 0 and file.endswith(".npz"):
        with written(Path(file)) as npz:
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
            np.savez(npz, **joined, classes=form.names.astype(str))  # type: ignore[arg-type]
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


def gathered(world: MPI.Intracomm, payload: bytes) -> list[Any]:
    """What each rank has, on rank 0; nothing elsewhere. Collective."""
    with activity.inside("gather predictions"):
        mine, sizes = np.frombuffer(payload, np.uint8), np.zeros(world.size, np.int64)
        world.Gather(np.array([len(mine)]), sizes)
        everything = np.empty(int(sizes.sum()), np.uint8)
        world.Gatherv(mine, [everything, sizes])
    return [part.tobytes() for part in np.split(everything, np.cumsum(sizes)[:-1])] if world.rank == 0 else []


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    """Arrays as the bytes of an npz."""
    into = io.BytesIO()
    np.savez(into, **arrays)  # type: ignore[arg-type]
    return into.getvalue()


def lines_of(table: list[list[str]]) -> bytes:
    """Lines of a csv."""
    into = io.StringIO()
    csv.writer(into, lineterminator="\n").writerows(table)
    return into.getvalue().encode()


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


def refuse_existing(told: str, path: str, force: bool) -> None:
    """UsageError where a file is there already, unless it may be replaced."""
    if path and os.path.exists(path) and not force:
        raise UsageError(f"{told} {path} exists already; give another name, or --force to replace it")
