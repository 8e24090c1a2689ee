"""What every training script can be told, by the same names: one dataclass, read from the command line and from YAML.

A script with options of its own derives a dataclass from `Options` and adds fields. A field's name with dashes is the
option's name; its metadata holds the help text. A value in a file is read as if it stood on the command line.
"""

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from hpcdl.errors import UsageError, blamed_on, line, parse_integer, refuse_beyond
from hpcdl.faults.clock import LONGEST
from hpcdl.faults.inject import parse_faults as read_faults
from hpcdl.formatting import counted
from hpcdl.memory import available
from hpcdl.plugins import names_of, refuse_untrusted
from hpcdl.runs.averaging import first_update
from hpcdl.runs.checks import Checks
from hpcdl.runs.config_migration import config_of, predecessor, taken
from hpcdl.runs.help import dashed, parser
from hpcdl.runs.metric_logs import forms
from hpcdl.runs.stopping import Budget
from hpcdl.runs.values import value_of, values_of

if TYPE_CHECKING:
    from hpcdl.optim import Optimizer

MOST_RECORDS = 1_000_000  # of a flight recorder: 64 MB for each rank
LARGEST = 1_000_000  # bytes of a file of options
INSTEAD = {"epochs": "steps", "batch_size": "batch_per_rank"}  # the second, where not 0, holds instead of the first


