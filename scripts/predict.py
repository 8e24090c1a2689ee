"""Predict new rows with what a run has trained: mpiexec -n 4 python scripts/predict.py runs/a new.csv --out p.csv"""

import sys
from dataclasses import dataclass
from typing import Literal

from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError
from hpcdl.machine.threads import limited
from hpcdl.runs.alike import reading
from hpcdl.runs.export import check_output_file
from hpcdl.runs.new_rows import new_rows
from hpcdl.runs.options import option
from hpcdl.runs.predictions import predict_all, refuse_existing, said
from hpcdl.runs.program import ended
from hpcdl.runs.trained import Trained


@dataclass
class PredictOptions:
    """What is to be predicted, by what, and where it goes."""

    run: str = option(..., "folder of a run, or a checkpoint file")
    source: str = option(..., "rows to predict: csv, Parquet, Arrow, npz, idx, HDF5, or your package.module:function")
    out: str = option("", "file to write: NAME.csv, or NAME.npz; without one, lines of csv are printed")
    probabilities: bool = option(False, "of each class, beside that of the likeliest")
    split: Literal["", "train", "test", "rows"] = option("", "which part of an HDF5 file; by default rows, else test")
    delimiter: str = option("", "between the columns of a csv, if it is another than that of the training data")
    model: str = option("", "where the run's model is your own: its package.module:Class now, if it was moved")
    force: bool = option(False, "replace the file")

    def __post_init__(self):
        check_output_file("--out", self.out, (".csv", ".npz"))
        refuse_existing("--out", self.out, self.force, {"SOURCE": self.source})
        if len(self.delimiter) > 1:
            raise UsageError(f"--delimiter is one character, not {self.delimiter!r}")


def main(arguments=None):
    """All ranks predict blocks of rows in turn; rank 0 writes."""
    world = MPI.COMM_WORLD
    with ended("predict", world.rank):
        with reading(world) as parse:
            options = parse(PredictOptions, "predict", __doc__, arguments)
        with refuse_together(world):
            trained = Trained(options.run)
            model = trained.model(options.model)
            rows = new_rows(options.source, trained, options.split, world.size, delimiter=options.delimiter)
            if options.probabilities and not trained.classes:
                raise UsageError("--probabilities: the run's model predicts values, which have none")
        stream = None if options.out else sys.stdout.buffer
        with limited(world):
            counts = predict_all(world, trained, model, rows, options.out, options.probabilities, stream=stream)
        if world.rank == 0:
            where = f" -> {options.out}" if options.out else ""
            print(f"{rows.name}: {said(counts)}{where}", file=sys.stdout if options.out else sys.stderr)


if __name__ == "__main__":
    main()
