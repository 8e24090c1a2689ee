"""Predict new rows with what a run has trained: mpiexec -n 4 hpcdl predict runs/a new.csv --out p.csv"""

import sys
from dataclasses import dataclass
from typing import Literal

from mpi4py import MPI

from hpcdl.checkpoint.export import check_output_file
from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError
from hpcdl.inference.posterior_samples import predictive
from hpcdl.inference.prediction_input import prediction_rows
from hpcdl.inference.predictions import describe_counts, predict_all, refuse_existing
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.launch.launch_consistency import reading
from hpcdl.launch.option_parser import parse_command_line
from hpcdl.launch.program import ended
from hpcdl.machine.threads import Threads
from hpcdl.runs.options import option, probability
from hpcdl.search import ensemble_scores
from hpcdl.search.ensemble import Ensemble, is_ensemble


@dataclass
class PredictOptions:
    """Options of predict: the rows, the model, and where predictions go."""

    run: str = option(..., "folder of a run or of an ensemble, or a checkpoint file")
    source: str = option(
        ..., "rows to predict: csv, Parquet, Arrow, npz, idx, libsvm, HDF5, images, package.module:name"
    )
    out: str = option("", "file to write: NAME.csv, or NAME.npz; without one, lines of csv are printed")
    probabilities: bool = option(False, "write the probabilities of all classes, not of the likeliest")
    samples: bool = option(False, "a run of train-sgld: predict by the mean over all samples, not by one model")
    threshold: float = option(0.0, "two classes: predict the second one from this probability on; 0: the likelier one")
    split: Literal["", "train", "test", "rows"] = option("", "which part of an HDF5 file; by default rows, else test")
    delimiter: str = option("", "character between the columns of a csv, if not that of the training data")
    model: str = option("", "if the run's model is your own and was moved: its package.module:Class now")
    force: bool = option(False, "replace the file of --out")

    def __post_init__(self):
        probability(self, "threshold")
        check_output_file("--out", self.out, (".csv", ".npz"))
        refuse_existing("--out", self.out, self.force, {"SOURCE": self.source})
        if len(self.delimiter) > 1:
            raise UsageError(f"--delimiter is one character, not {self.delimiter!r}")


def main(arguments=None):
    """Predict rows, whose blocks go to the ranks in turn; rank 0 writes."""
    world = MPI.COMM_WORLD
    with ended("predict", world.rank):
        with reading(world, parse_command_line) as read:
            command_line = read(PredictOptions, "predict", __doc__, arguments)
        options, trust = command_line.options, command_line.trust
        of_many = is_ensemble(options.run)
        with refuse_together(world):
            if of_many:
                trained, rows, seen = opened(options, world, trust)
            else:
                trained = TrainedModel(options.run, trust)
                model = trained.model(options.model)
                if options.samples:
                    model = predictive(options.run, trained, model)
                rows = prediction_rows(options.source, trained, options.split, world.size, delimiter=options.delimiter)
            (trained.reference if of_many else trained).set_threshold(options.threshold)
            if options.probabilities and not (trained.reference if of_many else trained).classes:
                raise UsageError("--probabilities: the model predicts values, not classes; leave the option out")
        stream = None if options.out else sys.stdout.buffer
        where = options.out, options.probabilities
        with Threads(world):
            if of_many:
                counts = ensemble_scores.predict_all(world, trained, seen, *where, stream)
            else:
                counts = predict_all(world, trained, model, rows, *where, stream=stream)
        if world.rank == 0:
            where = f" -> {options.out}" if options.out else ""
            print(f"{rows.name}: {describe_counts(counts)}{where}", file=sys.stdout if options.out else sys.stderr)


def opened(options, world, trust):
    """Return the ensemble, the rows, and the rows as each member sees them. Raises UsageError."""
    for name in ("samples", "model"):
        if getattr(options, name):
            raise UsageError(f"--{name} is for one run; give one of the members, as {options.run}/members/0000")
    ensemble = Ensemble.read(options.run, trust).open(world.rank, world.size)
    seen = ensemble.rows(options.source, options.split, world.size, delimiter=options.delimiter)
    return ensemble, next(iter(seen.values())), seen


if __name__ == "__main__":
    main()
