"""Score a trained model, predict with it, export it: hpcdl evaluate runs/a --predict p.csv

Samples of train-sgld: --samples. Text from a gpt: hpcdl evaluate runs/t --sample 500 --prompt "def "
Episodes of a trained policy: hpcdl evaluate runs/cartpole --episodes 100 --render cartpole.gif"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.export import check_output_file, export, named, write_json
from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError
from hpcdl.formatting import counted
from hpcdl.inference.evaluation_report import as_lines, as_tables, report
from hpcdl.inference.posterior_samples import predictive
from hpcdl.inference.prediction_input import prediction_rows
from hpcdl.inference.predictions import predict_all, refuse_existing
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.launch.launch_consistency import reading
from hpcdl.launch.option_parser import parse_command_line
from hpcdl.launch.program import ended
from hpcdl.machine.display import console
from hpcdl.machine.threads import Threads
from hpcdl.models.model import abilities_of
from hpcdl.models.scores import ClassMeasures, ValueMeasures
from hpcdl.random import Random
from hpcdl.reports import evaluation_pictures
from hpcdl.rl.rollout import PICTURES, Player, evaluation_summary, is_agent_run
from hpcdl.runs.options import not_negative, option, probability
from hpcdl.search import ensemble_scores
from hpcdl.search.ensemble import Ensemble, is_ensemble


@dataclass
class EvaluateOptions:
    """Options of evaluate: what to do with the model of a run."""

    run: str = option(..., "folder of a run or of an ensemble, or a checkpoint file")
    data: str = option("", "data set to score on; by default the one of the training")
    split: Literal["test", "train"] = option("test", "which part of the data set")
    predict: str = option("", "write a prediction for each row: NAME.csv, or NAME.npz with the model's outputs")
    probabilities: bool = option(False, "with --predict: write the probabilities of all classes, not of the likeliest")
    samples: bool = option(False, "a run of train-sgld: score also the mean over all samples, and predict by it")
    threshold: float = option(0.0, "two classes: predict the second one from this probability on; 0: the likelier one")
    json: str = option("", "write the scores: NAME.json")
    pictures: str = option("", "folder for pictures: ROC, precision against recall, reliability (needs matplotlib)")
    export: str = option("", "write the parameters by name: NAME.npz or NAME.safetensors")
    force: bool = option(False, "replace existing files")
    model: str = option("", "if the run's model is your own and was moved: its package.module:Class now")
    sample: int = option(0, "instead of scoring, write a text of so many tokens; for a gpt")
    prompt: str = option("", "beginning of the text; by default the text follows token 0, or the end of a document")
    temperature: float = option(0.8, "of the text: 1 draws by the model's probabilities, 0 takes the likeliest token")
    seed: int = option(0, "seed of the text, or of the episodes")
    episodes: int = option(0, "a run that has learned to act: episodes of its greedy policy; 0: 100")
    render: str = option("", "write a video of the first episode: NAME.gif, or NAME.mp4 if there is a codec")

    def __post_init__(self):
        not_negative(self, "sample", "temperature", "episodes")
        probability(self, "threshold")
        if self.prompt and not self.sample:
            raise UsageError("--prompt begins a text; add --sample N for N tokens after it")
        if self.probabilities and not self.predict:
            raise UsageError("--probabilities are written by --predict: add --predict NAME.csv")
        if self.sample and self.samples:
            raise UsageError("--sample N writes a text, and --samples scores those of train-sgld: give one of them")
        if self.sample and (self.predict or self.json or self.pictures or self.threshold):
            other = "--predict, --json, --pictures and --threshold"
            raise UsageError(f"--sample writes a text and scores nothing; leave {other} to another call")
        check_output_file("--render", self.render, PICTURES)
        check_output_file("--predict", self.predict, (".csv", ".npz"))
        check_output_file("--export", self.export, (".npz", ".safetensors"))
        check_output_file("--json", self.json, (".json",))
        if self.pictures:
            evaluation_pictures.check(Path(self.pictures), self.force)
        written: dict[str, str] = {"--data": self.data}
        for told in ("predict", "export", "json", "render"):
            refuse_existing(f"--{told}", getattr(self, told), self.force, written)
            written[f"--{told}"] = getattr(self, told)


def main(arguments=None):
    """Score and predict rows, whose blocks go to the ranks in turn; rank 0 prints and writes."""
    world = MPI.COMM_WORLD
    with ended("evaluate", world.rank):
        with reading(world, parse_command_line) as read:
            command_line = read(EvaluateOptions, "evaluate", __doc__, arguments)
        options, trust = command_line.options, command_line.trust
        other = together if is_ensemble(options.run) else act if is_agent_run(options.run) else None
        if other is not None:
            with Threads(world):
                other(world, options, trust)
            return
        with refuse_together(world):
            for name in ("episodes", "render"):
                if getattr(options, name):
                    raise UsageError(f"--{name}: {options.run} has learned from data, and acts in no environment")
            trained = TrainedModel(options.run, trust)
            model = trained.model(options.model)
            prompt = begun(options.prompt, model, trained) if options.sample else None
            samples = predictive(options.run, trained, model) if options.samples else None
        with Threads(world):
            if options.sample:
                write(world, options, trained, model, prompt)
            else:
                score(world, options, trained, model, samples)
        with refuse_together(world):
            if world.rank == 0 and options.export:
                export(named(model, trained.parameters), Path(options.export))


def score(world, options, trained, model, samples):
    """Print and write the model's scores on the rows of a data set, and its predictions."""
    with refuse_together(world):
        rows = prediction_rows(options.data or trained.source, trained, options.split, world.size)
        if not rows.labelled:
            raise UsageError(f"{rows.name} has no labels, which scores need; hpcdl predict predicts its rows")
        if options.probabilities and not trained.classes:
            raise UsageError("--probabilities: the run's model predicts values, not classes; leave the option out")
        refuse_pictures(options, trained)
        trained.set_threshold(options.threshold)

    def scored(model, file=""):
        """Return on rank 0 the report of an evaluation of `model`, else None. file: for the predictions, if any."""
        if trained.classes:
            curves = trained.schema.vocabulary is None
            measures = ClassMeasures(trained.classes, trained.threshold, curves, trained.certain)
        else:
            measures = ValueMeasures(trained.output_names, near)
        counts = predict_all(world, trained, model, rows, file, options.probabilities, measures, losses=True)
        return report(trained, rows, options.split, counts, measures) if world.rank == 0 else None

    near = None if trained.classes else around(world, rows)
    point = scored(model) if samples is not None else None
    found = scored(model if samples is None else samples, options.predict)
    if world.rank == 0:
        print(f"{options.run}, step {found['step']}, on {counted(found['rows'], 'row')} of {rows.name}:")
        if point is not None:
            found |= {"samples": len(samples.samples), "point_estimate": point["scores"]}
            print(f"{as_lines(point)[0]}  (posterior mean)")
        show(options, found, f"  (mean over {found['samples']:,} samples)" if samples else "")