def option(default: Any, text: str, group: str = "", bare: str = "") -> Any:
    """A field of an options dataclass, with the help text that the script prints.

    A field without a default (...) stands on the command line beside the options; of `list[str]` several do, one at
    least, and with the default `list` none need be there.

    group: under which heading it stands there (hpcdl/runs/help.py), for options that all programs have that train.
    bare: its value where it is given alone.
    """
    about = {"help": text, "group": group} | ({"bare": bare} if bare else {})
    if default is ...:  # there is none: a positional argument
        return dataclasses.field(metadata=about)
    if default is list:
        return dataclasses.field(default_factory=list, metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclass
class Options:
    """The options common to all strategies. Raises UsageError where a value makes no sense.

    before: program and step of the run that this one goes on with, if of another strategy. told: what the command line
    gives, where there is one; given: what that or a file does. pause: the epoch after which this leg ends, 0: the
    last. heir: whether it goes on from one that had other options. per_step: environment steps of a step, of a run
    that acts in one: its options count these. among: whether it is one of many that a job runs, which begins it anew
    with --force where it was killed (launch/isolated_run.py). data_seed, prepare: of launch/training.py. survivor: what
    those that are left go on from when ranks are gone (hpcdl/recovery/survivor.py). trust: the values of --trust;
    origin: the file of each option that a file gives.
    """

    unused: ClassVar[tuple[str, ...]] = ()  # names of common options that mean nothing to this program
    before, pause, heir, per_step, among = "", 0.0, False, 0, False  # without a type it is no field, and so no option
    told = given = data_seed = prepare = survivor = None  # type: Any
    trust: ClassVar[tuple[str, ...]] = ()
    origin: ClassVar[dict[str, str]] = {}

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
            self.standardize = "yes" if self.standardize else "no"
        if isinstance(self.batch_size, str) and self.batch_size != "full":
            try:
                self.batch_size = parse_integer(self.batch_size)
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
        self.allowance, self.checks = Budget.read(self.budget), Checks.read(self.check)
        if self.flight > MOST_RECORDS:
            raise UsageError(f"--flight is {MOST_RECORDS:,} at most, not {self.flight}")
        first_update(self.average)
        if self.patience and not self.validation:
            raise UsageError("--patience looks at the validation loss; add --validation FRACTION")

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

    def make_optimizer(self, model: Any, plan: tuple[int, int, int], size: int | None = None) -> "Optimizer":
        """The optimizer for `size` parameters (default: all of the model's), where `plan` is what `plan` returns."""
        from hpcdl.models.model import abilities_of  # here: who only reads options needs no kernels
        from hpcdl.optim import make_optimizer, make_schedule

        batch, per_epoch, steps = plan
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

    def global_batch(self, ranks: int, examples: int) -> int:
        """Examples per update, all ranks together."""
        if self.batch_per_rank:
            return self.batch_per_rank * ranks
        return examples if isinstance(self.batch_size, str) else self.batch_size


def parse(options_class: type, program: str, description: str, arguments: list[str] | None = None) -> Any:
    """Read the command line into an `options_class`; a field without a default is a positional argument, or several.

    description: the script's docstring. Files of --config give values that the command line does not; with --resume the
    options of that run do so for what is left. Both may be of another program that trains, whose own options are then
    left out, of which a line says so.

    Raises UsageError, one line, for an unknown option, a bad value or a file that is missing.
    """
    kinds = kinds_of(options_class)
    defaults = program_defaults(kinds)
    texts = vars(parser(options_class, kinds, defaults, program, description).parse_args(arguments))
    files, trust = texts.pop("config", []), texts.pop("trust", [])
    if strange := [each for each in trust if ":" not in each and not os.path.exists(each)]:
        raise UsageError(f"--trust {strange[0]}: there is no such file, and a name is written package.module:name")
    given = {name: value_of(kinds[name], text, "--" + dashed(name)) for name, text in texts.items()}
    found: dict[str, Any] = {}
    origin, remarks = dict[str, str](), list[str]()  # of each value its file
    for path in files:
        texts, left = taken(read_file(path, f"--config {path}"), kinds, COMMON, f"--config {path}")
        idle = [name for name in getattr(options_class, "unused", ()) if name in texts]
        left += [name for name in idle if texts.pop(name) != str(getattr(Options, name))]
        if left:
            remarks.append(f"warning: --config {path}: left out, of another strategy: {', '.join(left)}")
        found |= values_of(texts, kinds, path)
        origin |= dict.fromkeys(texts, path)
    found |= given
    before = predecessor(found["resume"], program) if found.get("resume") else ""
    if before:
        note(program, f"goes on from a run of {before}")
    with remarked(before):
        old = resumed(found["resume"], kinds) if found.get("resume") else {}
        origin = dict.fromkeys(old, str(config_of(found.get("resume", "")))) | origin
        origin = {name: file for name, file in origin.items() if name not in given}
        for name, file in origin.items():
            refuse_untrusted(names_of(name, (old | found)[name]), file, trust)
        found = (old or defaults) | found
        for name, instead in INSTEAD.items():
            if name in given and instead in kinds:
                if instead in given:
                    raise UsageError(f"give --{dashed(name)} or --{dashed(instead)}, not both")
                found[instead] = 0  # what a file says of it holds no longer
        made = options_class(**found)
    for text in remarks:  # of options that are refused, the refusal is what counts
        note(program, text)
    made.trust, made.origin = tuple(trust), origin
    if isinstance(made, Options):
        cleared = {name for name in INSTEAD.values() if not found.get(name)}
        made.before, made.told, made.given = before, frozenset(given), frozenset(found) - cleared - {"out"}
    return made


def program_defaults(kinds: dict[str, Any]) -> dict[str, str]:
    """Defaults of a program that differ from its options class's: its run has a folder, a library user's none."""
    return {"out": "auto"} if "resume" in kinds else {}


def note(program: str, text: str) -> None:
    """Say something in a line that is no error; where several ranks read the same, `quiet` silences all but one."""
    print(f"{program}: {line(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def remarked(before: str) -> Iterator[None]:
    """A refusal in the body says, too, of which program the run is that was to be gone on with; "": of this one."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{error}{remark(before)}") from None


def remark(before: str) -> str:
    """What the refusal of a run says that was to go on with one of another program, at a step."""
    return f"; this was to go on from a run of {before}" if before else ""


def read_file(path: str | Path, told: str) -> dict[str, Any]:
    """The values of a YAML file as texts, by the names of fields; `told`: the option that names the file."""
    import yaml  # here: a command line without files needs none

    with blamed_on(f"{told} cannot be read"), open(path, "rb") as file:
        text = file.read(LARGEST + 1)  # a device may have no end
    if len(text) > LARGEST:
        raise UsageError(f"{told} has more than {LARGEST:,} bytes, and should be a few lines")
    try:
        found = yaml.load(text.decode(), yaml.BaseLoader)  # texts, lists and dictionaries, nothing else
    except Exception as error:  # RecursionError, too
        raise UsageError(f"{told}: this is no YAML: {' '.join(str(error).split())}") from None
    if not (isinstance(found, dict) and all(isinstance(name, str) for name in found)):
        raise UsageError(f"{told}: a line should be NAME: VALUE, with the name of an option")
    return {name.replace("-", "_"): value for name, value in found.items()}


def resumed(run: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """The options of the run in a folder, or in that of a checkpoint file; those that this program has."""
    told, config = f"--resume {run}", config_of(run)
    if not os.path.isfile(config):
        where = "beside that file" if os.path.isfile(run) else "in that folder"
        raise UsageError(f"{told}: there is no run {where} (config.yaml is missing)")
    texts, _ = taken(read_file(config, f"{told}: config.yaml"), kinds, COMMON)
    return values_of(texts, kinds, config) | {"out": os.path.dirname(config) or "."}


def kinds_of(options_class: type) -> dict[str, Any]:
    """The types of an options dataclass by the names of its fields."""
    hints = get_type_hints(options_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(options_class)}


COMMON = kinds_of(Options)  # the options of all programs that train
