"""Checks before the first trial: the program has each option of the space, and accepts its values.
Every choice and both ends of every range, with the values that their conditions need, pass the program's parser and
checks. Models and optimizers are made with them on the data, which stay in memory for all trials."""

import shlex
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.data import Data, open_data
from hpcdl.errors import UsageError, line, nearest, unknown
from hpcdl.formatting import dashed
from hpcdl.launch.command_lines import DECIDED, Command, read_command
from hpcdl.metric_lines import USUAL_SCORES, base_of
from hpcdl.models import for_data
from hpcdl.plugins import is_plugin
from hpcdl.runs.evaluation import score_names
from hpcdl.runs.options import Options, kinds_of
from hpcdl.search.methods import RUNGS
from hpcdl.search.space import Space
from hpcdl.search.tasks import Values

HELD_OUT = 0.1  # default share of the training rows for the validation part
LENGTHS = ("epochs", "steps", "rounds")  # options that set the length of a trial


class Probe(NamedTuple):
    """Values checked before any trial. text: the parameter=value they test. options: all options of such a trial."""

    text: str
    values: Values
    options: Options


def read_training(text: str, ranks: int, size: int, trust: Iterable[str] = ()) -> Command:
    """Return the command of a training program on `ranks` ranks; 0: as many as its strategy needs, or 1.
    size: ranks of the job; 0: not checked. trust: values of --trust of the search. Raises UsageError."""
    if text.strip("'\"").startswith("-n"):
        raise UsageError("give the ranks of a trial by --ranks-per-trial, and begin with the program instead of -n")
    if not text or text.strip("'\"").startswith("-"):
        raise UsageError('begin with the program that trains, as in hpcdl search train-allreduce --space "lr=0.01..1"')
    if 0 < size < ranks:
        raise UsageError(f"--ranks-per-trial {ranks}: the job has {size}; start more with mpiexec -n, or give fewer")
    command = read_command(1, text, {}, size, trust)
    needed = command.training.strategy.ranks
    if needed is not None and ranks not in (0, needed):
        raise UsageError(f"--ranks-per-trial {ranks}: {command.folder[2:]} works on {needed} only")
    return command._replace(ranks=ranks or needed or 1)


def with_words(command: Command, *words: str) -> Command:
    """Return the command with the options `words` appended, to its text, too; later options win."""
    text = " ".join([command.text, *map(shlex.quote, words)])
    return command._replace(text=text, words=[*command.words, *words])


def refuse_names(space: Space, command: Command, method: str) -> None:
    """Raise UsageError for a parameter that is not an option of the program, or that the search itself sets."""
    program, options_class = command.folder[2:], command.training.strategy.options_class
    kinds, unused = kinds_of(options_class), set(getattr(options_class, "unused", ()))
    known = {dashed(name) for name in kinds if name not in (*DECIDED, *unused, "progress")}
    for name in space.names:
        option = dashed(space.owners.get(name, name))
        if option in DECIDED or option == "progress":
            raise UsageError(f"--space {name}: the search itself sets --{option} of each trial; leave it out")
        if option not in known:
            raise UsageError(f"--space {name}: {program} has no option --{option}{nearest(option, known)}")
        if option in LENGTHS and method.partition(":")[0] in RUNGS:
            raise UsageError(f"--space {name}: --method {method} sets --{option} of each trial; leave it out")


def boundary_values(space: Space) -> list[tuple[str, Values]]:
    """Return (parameter=value, values) for each choice and both ends of each range, without duplicates."""
    pairs: list[tuple[str, Values]] = []
    for parameter in space.parameters:
        ends = [parameter.bounded(end) for end in (parameter.low, parameter.high)]
        for value in parameter.choices or ends:
            unit = np.full(len(space.parameters), 0.5)  # the middle of the space, but for this value and its conditions
            pending: Any = parameter.name, value
            while pending is not None:
                name, text = pending
                unit[space.names.index(name)] = space.parameter(name).unit(text)
                pending = space.parameter(name).condition
            values = space.values(unit) | {parameter.name: value}
            if values not in [before for _, before in pairs]:
                pairs.append((f"{parameter.name}={value}", values))
    return pairs


def probes(space: Space, command: Command, read: Callable[..., Any]) -> list[Probe]:
    """Return a probe for each boundary value; read: parses options. UsageError for the first that is refused."""
    results = []
    for text, values in boundary_values(space):
        words = [f"--{name}={value}" for name, value in space.texts(values).items()]
        try:
            results.append(Probe(text, values, command.options(read, *words, "--seed=0", "--out=auto")))
        except UsageError as error:
            listed = text.replace(",", "|")
            hint = f"; a list is written {listed}" if listed != text and "expected" in str(error) else ""
            raise UsageError(f"--space {text}: {error}{hint}") from None
    return results


