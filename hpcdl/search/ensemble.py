"""An ensemble: runs that predict together. Its folder, and its predictions for rows of a data set.

ensemble.yaml               the options of train-ensemble
members/0003/               the run of member 3
members/0003/member.json    how member 3 differs from other members
summary.json                the members, how they are combined, the scores

rank r      loads members r, r + N, ... of N ranks, reads all rows, adds up its members' predictions
reduce      for each block of rows one rank, the next for each block, receives the sums over members of p, of p^2 and
            of votes, (3, rows, classes); it combines, scores and writes the predictions. With weights there are 4
            sums; for values 2, of outputs and their squares"""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.data.batch import PredictionRows, RowBlock
from hpcdl.errors import UsageError
from hpcdl.files import parse_json
from hpcdl.inference.prediction_input import prediction_rows
from hpcdl.inference.predictions import PredictionFormat, deliver, predict
from hpcdl.inference.predictions import output as written_to
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.models.model import abilities_of
from hpcdl.models.scores import predicted_classes, probabilities
from hpcdl.search import combining

CONFIG_FILE, SUMMARY_FILE, MEMBERS, MEMBER = "ensemble.yaml", "summary.json", "members", "member.json"
NO_SHARE = 2**62 - 1, 2**62  # a share (rank, size) without any block
COMBINATIONS = ("mean", "vote", "stacking")  # how members are combined


class EnsembleMember(NamedTuple):
    """A member. run: its path in the ensemble's folder. differs: what sets it apart, as text. weight: of its vote."""

    number: int
    run: str
    differs: str = ""
    weight: float = 1.0


class Stacking(NamedTuple):
    """Parameters of stacking (combining.py): weights (members,), bias (classes,)."""

    weights: np.ndarray
    bias: np.ndarray


class LoadedMember(NamedTuple):
    """A member that this rank has loaded. place: its index among all members."""

    place: int
    member: EnsembleMember
    trained: TrainedModel
    model: Any


class EnsemblePrediction(NamedTuple):
    """Combined prediction for a block of rows. outputs: in the shape of one member's outputs. spread: their standard
    deviation over the members, in the same shape. counts (rows, classes): votes for each class; None for values."""

    outputs: np.ndarray
    spread: np.ndarray
    counts: np.ndarray | None


def is_ensemble(run: str) -> bool:
    return (Path(run) / CONFIG_FILE).is_file()


