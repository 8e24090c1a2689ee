"""Score a trained model, predict with it, export it: python scripts/evaluate.py runs/a --predict p.csv

A gpt also writes text: python scripts/evaluate.py runs/t --sample 500 --prompt "def "
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError
from hpcdl.machine.threads import limited
from hpcdl.random import Random
from hpcdl.runs.alike import reading
from hpcdl.runs.evaluation_report import as_tables, report
from hpcdl.runs.export import check_output_file, export, write_json
from hpcdl.runs.measures import ClassMeasures, ValueMeasures
from hpcdl.runs.new_rows import new_rows
from hpcdl.runs.options import option
from hpcdl.runs.predictions import predict_all, refuse_existing
from hpcdl.runs.program import ended
from hpcdl.runs.progress import console
from hpcdl.runs.trained import Trained
from hpcdl.words import counted


@dataclass
class EvaluateOptions:
    """What can be asked of a checkpoint."""

    run: str = option(..., "folder of a run, or a checkpoint file")
    data: str = option("", "data set to score on; by default the one of the training")
    split: Literal["test", "train"] = option("test", "which part of the data set")
    predict: str = option("", "write a prediction for each row: NAME.csv, or NAME.npz with the model's outputs")
    probabilities: bool = option(False, "with --predict: of each class, beside that of the likeliest")
    json: str = option("", "write the scores: NAME.json")
    export: str = option("", "write the parameters by name: NAME.npz or NAME.safetensors")
    force: bool = option(False, "replace files that are there already")
    model: str = option("", "where the run's model is your own: its package.module:Class now, if it was moved")
    sample: int = option(0, "instead of scoring, write a text of so many tokens; for a gpt")
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
        if self.probabilities and not self.predict:
            raise UsageError("--probabilities are written by --predict NAME.csv")
        if self.sample and (self.predict or self.json):
            raise UsageError("--sample writes a text and scores nothing; leave --predict and --json to another call")
        check_output_file("--predict", self.predict, (".csv", ".npz"))
        check_output_file("--export", self.export, (".npz", ".safetensors"))
        check_output_file("--json", self.json, (".json",))
        written: dict[str, str] = {"--data": self.data}
        for told in ("predict", "export", "json"):
            refuse_existing(f"--{told}", getattr(self, told), self.force, written)
            written[f"--{told}"] = getattr(self, told)


def main(arguments=None):
    """All ranks score and predict blocks of rows in turn; rank 0 prints and writes."""
    world = MPI.COMM_WORLD
    with ended("evaluate", world.rank):
        with reading(world) as parse:
            options = parse(EvaluateOptions, "evaluate", __doc__, arguments)
        with refuse_together(world):
            trained = Trained(options.run)
            model = trained.model(options.model)
            prompt = begun(options.prompt, model, trained) if options.sample else None
        with limited(world):
            if options.sample:
                write(world, options, trained, model, prompt)
            else:
                score(world, options, trained, model)
        with refuse_together(world):
            if world.rank == 0 and options.export:
                export(model.layout.views(trained.parameters), Path(options.export))


def score(world, options, trained, model):
    """Print and write what the model makes of the rows of a data set."""
    with refuse_together(world):
        source = options.data or trained.about["source"]
        if not source:
            raise UsageError(f"{options.run} was trained on arrays of a program: name a data set by --data")
        rows = new_rows(source, trained, options.split, world.size, from_file=not options.data)
        if not rows.labelled:
            raise UsageError(f"{rows.name} has no labels to score by; hpcdl predict predicts its rows")
        if options.probabilities and not trained.classes:
            raise UsageError("--probabilities: the run's model predicts values, which have none")
    if trained.classes:
        measures = ClassMeasures(trained.classes)
    else:
        measures = ValueMeasures(trained.outputs[0] if trained.outputs else 1, around(world, rows))
    counts = predict_all(world, trained, model, rows, options.predict, options.probabilities, measures, losses=True)
    if world.rank == 0:
        found = report(trained, rows.name, options.split, counts, measures)
        print(f"{options.run}, step {found['step']}, on {counted(counts['rows'], 'row')} of {rows.name}:")
        print("  ".join(f"{options.split}_{name} {value:.6g}" for name, value in found["scores"].items()))
        for table in as_tables(found):
            console().print(table)
        if options.json:
            write_json(found, Path(options.json))


def around(world, rows):
    """A value near those to be predicted, for each output: the first row's; collective."""
    with refuse_together(world):
        first = next(iter(rows.blocks()), None) if world.rank == 0 else None
        y = np.zeros(0) if first is None else np.atleast_1d(np.asarray(first().y[:1], np.float64).ravel())
    return world.bcast(y)


def write(world, options, trained, model, prompt):
    """Print what a gpt writes."""
    with refuse_together(world):
        if world.rank == 0:
            drawn = Random(options.seed)("sample")
            made = model.generate(trained.parameters, prompt, options.sample, drawn, options.temperature)
            print(trained.meaning.vocabulary.decode([*prompt, *made]))


def begun(prompt: str, model, trained) -> list[int]:
    """The tokens of a prompt, if the model writes text, and the checkpoint says what its tokens stand for."""
    if not hasattr(model, "generate"):
        raise UsageError("--sample needs a model that writes text, gpt, trained on tokens; this run's model does not")
    if trained.meaning.vocabulary is None:
        raise UsageError(
            f"--sample needs a vocabulary, as the data of prepare-data text have; those of {trained.name} had none"
        )
    return trained.meaning.vocabulary.encode(prompt).tolist()


if __name__ == "__main__":
    main()
