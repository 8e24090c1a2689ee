"""What every training script can be told, by the same names: one dataclass, read from the command line and from YAML.

A script with options of its own derives a dataclass from `Options` and adds fields. A field's name with dashes is the
option's name; its metadata holds the help text.
"""

import contextlib
import dataclasses
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from hpcdl.errors import UsageError

INSTEAD = {
    "epochs": "steps",
    "batch_size": "batch_per_rank",
}  # the second, where it is not 0, holds instead of the first


def option(default, text: str):
    """A field of an options dataclass, with the help text that the script prints."""
    if default is ...:  # there is none: a positional argument
        return dataclasses.field(metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass
class Options:
    """The options common to all strategies. Raises UsageError where a value makes no sense."""

    data: str = option(
        "digits", "data set: digits or text (come with the package), or an HDF5 file made by prepare-data"
    )
    placement: Literal["shared", "partitioned", "streamed"] = option(
        "shared", "rows in memory once per node, or split over the ranks, or read from the file as they are needed"
    )
    partition: str = option("iid", "which rows a rank gets: iid, by-label, shards:S, dirichlet:ALPHA or column:NAME")
    validation: float = option(0.0, "fraction of the training rows that is kept apart for validation")
    augment: str = option("", "random changes of images: shift:PIXELS, flip, or both with a comma between")
    standardize: bool = option(False, "shift and scale each feature to mean 0 and deviation 1 over the training rows")
    data_servers: int = option(0, "ranks that only hold the examples and make batches for the others; 0: none")
    model: str = option(
        "mlp", "linear, logistic, softmax, mlp:256,128 (widths of the hidden layers) or gpt:layers=4,width=128"
    )
    dtype: Literal["float32", "float64"] = option("float32", "type of parameters, gradients and messages")
    device: Literal["cpu", "cuda"] = option("cpu", "where gradients are computed: cuda takes a GPU for each rank")
    epochs: int = option(20, "passes over the training rows")
    steps: int = option(0, "number of updates, instead of --epochs")
    batch_size: int | str = option(32, "examples per update, all ranks together; full: all of them")
    batch_per_rank: int = option(0, "examples per update and rank, instead of --batch-size")
    lr: float = option(0.05, "learning rate (step size)")
    optimizer: str = option("momentum", "sgd, momentum, nesterov, adam or adamw; settings as in momentum:beta=0.9")
    schedule: str = option("cosine", "constant, step, cosine or 1/t; settings as in cosine:warmup=2")
    weight_decay: float = option(0.0, "L2 penalty per parameter (adamw: decoupled from the gradient)")
    clip_norm: float = option(0.0, "largest allowed 2-norm of the mean gradient; 0: any")
    accumulate: int = option(1, "parts in which a rank computes its share of a batch, to need less memory")
    seed: int = option(0, "seed of initial values, order of examples and augmentation")
    allreduce: str = option(
        "auto",
        "all-reduce: naive, direct, ring, tree, recursive, shared, hierarchical, mpi, or your package.module:function; "
        "auto: the fastest, as measured",
    )
    out: str = option("none", "folder that the run writes; none: nothing is written; auto: runs/STRATEGY-TIME")
    resume: str = option("", "folder of a run to go on with, from its last checkpoint")
    checkpoint_every: int = option(0, "updates between checkpoints; 0: only when the run ends")
    keep: int = option(1, "how many of the last checkpoints are kept, beside the best")
    evaluate_every: int = option(1, "epochs between evaluations")
    patience: int = option(0, "end after so many evaluations without a better validation loss; 0: never")
    time_limit: float = option(0.0, "seconds after which the run ends in good order; 0: none")
    timeout: float = option(0.0, "seconds that a rank may wait in one communication before the job is ended; 0: any")
    straggler: str = option("", "make computing slower: RANK:FACTOR, or random:PROBABILITY:FACTOR")
    pretend_compute: float = option(0.0, "milliseconds that a gradient takes at least; the rest is slept")
    trace: int = option(2000, "spans per rank kept for trace.json; 0: no trace")
    progress: Literal["auto", "bar", "lines", "none"] = option("auto", "how a run shows how far it is")

    def __post_init__(self):
        if isinstance(self.batch_size, str) and self.batch_size != "full":
            try:
                self.batch_size = int(self.batch_size)
            except ValueError:
                raise UsageError(f"--batch-size: a number of examples, or full, not {self.batch_size!r}") from None
        for name in ("lr", "epochs", "batch_size", "accumulate", "keep", "evaluate_every"):
            value = getattr(self, name)
            if value != "full" and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {value}")
        for name in ("steps", "batch_per_rank", "weight_decay", "clip_norm", "checkpoint_every", "patience"):
            self._refuse_negative(name)
        for name in ("time_limit", "timeout", "pretend_compute", "trace", "seed"):
            self._refuse_negative(name)
        if not 0 <= self.validation < 1:
            raise UsageError(f"--validation is a fraction, at least 0 and less than 1, not {self.validation}")
        if self.patience and not self.validation:
            raise UsageError("--patience looks at the validation loss; add --validation FRACTION")

    def _refuse_negative(self, name):
        value = getattr(self, name)
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must not be negative, and is {value}")

    @property
    def rate_schedule(self) -> str:
        """The schedule of the learning rate; where a script has another --schedule, this one has another name."""
        return self.schedule

    def plan(self, ranks: int, data) -> tuple[int, int, int]:
        """Examples per update, updates per epoch, updates in all."""
        batch = self.global_batch(ranks, data.examples)
        per_epoch = data.steps_per_epoch(batch)
        return batch, per_epoch, self.steps or self.epochs * per_epoch

    def make_optimizer(self, model, plan: tuple[int, int, int], size: int | None = None):
        """The optimizer for `size` parameters (default: all of the model's), where `plan` is what `plan` returns."""
        from hpcdl.kernels.device import CPU  # here: who only reads options needs no kernels
        from hpcdl.optim import make_optimizer, make_schedule

        batch, per_epoch, steps = plan
        schedule = make_schedule(self.rate_schedule, self.lr, steps, per_epoch, batch)
        size = model.layout.size if size is None else size
        device = getattr(model, "device", CPU)
        return make_optimizer(
            self.optimizer, size, model.layout.dtype, schedule, self.weight_decay, self.clip_norm, device
        )

    def global_batch(self, ranks: int, examples: int) -> int:
        """Examples per update, all ranks together."""
        if self.batch_per_rank:
            return self.batch_per_rank * ranks
        return examples if self.batch_size == "full" else self.batch_size


def parser(options_class: type, program: str, description: str):
    """The command line of a script, as a jsonargparse parser; a field without a default is a positional argument."""
    from jsonargparse import ArgumentParser  # here: a library user who fills in Options needs no parser

    made = ArgumentParser(prog=program, description=description, exit_on_error=False, allow_abbrev=False)
    made.add_argument("--config", action="config", help="YAML file with options, as a run writes it into its folder")
    for field in dataclasses.fields(options_class):
        name, text = "--" + field.name.replace("_", "-"), field.metadata["help"].replace("%", "%%")
        if field.default is dataclasses.MISSING:
            made.add_argument(field.name, type=field.type, help=text)
        elif field.type is bool:
            made.add_argument(name, action="store_true", help=text)
        else:
            made.add_argument(name, type=field.type, default=field.default, help=text)
    return made


def parse(options_class: type, program: str, description: str, arguments: list[str] | None = None):
    """Read the command line into an `options_class`; with --resume DIR, the options of that run are the defaults.

    It may be a run of another program, whose own options are then left out.

    Raises UsageError, one line, for an unknown option, a bad value or a file that is missing.
    """
    from jsonargparse import ArgumentError

    made, names = parser(options_class, program, description), [each.name for each in dataclasses.fields(options_class)]
    if "resume" in names:
        made.set_defaults(out="auto")
    try:
        found = made.parse_args(arguments)
        if found.get("resume"):
            config = Path(found.resume, "config.yaml")
            if not os.path.isfile(config):
                raise UsageError(f"--resume {found.resume}: there is no run in that folder (config.yaml is missing)")
            with understood(config, names) as config:
                made.default_config_files = [str(config)]
                made.set_defaults(out=found.resume)
                found = made.parse_args(arguments)
    except ArgumentError as error:
        raise UsageError(one_line(str(error))) from None
    for name, instead in INSTEAD.items():
        if name in names and given(name, arguments):
            if given(instead, arguments):
                raise UsageError(f"give --{name.replace('_', '-')} or --{instead.replace('_', '-')}, not both")
            found[instead] = 0  # what a configuration file says of it holds no longer
    return options_class(**{name: found[name] for name in names})


@contextlib.contextmanager
def understood(config: Path, names: list[str]):
    """The path of a configuration that has only options with these names: itself, or a copy for a while.

    The schedule of the learning rate is called lr_schedule where there is another one.
    """
    try:
        found = yaml.safe_load(config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    known = isinstance(found, dict)
    renamed = known and ("lr_schedule" in found) != ("lr_schedule" in names)
    if not known or (found.keys() <= set(names) and not renamed):
        yield config  # as it is, or for the parser to say what is wrong with it
        return
    if renamed:
        schedule = found.pop("lr_schedule", found.pop("schedule", None))
        found["lr_schedule" if "lr_schedule" in names else "schedule"] = schedule
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, config.name)
        copy.write_text(yaml.safe_dump({name: value for name, value in found.items() if name in names}))
        yield copy


def given(name: str, arguments: list[str] | None) -> bool:
    """Whether the option is on the command line itself."""
    option = "--" + name.replace("_", "-")
    return any(text == option or text.startswith(option + "=") for text in arguments or sys.argv[1:])


def one_line(message: str) -> str:
    """The parser's message as one line in the words of the command line."""
    message = re.sub(r"\s*\n\s*", " ", message)
    message = re.sub(r'Parser key "(\w+)":', lambda found: "--" + found[1].replace("_", "-") + ":", message)
    message = re.sub(r"Expected a typing.Literal\[(.*?)\]\.", r"expected one of \1.", message)
    for kind, word in {"int": "a whole number", "float": "a number", "str": "a text"}.items():
        message = message.replace(f"Expected a <class '{kind}'>", f"expected {word}")
    return re.sub(r"\. Got value: (.*)$", r", not \1", message)