def together(world, options, trust):
    """Print and write the scores of an ensemble and of each member on the rows of a data set."""
    with refuse_together(world):
        for name in ("samples", "sample", "export", "model"):
            if getattr(options, name):
                raise UsageError(f"--{name} is for one run; give one of the members, as {options.run}/members/0000")
        ensemble = Ensemble.read(options.run, trust).open(world.rank, world.size)
        rows = ensemble.rows(options.data or ensemble.reference.source, options.split, world.size)
        name = next(iter(rows.values())).name
        if options.probabilities and not ensemble.reference.classes:
            raise UsageError("--probabilities: the ensemble predicts values, not classes; leave the option out")
        refuse_pictures(options, ensemble.reference)
        ensemble.reference.set_threshold(options.threshold)
    near = None if ensemble.reference.classes else around(world, next(iter(rows.values())))
    how = {"file": options.predict, "every": options.probabilities, "around": near}
    counts = ensemble_scores.predict_all(world, ensemble, rows, **how)
    if world.rank == 0:
        found = ensemble_scores.evaluation_of(ensemble, next(iter(rows.values())), options.split, counts)
        what = f"{options.run}, {counted(len(ensemble.members), 'member')}"
        print(f"{what}, on {counted(found['rows'], 'row')} of {name}:")
        diversity = "  ".join(f"{each} {found[each]:.6g}" for each in ("disagreement", "spread") if each in found)
        about = ensemble_scores.table(found)
        show(options, found, f"  ({ensemble.combine} of the members)", diversity, about)


