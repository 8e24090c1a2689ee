"""Score a trained model, predict with it, export it: python scripts/evaluate.py runs/a --predict p.csv

What train-sgld has drawn: --samples. A gpt writes text: python scripts/evaluate.py runs/t --sample 500 --prompt "def "
What has learned to act plays: python scripts/evaluate.py runs/cartpole --episodes 100 --render cartpole.gif
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.export import check_output_file, export, named, write_json
from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.inference.evaluation_report import as_tables, report
from hpcdl.inference.posterior_samples import predictive
from hpcdl.inference.prediction_input import prediction_rows
from hpcdl.inference.predictions import predict_all, refuse_existing
from hpcdl.inference.scores import ClassMeasures, ValueMeasures
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.launch.launch_consistency import reading
from hpcdl.launch.option_parser import parse_command_line
from hpcdl.launch.program import ended
from hpcdl.machine.display import console
from hpcdl.machine.threads import limited
from hpcdl.models.model import abilities_of
from hpcdl.random import Random
from hpcdl.rl.rollout import PICTURES, Player, evaluation_summary, is_agent_run
from hpcdl.runs.options import option
from hpcdl.search import ensemble_scores
from hpcdl.search.ensemble import Ensemble, is_ensemble


@dataclass
class EvaluateOptions:
    """What can be asked of a checkpoint."""

    run: str = option(..., "folder of a run or of an ensemble, or a checkpoint file")
    data: str = option("", "data set to score on; by default the one of the training")
    split: Literal["test", "train"] = option("test", "which part of the data set")
    predict: str = option("", "write a prediction for each row: NAME.csv, or NAME.npz with the model's outputs")
    probabilities: bool = option(False, "with --predict: of each class, beside that of the likeliest")
    samples: bool = option(False, "of train-sgld: score and predict with the mean over all samples, too")
    json: str = option("", "write the scores: NAME.json")
    export: str = option("", "write the parameters by name: NAME.npz or NAME.safetensors")
    force: bool = option(False, "replace files that are there already")
    model: str = option("", "where the run's model is your own: its package.module:Class now, if it was moved")
    sample: int = option(0, "instead of scoring, write a text of so many tokens; for a gpt")
    prompt: str = option("", "how the text begins; by default with what follows token 0")
    temperature: float = option(0.8, "of the text: 1 as the model has it, 0 always the likeliest token, between: tamer")
    seed: int = option(0, "of the text, or of the episodes")
    episodes: int = option(0, "episodes of the greedy policy, of what has learned to act; 0: 100 of them")
    render: str = option("", "a moving picture of the first episode: NAME.gif, or NAME.mp4 where there is a codec")

    def __post_init__(self):
        if self.sample < 0:
            raise UsageError(f"--sample must be 0 or more tokens, not {self.sample}")
        if self.temperature < 0:
            raise UsageError(f"--temperature must be 0 or more, not {self.temperature}")
        if self.prompt and not self.sample:
            raise UsageError("--prompt begins a text; say how many tokens are to follow, as by --sample 500")
        if self.probabilities and not self.predict:
            raise UsageError("--probabilities are written by --predict NAME.csv")
        if self.sample and self.samples:
            raise UsageError("--sample N writes a text, --samples scores what train-sgld has drawn: give one of them")
        if self.sample and (self.predict or self.json):
            raise UsageError("--sample writes a text and scores nothing; leave --predict and --json to another call")
        if self.episodes < 0:
            raise UsageError(f"--episodes must be 0 or more, not {self.episodes}")
        check_output_file("--render", self.render, PICTURES)
        check_output_file("--predict", self.predict, (".csv", ".npz"))
        check_output_file("--export", self.export, (".npz", ".safetensors"))
        check_output_file("--json", self.json, (".json",))
        written: dict[str, str] = {"--data": self.data}
        for told in ("predict", "export", "json", "render"):
            refuse_existing(f"--{told}", getattr(self, told), self.force, written)
            written[f"--{told}"] = getattr(self, told)


def main(arguments=None):
    """All ranks score and predict blocks of rows in turn; rank 0 prints and writes."""
    world = MPI.COMM_WORLD
    with ended("evaluate", world.rank):
        with reading(world, parse_command_line) as read:
            command_line = read(EvaluateOptions, "evaluate", __doc__, arguments)
        options, trust = command_line.options, command_line.trust
        if is_ensemble(options.run):
            with limited(world):
                together(world, options, trust)
            return
        if is_agent_run(options.run):
            with limited(world):
                act(world, options, trust)
            return
        with refuse_together(world):
            for name in ("episodes", "render"):
                if getattr(options, name):
                    raise UsageError(f"--{name}: {options.run} has learned from data, and acts in no environment")
            trained = TrainedModel(options.run, trust)
            model = trained.model(options.model)
            prompt = begun(options.prompt, model, trained) if options.sample else None
            samples = predictive(options.run, trained, model) if options.samples else None
        with limited(world):
            if options.sample:
                write(world, options, trained, model, prompt)
            else:
                score(world, options, trained, model, samples)
        with refuse_together(world):
            if world.rank == 0 and options.export:
                export(named(model, trained.parameters), Path(options.export))


def score(world, options, trained, model, samples):
    """Print and write what the model makes of the rows of a data set."""
    with refuse_together(world):
        rows = prediction_rows(options.data or trained.source, trained, options.split, world.size)
        if not rows.labelled:
            raise UsageError(f"{rows.name} has no labels to score by; hpcdl predict predicts its rows")
        if options.probabilities and not trained.classes:
            raise UsageError("--probabilities: the run's model predicts values, which have none")

    def scored(model, file=""):
        """All that an evaluation finds; on rank 0."""
        if trained.classes:
            measures = ClassMeasures(trained.classes)
        else:
            measures = ValueMeasures(trained.outputs[0] if trained.outputs else 1, near)
        counts = predict_all(world, trained, model, rows, file, options.probabilities, measures, losses=True)
        return report(trained, rows.name, options.split, counts, measures) if world.rank == 0 else None

    near = None if trained.classes else around(world, rows)
    point = scored(model) if samples is not None else None
    found = scored(model if samples is None else samples, options.predict)
    if world.rank == 0:
        print(f"{options.run}, step {found['step']}, on {counted(found['rows'], 'row')} of {rows.name}:")
        if point is not None:
            found |= {"samples": len(samples.samples), "point_estimate": point["scores"]}
            print(f"{said(options.split, point)}  (posterior mean)")
        print(said(options.split, found) + (f"  (mean over {found['samples']:,} samples)" if samples else ""))
        for table in as_tables(found):
            console().print(table)
        if options.json:
            write_json(found, Path(options.json))


def together(world, options, trust):
    """Print and write what the members of an ensemble, and all together, make of the rows of a data set."""
    with refuse_together(world):
        for name in ("samples", "sample", "export", "model"):
            if getattr(options, name):
                raise UsageError(f"--{name} is of one run; give one of the members, {options.run}/members/0000")
        ensemble = Ensemble.read(options.run, trust).open(world.rank, world.size)
        rows = ensemble.rows(options.data or ensemble.reference.source, options.split, world.size)
        name = next(iter(rows.values())).name
        if options.probabilities and not ensemble.reference.classes:
            raise UsageError("--probabilities: the ensemble predicts values, which have none")
    near = None if ensemble.reference.classes else around(world, next(iter(rows.values())))
    how = {"file": options.predict, "every": options.probabilities, "around": near}
    counts = ensemble_scores.predict_all(world, ensemble, rows, **how)
    if world.rank == 0:
        found = ensemble_scores.evaluation_of(ensemble, name, options.split, counts)
        what = f"{options.run}, {counted(len(ensemble.members), 'member')}"
        print(f"{what}, on {counted(found['rows'], 'row')} of {name}:")
        print(f"{said(options.split, found)}  ({ensemble.combine} of the members)")
        print("  ".join(f"{each} {found[each]:.6g}" for each in ("disagreement", "spread") if each in found))
        for table in [ensemble_scores.table(found), *as_tables(found)]:
            console().print(table)
        if options.json:
            write_json(found, Path(options.json))


def act(world, options, trust):
    """Print and write the returns of episodes that what was learned plays, on rank 0."""
    with refuse_together(world):
        for name in ("data", "predict", "samples", "sample", "prompt"):
            if getattr(options, name):
                raise UsageError(f"--{name}: {options.run} has learned to act; --episodes 100 lets it")
        player = Player(options.run, options.model, trust) if world.rank == 0 else None
    with refuse_together(world):
        if world.rank == 0:
            if options.render:
                episode = player.render(Path(options.render), options.seed)
                print(f"{options.render}: return {episode.returned:g}, {counted(episode.length, 'step', ',')}")
            found = evaluation_summary(player, player.play(options.episodes or 100, options.seed), options.seed)
            what = f"{counted(found['episodes'], 'episode', ',')} of {found['environment']}"
            print(f"{options.run}, step {found['step']}, {what}:")
            spread = (
                f"from {found['return_min']:g} to {found['return_max']:g}, deviation {found['return_deviation']:.4g}"
            )
            print(f"mean return {found['return_mean']:.6g}  ({spread}), {found['length_mean']:.6g} steps")
            if options.json:
                write_json(found, Path(options.json))
            if options.export:
                export(player.network.layout.views(player.parameters), Path(options.export))


def said(split, found):
    """The scores, in a line."""
    return "  ".join(f"{split}_{name} {value:.6g}" for name, value in found["scores"].items())


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
            print(trained.schema.vocabulary.decode([*prompt, *made]))


def begun(prompt: str, model, trained) -> list[int]:
    """The tokens of a prompt, if the model writes text, and the checkpoint says what its tokens stand for."""
    if not abilities_of(model).generate:
        raise UsageError("--sample needs a model that writes text, gpt, trained on tokens; this run's model does not")
    if trained.schema.vocabulary is None:
        raise UsageError(
            f"--sample needs a vocabulary, as the data of prepare-data text have; those of {trained.name} had none"
        )
    return trained.schema.vocabulary.encode(prompt).tolist()


if __name__ == "__main__":
    main()
