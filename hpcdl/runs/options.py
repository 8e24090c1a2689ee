"""The options that all training scripts share: one dataclass, read from the command line and from YAML.

A script with options of its own derives a dataclass and adds fields. A field's name with dashes is the option's name;
its metadata holds the help text. A value in a file is read as if it stood on the command line."""

import contextlib
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_type_hints

from hpcdl.errors import UsageError, nearest, parse_finite, parse_integer, refuse_beyond, unknown
from hpcdl.faults.inject import LONGEST
from hpcdl.faults.inject import parse_faults as read_faults
from hpcdl.formatting import counted, dashed
from hpcdl.memory import available
from hpcdl.metric_lines import CLASS_SCORES, USUAL_SCORES, VALUE_SCORES, base_of
from hpcdl.plugins import is_mixture
from hpcdl.runs.metric_logs import forms
from hpcdl.runs.stopping import Budget, Goal

if TYPE_CHECKING:
    from hpcdl.optim import Optimizer

MOST_RECORDS = 1_000_000  # of a flight recorder: 64 MB for each rank
INSTEAD = {"epochs": "steps", "batch_size": "batch_per_rank"}  # option -> the option that replaces it, unless 0


def option(default: Any, text: str, group: str = "", bare: str = "") -> Any:
    """Return a field of an options dataclass, with its help text. default: `...` for a positional argument (of type
    `list[str]`: one or more words); `list` for any number of positional words. group: the heading in the help text
    (hpcdl/launch/help.py), for options of all training programs. bare: the option's value if it is given alone."""
    about = {"help": text, "group": group} | ({"bare": bare} if bare else {})
    if default is ...:  # there is none: a positional argument
        return dataclasses.field(metadata=about)
    if default is list:
        return dataclasses.field(default_factory=list, metadata=about)
    return dataclasses.field(default=default, metadata=about)


def positive(options: Any, *names: str) -> None:
    """Raise UsageError unless these options are above 0, and finite."""
    for name in names:
        if not 0 < getattr(options, name) < math.inf:
            raise UsageError(f"--{dashed(name)} must be greater than 0, not {getattr(options, name)}")


def not_negative(options: Any, *names: str) -> None:
    """Raise UsageError unless these options are 0 or more, and finite."""
    for name in names:
        if not 0 <= getattr(options, name) < math.inf:
            raise UsageError(f"--{dashed(name)} must not be negative, and is {getattr(options, name)}")


def probability(options: Any, *names: str) -> None:
    """Raise UsageError unless these options are at least 0 and less than 1."""
    for name in names:
        if not 0 <= getattr(options, name) < 1:
            value = getattr(options, name)
            raise UsageError(f"--{dashed(name)} is a probability, at least 0 and less than 1, not {value}")


def check_zero_stage(stage: int) -> None:
    """Raise UsageError if it is none of ZeRO's stages; 0: copies."""
    if stage not in range(4):
        raise UsageError(f"--stage is 0, 1, 2 or 3, not {stage}")


def refuse(*cases: tuple[object, str]) -> None:
    """Raise UsageError with the message of the first case, (condition, message), whose condition holds."""
    for condition, message in cases:
        if condition:
            raise UsageError(message)


CHECKS = ("collectives", "replicas=STEPS")


class Checks(NamedTuple):
    """The parsed --check. collectives: True to compare the ranks' collective calls (diagnostics/collective_checker.py).
    replicas: steps between comparisons of the ranks' vectors (agreeing_replicas.py); 0: none."""

    collectives: bool = False
    replicas: int = 0

    @classmethod
    def read(cls, text: str) -> "Checks":
        """Parse the option, such as collectives,replicas=10. Raises UsageError."""
        found = cls()
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if item == "collectives":
                found = found._replace(collectives=True)
            elif name == "replicas":
                steps = 0
                with contextlib.suppress(ValueError):
                    steps = parse_integer(value)
                if steps < 1:
                    raise UsageError(f"--check replicas=STEPS takes a number of steps, as replicas=10, not {value!r}")
                found = found._replace(replicas=steps)
            else:
                near = nearest(name, ("collectives", "replicas"))
                raise UsageError(f"--check: unknown check {item!r}{near}; known: {', '.join(CHECKS)}")
        return found


of_data, of_model, of_training, of_run = (
    functools.partial(option, group=name) for name in ("data", "model", "optimization", "run")
)


