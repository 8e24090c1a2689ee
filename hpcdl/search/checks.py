"""What can be known of a search before its first trial: whether each option of the space is one, and takes its values.

names       options that the program has, and that neither the search nor its method decides
values      every choice, and both ends of every range, with what their conditions ask for, are put through the
            program's own parser and checks
data        are opened once, by all ranks, and stay in memory for all trials (hpcdl/data/row_cache.py)
models      of these values are made, with their optimizers, on these data
objective   an entry of the summaries that there will be
"""

import shlex
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.data import Data, open_data
from hpcdl.errors import UsageError, line, nearest, unknown
from hpcdl.launch.command_lines import DECIDED, Command, read_command
from hpcdl.models import for_data
from hpcdl.plugins import is_own
from hpcdl.runs.help import dashed
from hpcdl.runs.options import Options, kinds_of
from hpcdl.search.methods import RUNGS
from hpcdl.search.space import Parameter, Space
from hpcdl.search.tasks import Values

HELD_OUT = 0.1  # of the training rows, where trials are judged by them and nobody has said how many
LENGTHS = ("epochs", "steps", "rounds")  # options that say how long a trial is
LARGER = ("accuracy",)  # how the names of scores end of which more is better


class Probe(NamedTuple):
    """Values that are tried before any trial, for the sake of the parameter `text`; and all options with them."""

    text: str
    values: Values
    options: Options


def read_training(text: str, ranks: int, size: int, trust: Iterable[str] = ()) -> Command:
    """The line of the program that trains, on `ranks` of `size` ranks; 0: on one, or as few as it takes.

    trust: the values of --trust of the search. Raises UsageError.
    """
    if text.strip("'\"").startswith("-n"):
        raise UsageError("a trial's ranks are told by --ranks-per-trial, and the program comes first")
    if not text or text.strip("'\"").startswith("-"):
        raise UsageError('the program that trains comes first, as in hpcdl search train-allreduce --space "lr=0.01..1"')
    if 0 < size < ranks:
        raise UsageError(f"--ranks-per-trial {ranks}: there are {size}; start more with mpiexec -n, or give fewer")
    found = read_command(1, text, {}, size, trust)
    needed = found.training.ranks
    if needed is not None and ranks not in (0, needed):
        raise UsageError(f"--ranks-per-trial {ranks}: {found.folder[2:]} works on {needed}")
    return found._replace(ranks=ranks or needed or 1)


def with_words(command: Command, *words: str) -> Command:
    """The command with more options, which win, in its text, too."""
    text = " ".join([command.text, *map(shlex.quote, words)])
    return command._replace(text=text, words=[*command.words, *words])


# -- names and values --------------------------------------------------------------------------------------------------


def refuse_names(space: Space, command: Command, method: str) -> None:
    """Raise UsageError for a parameter that is no option of the program, or one that is not for a search."""
    program, options_class = command.folder[2:], command.training.options_class
    kinds, unused = kinds_of(options_class), set(getattr(options_class, "unused", ()))
    known = {dashed(name) for name in kinds if name not in (*DECIDED, *unused, "progress")}
    for name in space.names:
        option = dashed(space.owners.get(name, name))
        if option in DECIDED or option == "progress":
            raise UsageError(f"--space {name}: the search itself decides --{option} of each trial")
        if option not in known:
            raise UsageError(f"--space {name}: {program} has no option --{option}{nearest(option, known)}")
        if option in LENGTHS and method.partition(":")[0] in RUNGS:
            raise UsageError(f"--space {name}: --method {method} decides how long a trial is; leave it out")


def to_be_tried(space: Space) -> list[tuple[str, Values]]:
    """Values with each choice, and both ends of each range, and for the sake of which parameter; none twice."""
    found: list[tuple[str, Values]] = []
    for each in space.parameters:
        ends = each.choices if each.kind == "choice" else [each.bounded(end) for end in (each.low, each.high)]
        for value in ends:
            values = values_with(space, each, value)
            if values not in [before for _, before in found]:
                found.append((f"{each.name}={value}", values))
    return found


def values_with(space: Space, parameter: Parameter, value: Any) -> Values:
    """Values of the space, in its middle but where `parameter` is this one, and what its condition asks for is so."""
    unit = np.full(len(space.parameters), 0.5)
    wanted: Any = parameter.name, value
    while wanted is not None:
        name, text = wanted
        unit[space.names.index(name)] = space.parameter(name).unit(text)
        wanted = space.parameter(name).condition
    return space.values(unit) | {parameter.name: value}