def act(world, options, trust):
    """Let the learned policy play episodes on rank 0; print and write their returns."""
    with refuse_together(world):
        for name in ("data", "predict", "samples", "sample", "prompt", "pictures", "threshold"):
            if getattr(options, name):
                raise UsageError(f"--{name}: {options.run} has learned to act; let it play by --episodes 100")
        player = Player(options.run, options.model, trust) if world.rank == 0 else None
    with refuse_together(world):
        if world.rank == 0:
            if options.render:
                episode = player.render(Path(options.render), options.seed)
                print(f"{options.render}: return {episode.returned:g}, {counted(episode.length, 'step', ',')}")
            found = evaluation_summary(player, player.play(options.episodes or 100, options.seed), options.seed)
            what = f"{counted(found['episodes'], 'episode', ',')} of {found['environment']}"
            print(f"{options.run}, step {found['step']}, {what}:")
            spread = f"from {found['return_min']:g} to {found['return_max']:g}"
            spread += f", deviation {found['return_deviation']:.4g}"
            print(f"mean return {found['return_mean']:.6g}  ({spread}), {found['length_mean']:.6g} steps")
            if options.json:
                write_json(found, Path(options.json))
            if options.export:
                export(player.network.layout.views(player.parameters), Path(options.export))


def refuse_pictures(options, trained):
    """Raise UsageError if --pictures is given, and the model predicts values or writes text."""
    if options.pictures and (not trained.classes or trained.certain or trained.schema.vocabulary is not None):
        raise UsageError("--pictures show probabilities of classes, and this model predicts none; leave it out")


def show(options, found, said, *more):
    """Print an evaluation's scores and tables, and write its files. said: after the scores of the training. more: lines
    and tables between the scores and the tables."""
    first, *others = as_lines(found)
    for each in (first + said, *others, *more, *as_tables(found)):
        print(each) if isinstance(each, str) else console().print(each)
    if options.json:
        write_json(found, Path(options.json))
    if options.pictures:
        for path in evaluation_pictures.write(found, Path(options.pictures)):
            print(path)


def around(world, rows):
    """Return the first row's target, for each output, as a value near the targets; collective."""
    with refuse_together(world):
        first = next(iter(rows.blocks()), None) if world.rank == 0 else None
        y = np.zeros(0) if first is None else np.atleast_1d(np.asarray(first().y[:1], np.float64).ravel())
    return world.bcast(y)


def write(world, options, trained, model, prompt):
    """Print the text that a language model generates after `prompt`, a list of tokens (rank 0)."""
    with refuse_together(world):
        if world.rank == 0:
            drawn = Random(options.seed)("sample")
            made = model.generate(trained.parameters, prompt, options.sample, drawn, options.temperature)
            print(trained.schema.vocabulary.decode([*prompt, *made] if options.prompt else made))


def begun(prompt: str, model, trained) -> list[int]:
    """Return the tokens of a prompt. UsageError if the model does not generate text, or the run has no vocabulary."""
    if not abilities_of(model).generate:
        raise UsageError("--sample needs a model that writes text, as gpt; this run's model does not")
    if trained.schema.vocabulary is None:
        raise UsageError(f"--sample needs data with a vocabulary, as by prepare-data text; {trained.name} had none")
    vocabulary = trained.schema.vocabulary
    return vocabulary.encode(prompt or getattr(vocabulary, "end", "")).tolist()


if __name__ == "__main__":
    main()
