"""Scores of a model on a set of examples: the mean loss, and the accuracy (classes) or the root mean squared error.

Of a text, whose loss is that of a token:

    perplexity      exp(loss): as unsure as among so many equally likely tokens
    bits per byte   loss / ln 2 / bytes of text per token: the one that can be compared between tokenizers"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hpcdl.chunks import chunk, chunks
from hpcdl.csr import on
from hpcdl.data import Batch
from hpcdl.data.formats.vocabulary import BYTES
from hpcdl.data.schema import Schema
from hpcdl.data.standard import TARGET
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Array, Device
from hpcdl.metric_lines import AREAS, CLASS_SCORES, OF_PROBABILITIES, PAIR, VALUE_SCORES, base_of
from hpcdl.models.losses import Hinge, Loss
from hpcdl.models.model import abilities_of, count, layers_of
from hpcdl.models.scores import MOST_KEPT, MOST_NAMED, ClassMeasures, ValueMeasures
from hpcdl.runs.options import Options

if TYPE_CHECKING:
    from mpi4py import MPI  # at run time its import starts MPI, which benchmarks do later

    from hpcdl.comm import Communicator

LARGEST_EXPONENT = 700.0  # of e, in a float
Measures: TypeAlias = ClassMeasures | ValueMeasures


class Scores(NamedTuple):
    """Scores of a model on `examples` examples. accuracy: None for regression. rmse: of all outputs together; None for
    classes. name: of this score; rmse_standardized for several outputs with units of their own."""

    loss: float
    accuracy: float | None
    rmse: float | None
    examples: int
    name: str = "rmse"

    def named(self, prefix: str) -> dict:
        """Return the scores as entries of a metrics line, such as test_loss and test_accuracy or test_rmse."""
        second = {"accuracy": self.accuracy} if self.rmse is None else {self.name: self.rmse}
        return {f"{prefix}_{name}": value for name, value in ({"loss": self.loss} | second).items()}


def evaluate(
    model: Any,
    parameters: Array,
    split: Any,
    classes: int,
    share: tuple[int, int] = (0, 1),
    measures: Measures | None = None,
) -> np.ndarray:
    """Return sums over this rank's share (rank, size) of a split: [losses, right answers or squared errors, examples].
    For a model without `evaluate`, call `loss_and_gradient`, whose gradient is discarded, and `predict`. measures: get
    the rows of the share, too."""
    can = abilities_of(model)
    scratch = None if can.evaluate else can.device.zeros(parameters.shape, parameters.dtype)
    loss = last_layer(model) if scratch is None else None
    predicts = scratch is not None or (measures is not None and loss is None)

    def score(batch: Batch) -> tuple[float, float]:
        p, y = np.zeros(0), can.device.host(batch.y)
        if predicts and len(y):
            p = can.device.host(model.predict(parameters, batch.x))
            if measures is not None:
                measures.add(y, p)
        if scratch is None:
            return model.evaluate(parameters, batch)
        return model.loss_and_gradient(parameters, batch, scratch), count(p, y, classes)

    with watched(loss, measures):
        return summed_scores(score, split, share, can.rows_at_once, can.device)


@contextlib.contextmanager
def watched(loss: Any, measures: Measures | None, counts: bool = True) -> Iterator[None]:
    """Context in which rows that pass through `loss`, the last layer, are added to `measures`; None: no loss, or no
    measures. counts: False on a rank that computes the same rows as another one, which adds them."""
    if loss is not None and measures is not None:
        loss.watch = measures.add if counts else lambda y, predictions: None
    try:
        yield
    finally:
        if loss is not None:
            loss.watch = None


def last_layer(model: Any) -> Any:
    """Return the loss through which the evaluation of a model made of layers passes; None for other models."""
    layers = None if abilities_of(model).module else layers_of(model)
    return layers[-1] if layers and isinstance(layers[-1], Loss) else None


def summed_scores(
    score: Callable[[Batch], Any], split: Any, share: tuple[int, int], rows_at_once: int, device: Device = CPU
) -> np.ndarray:
    """Return [losses, scores, examples] over this rank's share of the split; score(batch) -> (sum of losses, score).
    All ranks call `score` equally often, some without rows, as ranks that share a model score together."""
    rank, size = share
    rows, most, sums = chunk(split.examples, size, rank), chunk(split.examples, size, 0), np.zeros(3)
    for part in chunks(rows.stop - rows.start, -(-(most.stop - most.start) // rows_at_once)):
        start, stop = rows.start + part.start, rows.start + part.stop
        x, y = split.rows(start, stop)
        batch = Batch(on(device, x), device.array(y), stop - start, epoch=0, step=0, index=np.arange(start, stop))
        sums += *score(batch), stop - start
    return sums


def scores(sums: np.ndarray, classes: int, outputs: tuple[int, ...] = (), unit: float | None = 1.0) -> Scores:
    """Return the scores from all ranks' sums. classes: 0 for regression. outputs: shape of a target. unit: of rmse;
    None: each of several standardized outputs has its own, and the rmse is that of standardized values."""
    loss, score, examples = sums
    examples = int(examples)
    if classes:
        return Scores(loss / examples, score / examples, None, examples)
    rmse = (1.0 if unit is None else unit) * math.sqrt(score / examples / math.prod(outputs))
    return Scores(loss / examples, None, rmse, examples, "rmse" if unit is not None else "rmse_standardized")


def text_scores(loss: float, schema: Schema, group: str) -> dict[str, float]:
    """Return perplexity and bits per byte of a text by name, from the mean loss of its tokens; {} for other data.
    group: of the file, whose bytes per token count; without them there are no bits per byte."""
    if schema.vocabulary is None:
        return {}
    found = {"perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else math.inf}
    ratio = token_bytes(schema, group)
    return found if ratio is None else found | {"bits_per_byte": loss / math.log(2) / ratio}


def token_bytes(schema: Schema, group: str) -> float | None:
    """Return the bytes of text per token of a group; None: unknown."""
    if schema.vocabulary is not None and schema.vocabulary.description == BYTES:
        return 1.0
    return (schema.token_bytes or {}).get(group)


def without_probabilities(model: Any) -> bool:
    """True if the model's predictions are classes, not their probabilities, as of a support vector machine."""
    return isinstance(last_layer(model), Hinge)