def with_epochs(command: Command, most: float) -> Command:
    """Return the command with `most` epochs (or rounds) per trial; 0: unchanged. UsageError for a fraction."""
    if not most:
        return command
    if most != round(most):
        raise UsageError(f"--most {most:g}: give a whole number of epochs")
    return with_words(command, f"--{length_of(command)}={most:.0f}")


def length_of(command: Command) -> str:
    """Return the option that sets the length of a training: epochs, or rounds."""
    return "rounds" if "rounds" in kinds_of(command.training.strategy.options_class) else "epochs"


def epochs_of(command: Command, method: str, options: Options) -> float:
    """Return the epochs (or rounds) of a whole trial. UsageError if the method needs epochs, but --steps is given."""
    if method.partition(":")[0] in RUNGS and length_of(command) == "epochs" and options.steps:
        raise UsageError(f"--method {method} counts epochs: give the program --epochs, or --most, instead of --steps")
    return float(getattr(options, length_of(command)))


def open_all_data(world: MPI.Intracomm, option_sets: list[Options]) -> dict[tuple, Data]:
    """Open the data of all trials; return them by `data_key`. Shared rows stay in memory. Collective; AgreedError."""
    opened_data: dict[tuple, Data] = {}
    for options in option_sets:
        key = data_key(options)
        if key not in opened_data:
            with refuse_together(world):
                opened_data[key] = open_data(
                    options.data,
                    comm=world,
                    dtype=options.dtype,
                    placement=options.placement,
                    partition="iid" if options.placement != "shared" else options.partition,
                    standardize=options.standardized,
                    augment=options.augment,
                    keep=options.placement == "shared" and not is_plugin(options.data),
                )
    return opened_data


def data_key(options: Options) -> tuple:
    """Return the key of a data set; options with the same key share the opened data."""
    return options.data, options.dtype, options.placement


def refuse_unmakeable(command: Command, candidates: list[Probe], data: dict[tuple, Data]) -> None:
    """Raise UsageError if a model, its optimizer or its batch cannot be made with one of the probes."""
    for probe in candidates:
        options, dataset = probe.options, data[data_key(probe.options)]
        try:
            model = for_data(options.model, dataset, options.dtype, loss=options.loss)
            workers = max(1, command.ranks - options.data_servers - getattr(options, "servers", 0))
            if command.training.strategy.check is not None:
                command.training.strategy.check(options, command.ranks - options.data_servers, model)
            options.make_optimizer(model, workers, dataset, 0)
        except UsageError as error:
            raise UsageError(f"--space {probe.text}: {error}") from None


def objective_of(
    name: str, command: Command, candidates: list[Probe], data: dict[tuple, Data]
) -> tuple[str, Command, str]:
    """Return the name of the trials' score, the command, with --validation if the score needs it, and a notice of both.
    name "": accuracy or rmse of the validation part: HELD_OUT of the training rows, unless the program sets the share.
    A score that evaluations only have by --scores is added to the program's.
    Raises UsageError for a score that no summary will have, or if some data have classes and others values."""
    classes = {bool(dataset.classes) for dataset in data.values()}
    if len(classes) > 1:
        raise UsageError("--space data: some data have classes and others numbers to predict; give data of one kind")
    kinds = set.intersection(*({*score_names(dataset)} for dataset in data.values()))
    parts = ["validation", *(["test"] if all(dataset.test is not None for dataset in data.values()) else [])]
    known = [f"{part}_{kind}" for part in parts for kind in score_names(next(iter(data.values()))) if kind in kinds]
    if name and name not in (known := [*known, "train_loss"]):
        raise unknown("objective", name, known)
    name = name or known[1]
    score = base_of(name)
    if score not in (*USUAL_SCORES, "train_loss"):
        also = {each for probe in candidates for each in probe.options.scores.split(",") if each}
        command = with_words(command, f"--scores={','.join(sorted({score} | also))}")
    searched = any("validation" in probe.values for probe in candidates)
    notice = f"trials are judged by their {name.replace('_', ' ')}"
    if name.startswith("validation"):
        held_out = {probe.options.validation for probe in candidates}
        if held_out == {0.0} and not searched:
            command = with_words(command, f"--validation={HELD_OUT:g}")
            held_out = {HELD_OUT}
        if 0.0 in held_out:
            raise UsageError(f"--objective {name}: a trial with --validation 0 has no such score; give more than 0")
        notice += f", on {', '.join(f'{share:.0%}' for share in sorted(held_out))} of the training rows, not trained on"
    elif name.startswith("test"):
        notice += ", as --objective says: the best of many test scores is better than the score on new rows"
    return name, command, line(notice)
