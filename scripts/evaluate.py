"""Score a trained model, predict with it, export it: python scripts/evaluate.py runs/a --data digits

A gpt also writes text: python scripts/evaluate.py runs/t --sample 500 --prompt "def "
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.data import open_data
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.random import Random
from hpcdl.runs.alike import reading
from hpcdl.runs.attributes import check_attributes
from hpcdl.runs.checkpoint import Checkpoint
from hpcdl.runs.evaluation import ROWS, evaluate, scores
from hpcdl.runs.export import check_output_file, export, write_predictions
from hpcdl.runs.options import option
from hpcdl.runs.program import ended
from hpcdl.words import counted


@dataclass
class EvaluateOptions:
    """What can be asked of a checkpoint."""

    run: str = option(..., "folder of a run, or a checkpoint file")
    data: str = option("", "data set to score on; by default the one of the training")
    split: Literal["test", "train"] = option("test", "which part of the data set")
    predict: str = option("", "write a prediction for each row: NAME.csv, or NAME.npz with the model's outputs")
    export: str = option("", "write the parameters by name: NAME.npz or NAME.safetensors")
    sample: int = option(0, "write a text of so many tokens, after the scores; for a gpt")
    prompt: str = option("", "how the text begins; by default with what follows token 0")
    temperature: float = option(0.8, "of the text: 1 as the model has it, 0 always the likeliest token, between: tamer")
    seed: int = option(0, "of the text")

    def __post_init__(self):
        if self.sample < 0:
            raise UsageError(f"--sample must be 0 or more tokens, not {self.sample}")
        if self.temperature < 0:
            raise UsageError(f"--temperature must be 0 or more, not {self.temperature}")
        if self.prompt and not self.sample:
            raise UsageError("--prompt begins a text; say how many tokens are to follow, as by --sample 500")


def main(arguments=None):
    """All ranks score their shares; rank 0 prints and writes."""
    world = MPI.COMM_WORLD
    with ended("evaluate", world.rank):
        with reading(world) as parse:
            options = parse(EvaluateOptions, "evaluate", __doc__, arguments)
            check_output_file("--predict", options.predict, (".csv", ".npz"))
            check_output_file("--export", options.export, (".npz", ".safetensors"))
            found = Checkpoint.read(Path(options.run))
            about, parameters = found.attributes, parameters_of(found, options.run)
        standardize = trained_with(found.vectors)
        data = open_data(options.data or about["source"], comm=world, dtype=parameters.dtype, standardize=standardize)
        with refuse_together(world):
            model, split = rebuilt(about, data, parameters.dtype), data.test if options.split == "test" else data.train
            prompt = begun(options.prompt, model, data) if options.sample else None
        sums = evaluate(model, parameters, split, data.classes, share=(world.rank, world.size))
        world.Allreduce(MPI.IN_PLACE, sums)
        with refuse_together(world):
            if world.rank == 0:
                line = scores(sums, data.classes).named(options.split)
                print(f"{options.run}, step {about['step']}, on {counted(split.examples, 'row')} of {data.name}:")
                print("  ".join(f"{name} {value:.6g}" for name, value in line.items()))
                if options.sample:
                    drawn = Random(options.seed)("sample")
                    made = model.generate(parameters, prompt, options.sample, drawn, options.temperature)
                    print(data.vocabulary.decode([*prompt, *made]))
                if options.predict:
                    most = getattr(model, "rows_at_once", ROWS)
                    blocks = range(0, split.examples, most)
                    outputs = [
                        model.predict(parameters, split.rows(i, min(i + most, split.examples))[0]) for i in blocks
                    ]
                    write_predictions(np.concatenate(outputs), data.classes, Path(options.predict))
                if options.export:
                    export(model.layout.views(parameters), Path(options.export))


def parameters_of(found, run: str) -> np.ndarray:
    """The parameters of a checkpoint, if its attributes are those of one and say how long the vector is."""
    check_attributes(found.attributes, run)
    parameters, tensors = found.vectors.get("parameters"), found.attributes["layout"]
    size, dtypes = sum(math.prod(each["shape"]) for each in tensors), {each["dtype"] for each in tensors}
    if parameters is None or parameters.shape != (size,) or {str(parameters.dtype)} != dtypes:
        raise UsageError(f"{run}: its parameters are not the {size} of {' and '.join(sorted(dtypes))} of its layout")
    if not np.isfinite(parameters).all():
        raise UsageError(f"{run}: the parameters are not finite, for its training diverged; take an older checkpoint")
    return parameters


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


def begun(prompt: str, model, data) -> list[int]:
    """The tokens of a prompt, if the model writes text, and the data say what its tokens stand for."""
    if not hasattr(model, "generate"):
        raise UsageError("--sample needs a model that writes text, gpt, trained on tokens; this run's model does not")
    if data.vocabulary is None:
        raise UsageError(
            f"--sample needs data with a vocabulary, as prepare-data text makes them; {data.name} has none"
        )
    return data.vocabulary.encode(prompt).tolist()


if __name__ == "__main__":
    main()
