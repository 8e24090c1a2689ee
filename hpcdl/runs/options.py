"""What every training script can be told, by the same names: one dataclass, read from the command line and from YAML.

A script with options of its own derives a dataclass from `Options` and adds fields. A field's name with dashes is the
option's name; its metadata holds the help text. A value in a file is read as if it stood on the command line.
"""

import contextlib
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_type_hints

from hpcdl.errors import UsageError, nearest, parse_finite, parse_integer, refuse_beyond
from hpcdl.faults.clock import LONGEST
from hpcdl.faults.inject import parse_faults as read_faults
from hpcdl.formatting import counted, dashed
from hpcdl.memory import available
from hpcdl.runs.metric_logs import forms
from hpcdl.runs.stopping import Budget

if TYPE_CHECKING:
    from hpcdl.optim import Optimizer

MOST_RECORDS = 1_000_000  # of a flight recorder: 64 MB for each rank
INSTEAD = {"epochs": "steps", "batch_size": "batch_per_rank"}  # the second, where not 0, holds instead of the first


def option(default: Any, text: str, group: str = "", bare: str = "") -> Any:
    """A field of an options dataclass, with the help text that the script prints.

    A field without a default (...) stands on the command line beside the options; of `list[str]` several do, one at
    least, and with the default `list` none need be there.

    group: under which heading it stands there (hpcdl/launch/help.py), for options that all programs have that train.
    bare: its value where it is given alone.
    """
    about = {"help": text, "group": group} | ({"bare": bare} if bare else {})
    if default is ...:  # there is none: a positional argument
        return dataclasses.field(metadata=about)
    if default is list:
        return dataclasses.field(default_factory=list, metadata=about)
    return dataclasses.field(default=default, metadata=about)


CHECKS = ("collectives", "replicas=STEPS")


class Checks(NamedTuple):
    """What --check asks for.

    collectives: whether what ranks call together is compared (diagnostics/collective_checker.py).
    replicas: after so many steps what they hold (agreeing_replicas.py), or 0.
    """

    collectives: bool = False
    replicas: int = 0

    @property
    def asked(self) -> bool | None:
        """As `Communicator` takes it: None leaves it to the environment."""
        return self.collectives or None

    @classmethod
    def read(cls, text: str) -> "Checks":
        """From the option, as collectives,replicas=10. Raises UsageError."""
        found = cls()
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if item == "collectives":
                found = found._replace(collectives=True)
            elif name == "replicas":
                found = found._replace(replicas=steps_of(value))
            else:
                near = nearest(name, ("collectives", "replicas"))
                raise UsageError(f"--check: unknown check {item!r}{near}; known: {', '.join(CHECKS)}")
        return found


def steps_of(text: str) -> int:
    try:
        steps = parse_integer(text)
    except ValueError:
        steps = 0
    if steps < 1:
        raise UsageError(f"--check replicas=STEPS takes a number of steps, as replicas=10, not {text!r}")
    return steps


