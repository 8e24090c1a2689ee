"""Score a trained model, predict with it, export it: python scripts/evaluate.py runs/a --data digits"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from mpi4py import MPI

from hpcdl.comm import agreement
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.runs.checkpoint import Checkpoint
from hpcdl.runs.evaluation import ROWS, evaluate, scores
from hpcdl.runs.export import check, export, write_predictions
from hpcdl.runs.options import option, parse
from hpcdl.runs.program import ended, quiet


@dataclass
class EvaluateOptions:
    """What can be asked of a checkpoint."""

    run: str = option(..., "folder of a run, or a checkpoint file")
    data: str = option("", "data set to score on; by default the one of the training")
    split: Literal["test", "train"] = option("test", "which part of the data set")
    predict: str = option("", "write a prediction for each row: NAME.csv, or NAME.npz with the model's outputs")
    export: str = option("", "write the parameters by name: NAME.npz or NAME.safetensors")


def main(arguments=None):
    """All ranks score their shares; rank 0 prints and writes."""
    world = MPI.COMM_WORLD
    with ended("evaluate", world.rank):
        with agreement(world), quiet(world.rank > 0):
            options = parse(EvaluateOptions, "evaluate", __doc__, arguments)
            check("--predict", options.predict, (".csv", ".npz"))
            check("--export", options.export, (".npz", ".safetensors"))
            found = Checkpoint.read(Path(options.run))
            about, parameters = found.attributes, found.vectors["parameters"]
        standardize = trained_with(found.vectors)
        data = open_data(options.data or about["source"], comm=world, dtype=parameters.dtype, standardize=standardize)
        with agreement(world):
            model, split = rebuilt(about, data, parameters.dtype), data.test if options.split == "test" else data.train
        sums = evaluate(model, parameters, split, data.classes, share=(world.rank, world.size))
        world.Allreduce(MPI.IN_PLACE, sums)
        with agreement(world):
            if world.rank == 0:
                line = scores(sums, data.classes).named(options.split)
                print(f"{options.run}, step {about['step']}, on {split.examples} rows of {data.name}:")
                print("  ".join(f"{name} {value:.6g}" for name, value in line.items()))
                if options.predict:
                    blocks = range(0, split.examples, ROWS)
                    outputs = [
                        model.predict(parameters, split.rows(i, min(i + ROWS, split.examples))[0]) for i in blocks
                    ]
                    write_predictions(np.concatenate(outputs), data.classes, Path(options.predict))
                if options.export:
                    export(model.layout.views(parameters), Path(options.export))


def trained_with(vectors) -> dict | bool:
    """The statistics by which the training data were standardized; False where they were not."""
    return {name: vectors[f"data/{name}"] for name in ("mean", "deviation")} if "data/mean" in vectors else False


def rebuilt(about, data, dtype):
    """The model of the checkpoint, if the data set has examples of the shape that it was trained on."""
    trained = about["data"]
    if list(data.features) != trained["features"] or data.classes != trained["classes"]:
        raise UsageError(
            f"{data.name} has examples of shape {tuple(data.features)} and {data.classes} classes; the model was "
            f"trained on shape {tuple(trained['features'])} and {trained['classes']} classes"
        )
    model = make_model(about["model"], data.features, data.classes, dtype)
    if model.layout.describe() != about["layout"]:
        raise UsageError(f"the checkpoint's model {about['model']!r} is not one that this program can build")
    return model


if __name__ == "__main__":
    main()