@dataclass(frozen=True)
class Options:
    """The options common to all strategies; other settings stand in `RunContext`. Raises UsageError for a bad value."""

    unused: ClassVar[tuple[str, ...]] = ()  # names of common options that mean nothing to this program

    data: str = of_data(
        "digits",
        "data set: digits or text (come with the package), an HDF5 file made by prepare-data, your "
        "package.module:function, which returns x and y, or x, y, x_test and y_test; or mix:A=0.7,B=0.3, several files "
        "with their shares of each batch",
    )
    placement: Literal["shared", "partitioned", "streamed"] = of_data(
        "shared", "rows in memory once per node, or split over the ranks, or read from the file as they are needed"
    )
    shuffle_window: int = of_data(8, "placement streamed: blocks of 8 MB among which the rows of an epoch are shuffled")
    partition: str = of_data("iid", "which rows a rank gets: iid, by-label, shards:S, dirichlet:ALPHA or column:NAME")
    validation: float = of_data(0.0, "fraction of the training rows that is kept apart for validation")
    validation_by: str = of_data(
        "",
        "column of the data file, as document: all rows with the same value are kept apart together, or none of them",
    )
    augment: str = of_data("", "random changes of images: shift:PIXELS, flip, or both with a comma between")
    standardize: Literal["auto", "yes", "no"] = of_data(
        "auto",
        "shift and scale each feature to mean 0 and deviation 1 over the training rows; auto: only features of tables",
        bare="yes",
    )
    data_servers: int = of_data(0, "ranks that only hold the examples and make batches for the others; 0: none")
    model: str = of_model(
        "mlp",
        "linear, logistic, svm, softmax, mlp:256,128 (widths of the hidden layers), gpt:layers=4,width=128, llama, or "
        "your package.module:Class,width=3, or torch:package.module:function, which makes a module of PyTorch's",
    )
    initial: str = of_model(
        "",
        "initial values by name instead of drawn ones: a file NAME.safetensors, .npz, .pt or .pth (of a state_dict), "
        "or a run's folder or checkpoint",
    )
    loss: str = of_model("squared", "loss of a regression: squared, or huber:delta=1, which outliers change less")
    class_weight: str = of_model(
        "", "weights of rows' losses by their class: balanced (rare classes weigh more), or NAME=5,OTHER=2 (others: 1)"
    )
    dtype: Literal["float32", "float64", "bfloat16"] = of_model(
        "float32", "type of parameters, gradients, messages; bfloat16 (torch:...): float32, computing in bfloat16"
    )
    device: Literal["cpu", "cuda"] = of_model("cpu", "where gradients are computed: cuda takes a GPU for each rank")
    epochs: int = of_training(20, "passes over the training rows")
    steps: int = of_training(0, "number of updates, instead of --epochs")
    batch_size: int | str = of_training(32, "examples per update, all ranks together; full: all of them")
    batch_per_rank: int = of_training(0, "examples per update and rank, instead of --batch-size")
    lr: float = of_training(0.05, "learning rate (step size)")
    optimizer: str = of_training(
        "momentum",
        "sgd, momentum, nesterov, adam, adamw, adagrad, muon, as in momentum:beta=0.9; or a rule of torch.optim, as "
        "torch:AdamW,betas=(0.9,0.95)",
    )
    schedule: str = of_training("cosine", "constant, step, cosine, 1/t or polynomial; settings as in cosine:warmup=2")
    weight_decay: float = of_training(0.0, "L2 penalty per parameter (adamw, muon: decoupled from the gradient)")
    average: str = of_training(
        "",
        "score and save the mean of the parameters after each update from an epoch on (Polyak and Ruppert), as from=5",
        bare="from=0",
    )
    clip_norm: float = of_training(0.0, "largest allowed 2-norm of the mean gradient; 0: no limit")
    accumulate: int = of_training(1, "parts in which a rank computes its share of a batch, to need less memory")
    seed: int = of_run(0, "seed of initial values, order of examples and augmentation")
    allreduce: str = of_run(
        "auto",
        "all-reduce: naive, direct, ring, tree, recursive, circulant, double_tree, shared, hierarchical, mpi, or "
        "your package.module:function; auto: the fastest, as measured",
    )
    out: str = of_run("none", "folder that the run writes; none: nothing is written; auto: runs/STRATEGY-TIME")
    force: bool = of_run(False, "replace what another run has left in --out; other files there stay")
    resume: str = of_run("", "folder of a run to go on with, from its last checkpoint; or a checkpoint file in it")
    checkpoint_every: int = of_run(0, "updates between checkpoints; 0: only when the run ends")
    keep: int = of_run(
        2, "how many checkpoints are kept, the last ones, beside the best; the last undamaged one is resumed"
    )
    checkpoint_async: bool = of_run(False, "write checkpoints in the background, from a copy in memory")
    checkpoint_must: bool = of_run(
        False, "end the run if a checkpoint cannot be written, instead of going on with a warning"
    )
    evaluate_every: int = of_run(1, "epochs between evaluations")
    scores: str = of_run(
        "",
        "further scores of evaluations, with commas between: f1, macro_f1, balanced_accuracy, roc_auc, "
        "average_precision, brier_score, mae, r2 ...; or all",
    )
    goal: str = of_run("", "end when an evaluation reaches this score, as test_accuracy=0.95 or validation_f1=0.8")
    patience: int = of_run(0, "end after so many evaluations without a better validation loss; 0: never")
    time_limit: float = of_run(0.0, "seconds after which the run ends in good order; 0: none")
    budget: str = of_run(
        "",
        "limits that end the training before its epochs or steps: seconds=60, bytes=1e9 (sent by all ranks), "
        "examples=1e6, or several with commas between",
    )
    timeout: float = of_run(0.0, "seconds that a rank may wait in one communication before the job ends; 0: no limit")
    check: str = of_run(
        "",
        "look for mistakes on the way: collectives (all ranks make the same calls), replicas=STEPS (all ranks hold the "
        "same, compared every so many steps), or both with a comma between",
    )
    straggler: str = of_run("", "make computing slower: RANK:FACTOR, or random:PROBABILITY:FACTOR")
    inject: str = of_run(
        "",
        "faults on purpose, for drills, with blanks between: kill, stop, exit, exception, slow, corrupt, diskfull, "
        "memory, clock, random, as kill:rank=1,step=20",
    )
    pretend_compute: float = of_run(0.0, "milliseconds that a gradient takes at least; the rest is slept")
    log: str = of_run("none", "metrics for other tools, too: csv, tensorboard, wandb, mlflow; or some, with commas")
    trace: int = of_run(2000, "last spans per rank kept for trace.json; 0: no trace")
    flight: int = of_run(
        1000, "last operations per rank that are recorded for hpcdl postmortem, in the run's folder; 0: none"
    )
    progress: Literal["auto", "bar", "lines", "none"] = of_run("auto", "how a run shows its progress")

    def __post_init__(self) -> None:
        if isinstance(self.standardize, bool):  # given by a program
            object.__setattr__(self, "standardize", "yes" if self.standardize else "no")
        if isinstance(self.batch_size, str) and self.batch_size != "full":
            try:
                object.__setattr__(self, "batch_size", parse_integer(self.batch_size))
            except ValueError:
                raise UsageError(f"--batch-size is a number of examples, or full, not {self.batch_size!r}") from None
        full = self.batch_size == "full"
        positive(self, "lr", "epochs", *(() if full else ("batch_size",)), "accumulate", "keep", "evaluate_every")
        not_negative(self, "steps", "batch_per_rank", "weight_decay", "clip_norm", "checkpoint_every", "patience")
        not_negative(self, "time_limit", "timeout", "pretend_compute", "trace", "flight", "seed")
        for name in ("time_limit", "timeout", "pretend_compute"):
            if getattr(self, name) > LONGEST:
                raise UsageError(f"--{dashed(name)} is {LONGEST:,.0f} at most, not {getattr(self, name)}")
        forms(self.log)
        read_faults(self.inject)
        if not 0 <= self.validation < 1:
            raise UsageError(f"--validation is a fraction, at least 0 and less than 1, not {self.validation}")
        if self.validation_by and not self.validation:
            raise UsageError(
                f"--validation-by {self.validation_by} says which rows are kept apart: add --validation 0.1"
            )
        _ = self.allowance, self.checks, self.aim
        for name in filter(None, self.scores.split(",")):
            if name not in (known := (*CLASS_SCORES, *VALUE_SCORES, "loss", "all")):
                raise unknown("score", name, known)
        if self.flight > MOST_RECORDS:
            raise UsageError(f"--flight is {MOST_RECORDS:,} at most, not {self.flight}")
        first_update(self.average)
        if self.class_weight:
            from hpcdl.data.class_balance import read_class_weights  # here: it needs kernels

            read_class_weights(self.class_weight)
        if self.patience and not self.validation:
            raise UsageError("--patience needs a validation loss; add --validation FRACTION")
        if self.goal.startswith("validation") and not self.validation:
            raise UsageError(f"--goal {self.goal} needs rows for validation; add --validation FRACTION")

    @functools.cached_property
    def allowance(self) -> Budget:
        """The parsed --budget."""
        return Budget.read(self.budget)

    @functools.cached_property
    def aim(self) -> Goal | None:
        """The parsed --goal."""
        return Goal.read(self.goal)

    @property
    def further(self) -> tuple[str, ...]:
        """The names of the scores, without parts, that evaluations have beside the usual ones: --scores, --goal."""
        names = [*filter(None, self.scores.split(",")), *([] if self.aim is None else [base_of(self.aim.name)])]
        return tuple(name for name in dict.fromkeys(names) if name not in USUAL_SCORES)

    @functools.cached_property
    def checks(self) -> Checks:
        """The parsed --check."""
        return Checks.read(self.check)

    @property
    def mixed(self) -> bool:
        """True if --data is a mixture of data sets."""
        return is_mixture(self.data)

    @property
    def standardized(self) -> bool | str:
        """--standardize as an argument of `open_data`: True, False or "auto"."""
        return {"yes": True, "no": False}.get(self.standardize, "auto")

    def _refuse_unused(self, why: str, *more: str) -> None:
        """Raise UsageError, ending in `why`, if an option named in `unused` or `more` differs from its default."""
        for name in (*self.unused, *more):
            if getattr(self, name) != getattr(type(self), name):
                raise UsageError(f"--{dashed(name)}{why}")

    @property
    def rate_schedule(self) -> str:
        """The schedule of the learning rate; overridden by a script whose --schedule is something else."""
        return self.schedule

    @property
    def advice(self) -> str:
        """Advice for a loss that is not finite."""
        return "a smaller --lr or a --clip-norm may help"

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return examples per update, updates per epoch, and updates in all."""
        batch = self.global_batch(ranks, data.examples)
        per_epoch = data.steps_per_epoch(batch)
        self.refuse_more_parts("accumulate", min(batch, data.examples))
        return batch, per_epoch, self.allowance.steps(self.steps or self.epochs * per_epoch, batch)

    def refuse_more_parts(self, name: str, examples: int) -> None:
        """Raise UsageError if the option `name` asks for more parts of a batch than the batch has `examples`."""
        if (parts := getattr(self, name)) > examples:
            of = counted(examples, "example")
            raise UsageError(f"--{dashed(name)} {parts}: a batch has {of}, and can have no more parts than examples")

    def make_optimizer(self, model: Any, ranks: int, data: Any, size: int | None = None) -> "Optimizer":
        """Return the optimizer of a run on `ranks` ranks, for `size` parameters (default: all of the model's)."""
        from hpcdl.models.model import abilities_of  # here: who only reads options needs no kernels
        from hpcdl.optim import make_optimizer, make_schedule

        batch, per_epoch, steps = self.plan(ranks, data)
        schedule = make_schedule(self.rate_schedule, self.lr, steps, per_epoch, batch)
        if size is None:
            self.refuse_too_large(model, 1)
            size = model.layout.size
        how = schedule, self.weight_decay, self.clip_norm, abilities_of(model).device
        average_from = first_update(self.average, per_epoch, steps)
        return make_optimizer(self.optimizer, size, model.layout.dtype, *how, average_from, model.layout.hidden)

    def refuse_too_large(self, model: Any, ranks: int) -> None:
        """Raise UsageError if a rank's memory cannot hold 1 / `ranks` of the model: parameters, a gradient, the
        optimizer's vectors. With a GPU only the parameters count, as they are made on the host."""
        from hpcdl.optim import vectors_of

        vectors = 2 + len(vectors_of(self.optimizer)) + bool(self.average) if self.device == "cpu" else 1
        needed = vectors * model.layout.size * model.layout.dtype.itemsize // ranks
        what = f"--model {self.model}, of {counted(model.layout.size, 'parameter', ',')}, on each rank"
        refuse_beyond(what, needed, available())

    def environment_steps(self, workers: int) -> int:
        """Return the environment steps per step with so many workers; 0 for a run that learns from data."""
        return 0

    def global_batch(self, ranks: int, examples: int) -> int:
        """Return the examples per update, of all ranks together."""
        if self.batch_per_rank:
            return self.batch_per_rank * ranks
        return examples if isinstance(self.batch_size, str) else self.batch_size


def first_update(text: str, per_epoch: int = 1, steps: int = 1) -> int | None:
    """Return the update at which --average begins, from a text like from=5 (epochs); None for "". Raises UsageError."""
    if not text:
        return None
    name, _, number = text.partition("=")
    with contextlib.suppress(ValueError):
        if name == "from" and parse_finite(number) >= 0:
            return round(min(parse_finite(number) * per_epoch, steps))
    raise UsageError(f"--average {text}: give the epoch from which on the parameters are averaged, as from=5")


def kinds_of(options_class: type) -> dict[str, Any]:
    """Return the type of each field of an options dataclass, by the field's name."""
    hints = get_type_hints(options_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(options_class)}


COMMON = kinds_of(Options)  # the options of all programs that train