def probes(space: Space, command: Command, read: Callable[..., Any]) -> list[Probe]:
    """All that is to be tried, as options. Raises UsageError for the first that the program does not take."""
    found = []
    for text, values in to_be_tried(space):
        words = [f"--{name}={value}" for name, value in space.texts(values).items()]
        try:
            found.append(Probe(text, values, command.options(read, *words, "--seed=0", "--out=auto")))
        except UsageError as error:
            raise UsageError(f"--space {text}: {error}") from None
    return found


# -- how long a trial is -----------------------------------------------------------------------------------------------


def with_epochs(command: Command, most: float) -> Command:
    """The command with whole trials of so many epochs, or rounds where these count; 0: as it is."""
    if not most:
        return command
    if most != round(most):
        raise UsageError(f"--most: a whole trial has a whole number of epochs, not {most:g}")
    return with_words(command, f"--{length_of(command)}={most:.0f}")


def length_of(command: Command) -> str:
    """The option that says how long a training is: epochs, or rounds."""
    return "rounds" if "rounds" in kinds_of(command.training.options_class) else "epochs"


def epochs_of(command: Command, method: str, options: Options) -> float:
    """How many epochs a whole trial has. Raises UsageError where a method counts in them, and the program in steps."""
    if method.partition(":")[0] in RUNGS and length_of(command) == "epochs" and options.steps:
        raise UsageError(f"--method {method} counts in epochs: give the program --epochs, or --most, and no --steps")
    return float(getattr(options, length_of(command)))


# -- data, models and the objective ------------------------------------------------------------------------------------


def opened(world: MPI.Intracomm, tried: list[Options]) -> dict[tuple, Data]:
    """The data of all trials, by `of_data`, whose rows in memory stay for these; collective. Raises AgreedError."""
    found: dict[tuple, Data] = {}
    for options in tried:
        key = of_data(options)
        if key not in found:
            with refuse_together(world):
                found[key] = open_data(
                    options.data,
                    comm=world,
                    dtype=options.dtype,
                    placement=options.placement,
                    partition="iid" if options.placement != "shared" else options.partition,
                    standardize=options.standardized,
                    augment=options.augment,
                    keep=options.placement == "shared" and not is_own(options.data),
                )
    return found


def of_data(options: Options) -> tuple:
    """What tells data that have to be looked at from others."""
    return options.data, options.dtype, options.placement


def refuse_unmakeable(command: Command, tried: list[Probe], data: dict[tuple, Data]) -> None:
    """Raise UsageError where a model, its optimizer or what a batch is cannot be had with the values that are tried."""
    for each in tried:
        options, of = each.options, data[of_data(each.options)]
        try:
            model = for_data(options.model, of, options.dtype, loss=options.loss)
            workers = max(1, command.ranks - options.data_servers - getattr(options, "servers", 0))
            if command.training.check is not None:
                command.training.check(options, command.ranks - options.data_servers, model)
            options.make_optimizer(model, options.plan(workers, of), 0)
        except UsageError as error:
            raise UsageError(f"--space {each.text}: {error}") from None


def objective_of(name: str, command: Command, tried: list[Probe], data: dict[tuple, Data]) -> tuple[str, Command, str]:
    """By what trials are judged, the command with the rows for that held out, and what is to be said of it.

    Without a name by the validation part, of a tenth of the training rows where the program is told of none; by the
    test part only where it is named. Raises UsageError for what no summary will have.
    """
    classes = {bool(of.classes) for of in data.values()}
    if len(classes) > 1:
        raise UsageError("--space data: some have classes and others numbers to predict; scores of both do not compare")
    kinds = ("loss", "accuracy") if classes == {True} else ("loss", "rmse")
    parts = ["validation", *(["test"] if all(of.test is not None for of in data.values()) else [])]
    known = [f"{part}_{kind}" for part in parts for kind in kinds] + ["train_loss"]
    if name and name not in known:
        raise unknown("objective", name, known)
    name = name or f"validation_{kinds[1]}"
    searched = any("validation" in each.values for each in tried)
    said = f"trials are judged by their {name.replace('_', ' ')}"
    if name.startswith("validation"):
        held_out = {each.options.validation for each in tried}
        if held_out == {0.0} and not searched:
            command = with_words(command, f"--validation={HELD_OUT:g}")
            held_out = {HELD_OUT}
        if 0.0 in held_out:
            raise UsageError(f"--objective {name}: --validation 0 keeps no rows for that")
        said += f", on {', '.join(f'{each:.0%}' for each in sorted(held_out))} of the training rows, kept apart"
    elif name.startswith("test"):
        said += ", as was asked for: the best of many is then no fair guess of what it is on other rows"
    return name, command, line(said)


def larger_is_better(objective: str) -> bool:
    """Whether more of it is better: of accuracies, not of losses."""
    return objective.endswith(LARGER)