def score_names(data: Any, certain: bool = False) -> list[str]:
    """Return the names, without part, of the scores that evaluations on these data can have; the loss, and the
    accuracy or rmse, come first. certain: see `without_probabilities`."""
    if data.vocabulary is not None:
        return ["loss", "accuracy", *text_scores(1.0, data.schema, "train")]
    if data.classes:
        left_out = (*(PAIR if data.classes > 2 else ()), *(OF_PROBABILITIES if certain else ()))
        return ["loss", *(name for name in CLASS_SCORES if name not in left_out)]
    outputs = data.output_names
    if len(outputs) == 1:
        return ["loss", *VALUE_SCORES]
    total = "rmse" if data.unit is not None else "rmse_standardized"
    named = outputs if len(outputs) <= MOST_NAMED else []
    return ["loss", total, *(f"{score}_{name}" for score in VALUE_SCORES for name in named)]


def check_scores(options: Options, data: Any, model: Any) -> None:
    """Raise UsageError if no evaluation of the model on these data has a score of --scores, or that of --goal."""
    known = score_names(data, without_probabilities(model))
    kinds = [*dict.fromkeys(map(base_of, known)), "all"]
    for name in filter(None, options.scores.split(",")):
        if name not in kinds:
            raise UsageError(f"--scores {name}: this model and data have {', '.join(kinds)}")
    if (goal := options.aim) is None:
        return
    part, _, name = goal.name.partition("_")
    if part == "test" and data.test is None:
        told = f"add --validation 0.1, and take validation_{name}"
        raise UsageError(f"--goal {options.goal}: the data have no test part; {told}")
    if name not in known:
        raise UsageError(f"--goal {options.goal}: this model and data have the {part} scores {', '.join(known)}")


def new_measures(names: Sequence[str], data: Any, model: Any, split: Any) -> Measures | None:
    """Return measures for the scores `names` of a split; None if the sums of `evaluate` give all of them. Each of
    several outputs has an rmse."""
    if data.vocabulary is not None:
        return None
    if data.classes:
        curves = bool({*names} & {*AREAS, "all"})
        return ClassMeasures(data.classes, None, curves, without_probabilities(model)) if names else None
    outputs = data.output_names
    if not names and len(outputs) == 1:
        return None
    around = split.rows(0, 1)[1] if {*names} & {"r2", "all"} else 0.0
    return ValueMeasures(outputs, around, data.statistics.get(TARGET[1], 1.0))


def scores_of_all(comm: "Communicator", measures: Measures, names: Sequence[str]) -> dict[str, float]:
    """Return the scores of all ranks' rows that `names` ("all": all), and the rmse of each of several outputs, by name;
    the same on all ranks of `comm`. Collective."""
    add_up(comm.mpi, measures)
    if isinstance(measures, ValueMeasures):
        found = measures.scores()
        return {name: found[name] for name in found if base_of(name) in (*names, "rmse") or "all" in names}
    values = np.full(len(CLASS_SCORES), np.nan)
    if comm.rank == 0:
        known = measures.scores()
        values[:] = [known.get(name, np.nan) for name in CLASS_SCORES]
    comm.broadcast(values)
    by_name = zip(CLASS_SCORES, values.tolist(), strict=True)
    return {name: each for name, each in by_name if (name in names or "all" in names) and not math.isnan(each)}


def add_up(world: "MPI.Intracomm", measures: Measures) -> None:
    """Add the sums of all ranks up on all ranks, and gather the rows that are kept for curves on rank 0; collective."""
    from mpi4py import MPI

    from hpcdl.comm.progress import inside

    with inside("add up the scores"):
        for each in measures.sums:
            world.Allreduce(MPI.IN_PLACE, each)
        if not isinstance(measures, ClassMeasures):
            return
        kept, width = measures.kept, measures.width
        mine = np.concatenate([np.zeros((0, width)), *(kept or [])])
        sizes = np.empty(world.size, np.int64)
        world.Allgather(np.array([MOST_KEPT + 1 if kept is None else mine.size]), sizes)
        if sizes.sum() > MOST_KEPT:
            measures.kept = None
            return
        rows = np.empty((sizes.sum() // width if world.rank == 0 else 0, width))
        world.Gatherv(mine, [rows, sizes] if world.rank == 0 else None)
        measures.kept = [rows] if len(rows) else []