class Ensemble:
    """Members in a folder, and how they are combined. combine: one of COMBINATIONS. seed: the data seed of all members.
    trust: names of code in the members' checkpoints that may be called, as given to --trust (hpcdl/plugins.py)."""

    def __init__(
        self,
        folder: Path,
        members: list[EnsembleMember],
        combine: str,
        seed: int,
        stacking: Stacking | None = None,
        trust: Iterable[str] = (),
    ) -> None:
        self.folder, self.members, self.combine, self.seed, self.stacking = folder, members, combine, seed, stacking
        self.trust, self.local_members = tuple(trust), list[LoadedMember]()

    @classmethod
    def read(cls, folder: str, trust: Iterable[str] = ()) -> "Ensemble":
        """Return a folder's ensemble. UsageError: its training has not ended, no members, or a bad summary.json."""
        path = Path(folder)
        try:
            summary = parse_json((path / SUMMARY_FILE).read_text())
            if not isinstance(summary["members"], list) or summary["combine"] not in COMBINATIONS:
                raise ValueError
            members = [
                EnsembleMember(int(each["number"]), str(each["run"]), str(each["differs"]), float(each["weight"]))
                for each in summary["members"]
                if each["failed"] is None
            ]
            stacking = None
            if summary["stacking"] is not None:
                weights, bias = (np.array(summary["stacking"][name], np.float64) for name in ("weights", "bias"))
                if weights.shape != (len(members),) or bias.ndim != 1 or not np.isfinite([*weights, *bias]).all():
                    raise ValueError
                stacking = Stacking(weights, bias)
            ensemble = cls(path, members, summary["combine"], int(summary["seed"]), stacking, trust)
        except FileNotFoundError:
            raise UsageError(f"the ensemble {folder} has not ended: take train-ensemble --resume {folder}") from None
        except (OSError, ValueError, KeyError, TypeError):
            what = f"{path / SUMMARY_FILE} is no summary of an ensemble"
            raise UsageError(f"{what}; write it with train-ensemble --resume {folder}") from None
        if not members:
            raise UsageError(f"the ensemble {folder} has no members: all have failed; summary.json says why")
        return ensemble

    def open(self, rank: int, size: int) -> "Ensemble":
        """Load members rank, rank + size, ... and `reference`, the first; return self. UsageError: they do not fit."""
        self.reference = self._trained(self.members[0])
        self.reference.name = str(self.folder)
        self.local_members = []
        for place in range(rank, len(self.members), size):
            member = self.members[place]
            trained = self._trained(member)
            model = trained.model()
            if abilities_of(model).generate:
                raise UsageError(f"{trained.name} writes text, and an ensemble cannot combine texts")
            form, mine = (
                (each.features, each.classes, each.outputs, each.schema.labels, each.schema.outputs)
                for each in (self.reference, trained)
            )
            if form != mine:
                raise UsageError(f"{trained.name} and {self.members[0].run} have different features or targets")
            self.local_members.append(LoadedMember(place, member, trained, model))
        if self.stacking is not None and len(self.stacking.bias) != self.reference.classes:
            raise UsageError(f"{self.folder / SUMMARY_FILE}: stacking is not for {self.reference.classes} classes")
        return self

    def _trained(self, member: EnsembleMember) -> TrainedModel:
        return TrainedModel(str(self.folder / member.run), self.trust, str(self.folder), self.seed)

    def rows(self, source: str, group: str, ranks: int, delimiter: str = "") -> dict[Any, PredictionRows]:
        """Return the rows of part `group` of a source as this rank's members read them, by `input_key`. UsageError."""
        by_key: dict[Any, PredictionRows] = {}
        for trained in [self.reference, *(each.trained for each in self.local_members)]:
            if input_key(trained) not in by_key:
                by_key[input_key(trained)] = prediction_rows(source, trained, group, ranks, delimiter)
        return by_key

    def blocks(
        self, world: MPI.Intracomm, rows: dict[Any, PredictionRows], share: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[RowBlock, list[np.ndarray]]]:
        """Yield each block of rows and a list of its predictions by this rank's members; for classes, probabilities
        (rows, classes). Collective. share (rank, size): predict only every size-th block, from number `rank` on."""
        blocks, reference_key = {key: source.blocks() for key, source in rows.items()}, input_key(self.reference)
        for number in itertools.count():
            block, outputs = None, []
            with refuse_together(world):
                calls = {key: next(source, None) for key, source in blocks.items()}
                if (first := calls[reference_key]) is not None:
                    others = {key: call() for key, call in calls.items() if key != reference_key and call}
                    batches = {reference_key: first()} | others
                    block = batches[reference_key]
                    for loaded_member in self.local_members if number % share[1] == share[0] else []:
                        key = input_key(loaded_member.trained)
                        output = predict(loaded_member.model, loaded_member.trained, batches[key], rows[key].name)
                        outputs.append(probabilities(output) if self.reference.classes else output)
            if block is None:
                return
            yield block, outputs

    def sums(self, block: RowBlock, outputs: list[np.ndarray]) -> np.ndarray:
        """Return the sums (see the module) over this rank's members, float64 (sums, rows, ...). outputs: by member."""
        classes, weighted = self.reference.classes, self.weighted
        shape = (len(block.x), classes) if classes else (len(block.x), *self.reference.outputs)
        sums = np.zeros((2 + bool(classes) + weighted, *shape))
        for each, output in zip(self.local_members, outputs, strict=True):
            sums[0] += output
            sums[1] += np.square(output, dtype=np.float64)
            if not classes:
                continue
            vote = combining.votes(output)
            sums[2] += vote
            if self.stacking is not None:
                sums[3] += self.stacking.weights[each.place] * combining.logs(output)
            elif weighted:
                sums[3] += each.member.weight * vote
        return sums

    @property
    def weighted(self) -> bool:
        """True if `sums` includes a weighted sum."""
        return self.stacking is not None or any(each.weight != 1 for each in self.members)

    def combined(self, sums: np.ndarray) -> EnsemblePrediction:
        """Return the combined prediction from the sums over all members."""
        members, classes = len(self.members), self.reference.classes
        spread = combining.deviation(sums[0], sums[1], members)
        outputs = sums[0] / members
        if self.stacking is not None:
            outputs = combining.softmax(sums[3] + self.stacking.bias)
        elif classes and self.combine == "vote":
            outputs = sums[2 + self.weighted] / sum(each.weight for each in self.members)
        kind = self.reference.dtype
        return EnsemblePrediction(outputs.astype(kind), spread.astype(kind), sums[2] if classes else None)

    def combined_blocks(
        self, comm: Communicator, rows: dict[Any, PredictionRows]
    ) -> Iterator[tuple[RowBlock, list[np.ndarray], EnsemblePrediction | None]]:
        """Yield each block, this rank's predictions, the combined one (on rank k mod N for block k); collective."""
        for number, (block, outputs) in enumerate(self.blocks(comm.mpi, rows)):
            sums, place = self.sums(block, outputs), number % comm.size
            if sums.size:
                comm.reduce(sums, place)
            yield block, outputs, self.combined(sums) if comm.rank == place else None

    def labels(self, world: MPI.Intracomm, source: str) -> np.ndarray:
        """Return the labels of all training rows of a source; collective."""
        with refuse_together(world):
            rows = self.rows(source, "train", world.size)
        return np.concatenate([np.asarray(block.y) for block, _ in self.blocks(world, rows, NO_SHARE)])

    def has_test_part(self, world: MPI.Intracomm, source: str) -> bool:
        """True if a source has a test part; collective."""
        available = False
        with contextlib.suppress(UsageError):
            available = bool(self.rows(source, "test", world.size))
        return bool(world.allreduce(available, MPI.LAND))

    def stack(self, comm: Communicator, source: str, held_out: np.ndarray) -> None:
        """Fit stacking on the training rows `held_out` (sorted), on which no member was trained; collective."""
        logs, labels, start = [], [], 0
        with refuse_together(comm.mpi):
            rows = self.rows(source, "train", comm.size)
        for block, outputs in self.blocks(comm.mpi, rows):
            inside = held_out[slice(*np.searchsorted(held_out, (start, start + len(block.x))))] - start
            logs.append(np.array([combining.logs(each[inside]) for each in outputs]))
            labels.append(np.asarray(block.y)[inside])
            start += len(block.x)
        all_logs = np.zeros((len(self.members), len(held_out), self.reference.classes))
        for place, each in enumerate(self.local_members):
            all_logs[each.place] = np.concatenate([part[place] for part in logs])
        comm.reduce(all_logs)
        fitted = combining.stack(all_logs, np.concatenate(labels)) if comm.rank == 0 else None
        self.stacking = Stacking(*comm.mpi.bcast(fitted))

    def out_of_bag(
        self, comm: Communicator, source: str, bags: dict[int, np.ndarray], file: str = ""
    ) -> dict[str, Any] | None:
        """Return scores of the training rows, predicted by the members not trained on them; None: no such rows. Values
        get an RMSE. `members`: scores of each member alone. Collective. bags: by number of this rank's members, a mask
        of rows not in the member's training. file: NAME.csv for the predictions."""
        with refuse_together(comm.mpi):
            rows = self.rows(source, "train", comm.size)
        totals, start, packed, number = np.zeros((1 + len(self.members), 3)), 0, b"", 0
        form = PredictionFormat(self.reference, next(iter(rows.values())), True)
        with written_to(comm.mpi, form, file, None) as out:
            for block, outputs in self.blocks(comm.mpi, rows):
                y, place, number = np.asarray(block.y), number % comm.size, number + 1
                width = (self.reference.classes,) if self.reference.classes else self.reference.outputs
                sums = np.zeros((2, len(y), *width))
                for each, values in zip(self.local_members, outputs, strict=True):
                    unseen = bags[each.member.number][start : start + len(y)]
                    sums += np.where(unseen.reshape(-1, *[1] * len(width)), [values, np.ones(values.shape)], 0.0)
                    totals[1 + each.place] += self._totals(values[unseen], y[unseen])
                start += len(y)
                comm.reduce(sums, place)
                if comm.rank == place:
                    known = sums[1].reshape(len(y), -1)[:, 0] > 0
                    mean = sums[0][known] / sums[1][known]
                    totals[0] += self._totals(mean, y[known])
                    if out is not None:
                        ids = None if block.ids is None else list(itertools.compress(block.ids, known))
                        some = block._replace(x=block.x[known], y=y[known], numbers=block.numbers[known], ids=ids)
                        packed = out.pack(some, mean.astype(self.reference.dtype))
                if out is not None and number % comm.size == 0:
                    deliver(comm.mpi, packed, out)
                    packed = b""
            if out is not None and number % comm.size:
                deliver(comm.mpi, packed, out)
        comm.mpi.Allreduce(MPI.IN_PLACE, totals)
        found, *alone = map(self._scores, totals.tolist())
        return found and found | {"members": alone}

    def _totals(self, values: np.ndarray, y: np.ndarray) -> list[float]:
        """Return [sum of log losses, correct predictions or sum of squared errors, rows]."""
        if self.reference.classes:
            return [*scored(values, y), len(y)]
        return [0, float(np.square(values - y).sum()), len(y)]

    def _scores(self, totals: list[float]) -> dict[str, Any] | None:
        loss, score, count = totals
        if not count:
            return None
        if self.reference.classes:
            return {"loss": loss / count, "accuracy": score / count, "rows": count}
        return {"rmse": float(np.sqrt(score / count / max(1, int(np.prod(self.reference.outputs))))), "rows": count}


def input_key(trained: TrainedModel) -> tuple:
    """Return the key of a member's preprocessing: members with the same key share the rows they read."""
    recipe = json.dumps(trained.schema.recipe)  # fill values may come from other rows
    return str(trained.dtype), recipe, *((name, each.tobytes()) for name, each in sorted(trained.statistics.items()))


def scored(p: np.ndarray, y: np.ndarray, threshold: float | None = None) -> tuple[float, float]:
    """Return (sum of log losses, number of correct predictions) of probabilities p (rows, classes) for labels y.
    threshold: as of `predicted_classes`."""
    chosen = p[np.arange(len(y)), y].astype(np.float64)
    right = float((predicted_classes(p, threshold) == y).sum())
    return float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).sum()), right