@dataclass(frozen=True)
class Options:
    """The options common to all strategies, which `dataclasses.replace` changes. Raises UsageError for a bad value.

    What a run is told beside them stands in its `RunContext` (context.py).
    """

    unused: ClassVar[tuple[str, ...]] = ()  # names of common options that mean nothing to this program

    data: str = option(
        "digits",
        "data set: digits or text (come with the package), an HDF5 file made by prepare-data, or your "
        "package.module:function, which returns x and y, or x, y, x_test and y_test",
        group="data",
    )
    placement: Literal["shared", "partitioned", "streamed"] = option(
        "shared",
        "rows in memory once per node, or split over the ranks, or read from the file as they are needed",
        group="data",
    )
    partition: str = option(
        "iid", "which rows a rank gets: iid, by-label, shards:S, dirichlet:ALPHA or column:NAME", group="data"
    )
    validation: float = option(0.0, "fraction of the training rows that is kept apart for validation", group="data")
    augment: str = option(
        "", "random changes of images: shift:PIXELS, flip, or both with a comma between", group="data"
    )
    standardize: Literal["auto", "yes", "no"] = option(
        "auto",
        "shift and scale each feature to mean 0 and deviation 1 over the training rows; auto: those of tables",
        group="data",
        bare="yes",
    )
    data_servers: int = option(
        0, "ranks that only hold the examples and make batches for the others; 0: none", group="data"
    )
    model: str = option(
        "mlp",
        "linear, logistic, svm, softmax, mlp:256,128 (widths of the hidden layers), gpt:layers=4,width=128, or your "
        "package.module:Class,width=3, or torch:package.module:function, which makes a module of PyTorch's",
        group="model",
    )
    initial: str = option(
        "",
        "initial values by name instead of drawn ones: a file NAME.safetensors, .npz, .pt or .pth (of a state_dict), "
        "or a run's folder or checkpoint",
        group="model",
    )
    loss: str = option("squared", "of a regression: squared, or huber:delta=1, which outliers move less", group="model")
    dtype: Literal["float32", "float64", "bfloat16"] = option(
        "float32", "type of parameters, gradients, messages; bfloat16 (torch:...): float32, computed so", group="model"
    )
    device: Literal["cpu", "cuda"] = option(
        "cpu", "where gradients are computed: cuda takes a GPU for each rank", group="model"
    )
    epochs: int = option(20, "passes over the training rows", group="optimization")
    steps: int = option(0, "number of updates, instead of --epochs", group="optimization")
    batch_size: int | str = option(
        32, "examples per update, all ranks together; full: all of them", group="optimization"
    )
    batch_per_rank: int = option(0, "examples per update and rank, instead of --batch-size", group="optimization")
    lr: float = option(0.05, "learning rate (step size)", group="optimization")
    optimizer: str = option(
        "momentum",
        "sgd, momentum, nesterov, adam, adamw, adagrad, as in momentum:beta=0.9; or a rule of torch.optim, as "
        "torch:AdamW,betas=(0.9,0.95)",
        group="optimization",
    )
    schedule: str = option(
        "cosine", "constant, step, cosine, 1/t or polynomial; settings as in cosine:warmup=2", group="optimization"
    )
    weight_decay: float = option(
        0.0, "L2 penalty per parameter (adamw: decoupled from the gradient)", group="optimization"
    )
    average: str = option(
        "",
        "score and save the mean of the parameters after each update from an epoch on (Polyak and Ruppert), as from=5",
        group="optimization",
        bare="from=0",
    )
    clip_norm: float = option(0.0, "largest allowed 2-norm of the mean gradient; 0: any", group="optimization")
    accumulate: int = option(
        1, "parts in which a rank computes its share of a batch, to need less memory", group="optimization"
    )
    seed: int = option(0, "seed of initial values, order of examples and augmentation", group="run")
    allreduce: str = option(
        "auto",
        "all-reduce: naive, direct, ring, tree, recursive, shared, hierarchical, mpi, or your package.module:function; "
        "auto: the fastest, as measured",
        group="run",
    )
    out: str = option(
        "none", "folder that the run writes; none: nothing is written; auto: runs/STRATEGY-TIME", group="run"
    )
    force: bool = option(False, "replace what another run has left in --out; other files there stay", group="run")
    resume: str = option(
        "", "folder of a run to go on with, from its last checkpoint; or a checkpoint file in it", group="run"
    )
    checkpoint_every: int = option(0, "updates between checkpoints; 0: only when the run ends", group="run")
    keep: int = option(
        2,
        "how many of the last checkpoints are kept, beside the best; where one is damaged the one before is taken",
        group="run",
    )
    checkpoint_async: bool = option(
        False, "write checkpoints in the background: a step pays for a copy, and memory for it", group="run"
    )
    checkpoint_must: bool = option(
        False, "end the run where a checkpoint cannot be written, instead of going on with a warning", group="run"
    )
    evaluate_every: int = option(1, "epochs between evaluations", group="run")
    patience: int = option(0, "end after so many evaluations without a better validation loss; 0: never", group="run")
    time_limit: float = option(0.0, "seconds after which the run ends in good order; 0: none", group="run")
    budget: str = option(
        "",
        "what the training may use, if its epochs or steps do not end before: seconds=60, bytes=1e9 (of all ranks), "
        "examples=1e6, or several with commas between",
        group="run",
    )
    timeout: float = option(
        0.0, "seconds that a rank may wait in one communication before the job is ended; 0: any", group="run"
    )
    check: str = option(
        "",
        "look for mistakes on the way: collectives (whether the ranks call the same together), replicas=STEPS (whether "
        "they hold the same, every so many steps), or both with a comma between",
        group="run",
    )
    straggler: str = option("", "make computing slower: RANK:FACTOR, or random:PROBABILITY:FACTOR", group="run")
    inject: str = option(
        "",
        "faults on purpose, for drills, with blanks between: kill, stop, exit, exception, slow, corrupt, diskfull, "
        "memory, clock, random, as kill:rank=1,step=20",
        group="run",
    )
    pretend_compute: float = option(0.0, "milliseconds that a gradient takes at least; the rest is slept", group="run")
    log: str = option(
        "none", "write metrics for other tools, too: csv, tensorboard, or both with a comma between", group="run"
    )
    trace: int = option(2000, "last spans per rank kept for trace.json; 0: no trace", group="run")
    flight: int = option(
        1000,
        "last operations per rank that are recorded for hpcdl postmortem, in the run's folder; 0: none",
        group="run",
    )
    progress: Literal["auto", "bar", "lines", "none"] = option("auto", "how a run shows how far it is", group="run")

    def __post_init__(self) -> None:
        if isinstance(self.standardize, bool):  # of a program
            object.__setattr__(self, "standardize", "yes" if self.standardize else "no")
        if isinstance(self.batch_size, str) and self.batch_size != "full":
            try:
                object.__setattr__(self, "batch_size", parse_integer(self.batch_size))
            except ValueError:
                raise UsageError(f"--batch-size: a number of examples, or full, not {self.batch_size!r}") from None
        for name in ("lr", "epochs", "batch_size", "accumulate", "keep", "evaluate_every"):
            value = getattr(self, name)
            if value != "full" and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} must be greater than 0, not {value}")
        for name in ("steps", "batch_per_rank", "weight_decay", "clip_norm", "checkpoint_every", "patience"):
            self._refuse_negative(name)
        for name in ("time_limit", "timeout", "pretend_compute", "trace", "flight", "seed"):
            self._refuse_negative(name)
        for name in ("time_limit", "timeout", "pretend_compute"):
            if getattr(self, name) > LONGEST:
                raise UsageError(f"--{dashed(name)} is {LONGEST:,.0f} at most, not {getattr(self, name)}")
        forms(self.log)
        read_faults(self.inject)
        if not 0 <= self.validation < 1:
            raise UsageError(f"--validation is a fraction, at least 0 and less than 1, not {self.validation}")
        _ = self.allowance, self.checks
        if self.flight > MOST_RECORDS:
            raise UsageError(f"--flight is {MOST_RECORDS:,} at most, not {self.flight}")
        first_update(self.average)
        if self.patience and not self.validation:
            raise UsageError("--patience looks at the validation loss; add --validation FRACTION")

    @functools.cached_property
    def allowance(self) -> Budget:
        """What --budget says."""
        return Budget.read(self.budget)

    @functools.cached_property
    def checks(self) -> Checks:
        """What --check says."""
        return Checks.read(self.check)

    @property
    def standardized(self) -> bool | str:
        """As `open_data` is told."""
        return {"yes": True, "no": False}.get(self.standardize, "auto")

    def _refuse_negative(self, name: str) -> None:
        value = getattr(self, name)
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must not be negative, and is {value}")

    @property
    def rate_schedule(self) -> str:
        """The schedule of the learning rate; where a script has another --schedule, this one has another name."""
        return self.schedule

    @property
    def advice(self) -> str:
        """What may help where a loss is no number any more."""
        return "a smaller --lr or a --clip-norm may help"

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Examples per update, updates per epoch, updates in all."""
        batch = self.global_batch(ranks, data.examples)
        per_epoch = data.steps_per_epoch(batch)
        self.refuse_more_parts("accumulate", min(batch, data.examples))
        return batch, per_epoch, self.allowance.steps(self.steps or self.epochs * per_epoch, batch)

    def refuse_more_parts(self, name: str, examples: int) -> None:
        """Raise UsageError where an option asks for more parts of a batch than that has examples."""
        parts = getattr(self, name)
        if parts > examples:
            raise UsageError(
                f"--{dashed(name)} {parts}: a batch has {counted(examples, 'example')}, and so many parts at most"
            )

    def make_optimizer(self, model: Any, ranks: int, data: Any, size: int | None = None) -> "Optimizer":
        """The optimizer for `size` parameters (default: all of the model's), of a run of so many ranks."""
        from hpcdl.models.model import abilities_of  # here: who only reads options needs no kernels
        from hpcdl.optim import make_optimizer, make_schedule

        batch, per_epoch, steps = self.plan(ranks, data)
        schedule = make_schedule(self.rate_schedule, self.lr, steps, per_epoch, batch)
        if size is None:
            self.refuse_too_large(model, 1)
            size = model.layout.size
        how = schedule, self.weight_decay, self.clip_norm, abilities_of(model).device
        average_from = first_update(self.average, per_epoch, steps)
        return make_optimizer(self.optimizer, size, model.layout.dtype, *how, average_from)

    def refuse_too_large(self, model: Any, ranks: int) -> None:
        """Raise UsageError where so many ranks cannot hold the model: parameters, a gradient, the optimizer's vectors.

        Where all ranks hold all of it, `ranks` is 1. Of what a GPU has to hold, the host makes the parameters.
        """
        from hpcdl.optim import vectors_of

        vectors = 2 + len(vectors_of(self.optimizer)) + bool(self.average) if self.device == "cpu" else 1
        needed = vectors * model.layout.size * model.layout.dtype.itemsize // ranks
        refuse_beyond(
            f"--model {self.model}, of {counted(model.layout.size, 'parameter', ',')}, on each rank",
            needed,
            available(),
        )

    def environment_steps(self, workers: int) -> int:
        """Environment steps of a step of so many workers; 0: of a run that learns from data."""
        return 0

    def global_batch(self, ranks: int, examples: int) -> int:
        """Examples per update, all ranks together."""
        if self.batch_per_rank:
            return self.batch_per_rank * ranks
        return examples if isinstance(self.batch_size, str) else self.batch_size


def first_update(text: str, per_epoch: int = 1, steps: int = 1) -> int | None:
    """The update, of `steps`, with which the mean begins, from a text as from=5 (epochs); "": None. UsageError."""
    if not text:
        return None
    name, _, number = text.partition("=")
    with contextlib.suppress(ValueError):
        if name == "from" and parse_finite(number) >= 0:
            return round(min(parse_finite(number) * per_epoch, steps))
    raise UsageError(f"--average {text}: say with which epoch the mean of the parameters begins, as from=5")


def kinds_of(options_class: type) -> dict[str, Any]:
    """The types of an options dataclass by the names of its fields."""
    hints = get_type_hints(options_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(options_class)}


COMMON = kinds_of(Options)  # the options of all programs that train
