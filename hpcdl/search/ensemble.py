"""An ensemble: runs that predict together. What lies in its folder, and what its members make of rows of a data set.

    ensemble.yaml               what was asked for
    members/0003/               the run of member 3
    members/0003/member.json    how it differs from the others
    summary.json                the members, how they are combined, the scores

    rank r      members r, r + N, ...     reads their checkpoints and all rows; adds up what they predict
    reduce      of a block of rows the sum over members of p, of p^2 and of votes, (3, rows, classes), to one rank,
                the next one for the next block, which combines them, scores them, and writes them

So members stay where they are and only probabilities travel: of each row 3 values for each class, however many members
there are (4 of them where members have weights; of values 2 for each output).
"""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.errors import UsageError
from hpcdl.files import from_json
from hpcdl.inference.prediction_input import Block, NewRows, new_rows
from hpcdl.inference.predictions import predict
from hpcdl.inference.scores import ClassMeasures, probabilities
from hpcdl.inference.trained_model import Trained
from hpcdl.search import combining

ASKED, FOUND, MEMBERS, MEMBER = "ensemble.yaml", "summary.json", "members", "member.json"
NO_SHARE = 2**62 - 1, 2**62  # of so many blocks the last one, which no data have
MEANS = ("mean", "vote", "stacking")  # how members are combined


class EnsembleMember(NamedTuple):
    """number; run: its folder or a checkpoint in it, below the ensemble's; differs: from the others, in a few words;
    weight: of its vote.
    """

    number: int
    run: str
    differs: str = ""
    weight: float = 1.0


class Stacking(NamedTuple):
    """weights (members,) and bias (classes,): see combining.py."""

    weights: np.ndarray
    bias: np.ndarray


class Opened(NamedTuple):
    """A member that this rank has read. place: its place among the members."""

    place: int
    member: EnsembleMember
    trained: Trained
    model: Any


class Combined(NamedTuple):
    """What the members predict for some rows together.

    outputs: (rows, classes) or (rows,) or (rows, outputs), as a model's; spread: of the same shape, the deviation over
    the members; counts (rows, classes): how many take each row for each class, None of values.
    """

    outputs: np.ndarray
    spread: np.ndarray
    counts: np.ndarray | None


def is_ensemble(run: str) -> bool:
    """Whether this is the folder of an ensemble."""
    return (Path(run) / ASKED).is_file()


class Ensemble:
    """Members in a folder, and how they are combined. seed: by which the data of all of them were drawn.

    trust: which names of code in their checkpoints may be called, as of --trust (hpcdl/plugins.py).
    """

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
        self.trust, self.own = tuple(trust), list[Opened]()

    @classmethod
    def read(cls, folder: str, trust: Iterable[str] = ()) -> "Ensemble":
        """The ensemble of a folder. UsageError where it has not ended, or its summary.json is none."""
        path = Path(folder)
        try:
            found = from_json((path / FOUND).read_text())
            if not isinstance(found["members"], list) or found["combine"] not in MEANS:
                raise ValueError
            members = [
                EnsembleMember(int(each["number"]), str(each["run"]), str(each["differs"]), float(each["weight"]))
                for each in found["members"]
                if each["failed"] is None
            ]
            stacking = None
            if found["stacking"] is not None:
                weights, bias = (np.array(found["stacking"][name], np.float64) for name in ("weights", "bias"))
                if weights.shape != (len(members),) or bias.ndim != 1 or not np.isfinite([*weights, *bias]).all():
                    raise ValueError
                stacking = Stacking(weights, bias)
            made = cls(path, members, found["combine"], int(found["seed"]), stacking, trust)
        except FileNotFoundError:
            raise UsageError(f"the ensemble {folder} has not ended: train-ensemble --resume {folder}") from None
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{path / FOUND} is no summary of an ensemble; train-ensemble --resume {folder}") from None
        if not members:
            raise UsageError(f"the ensemble {folder} has no members: all have failed, as its summary.json says")
        return made

    def open(self, rank: int, size: int) -> "Ensemble":
        """Read what this rank, of so many, needs: every size-th member, and of the first what data are. UsageError."""
        self.about = self._trained(self.members[0])
        self.about.name = str(self.folder)
        self.own = []
        for place in range(rank, len(self.members), size):
            member = self.members[place]
            trained = self._trained(member)
            model = trained.model()
            self._refuse_another(trained, model)
            self.own.append(Opened(place, member, trained, model))
        if self.stacking is not None and len(self.stacking.bias) != self.about.classes:
            raise UsageError(f"{self.folder / FOUND}: stacking is not of {self.about.classes} classes")
        return self

    def _trained(self, member: EnsembleMember) -> Trained:
        found = Trained(str(self.folder / member.run), self.trust)
        found.file = str(self.folder)
        found.about["seed"] = self.seed  # of a function of one's own that draws the data
        return found

    def _refuse_another(self, trained: Trained, model: Any) -> None:
        """Raise UsageError where a member cannot be combined with the first one."""
        if hasattr(model, "generate"):
            raise UsageError(f"{trained.name} writes text, of which a mean over members is not at hand")
        alike = [
            (each.features, each.classes, each.outputs, each.schema.labels, each.schema.outputs)
            for each in (self.about, trained)
        ]
        if alike[0] != alike[1]:
            raise UsageError(f"{trained.name} was trained on data of another form than {self.members[0].run}")

    # -- what members predict ----------------------------------------------------------------------------------------

    def rows(self, source: str, group: str, ranks: int, delimiter: str = "") -> dict[Any, NewRows]:
        """The rows of a source, as each of the own members sees them; by `seen_as`. Local; raises UsageError."""
        found: dict[Any, NewRows] = {}
        for trained in [self.about, *(each.trained for each in self.own)]:
            if seen_as(trained) not in found:
                found[seen_as(trained)] = new_rows(source, trained, group, ranks, delimiter)
        return found

    def blocks(
        self, world: MPI.Intracomm, rows: dict[Any, NewRows], share: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[Block, list[np.ndarray]]]:
        """Each block of the rows, and what each of the own members predicts for it; collective, on all ranks alike.

        Of classes the probabilities, (rows, classes). share: (rank, size): only each size-th block is predicted.
        """
        blocks, mine = {key: each.blocks() for key, each in rows.items()}, seen_as(self.about)
        for number in itertools.count():
            block, outputs = None, []
            with refuse_together(world):
                calls = {key: next(each, None) for key, each in blocks.items()}
                if (first := calls[mine]) is not None:
                    loaded = {mine: first()} | {key: call() for key, call in calls.items() if key != mine and call}
                    block = loaded[mine]
                    for each in self.own if number % share[1] == share[0] else []:
                        key = seen_as(each.trained)
                        found = predict(each.model, each.trained, loaded[key], rows[key].name)
                        outputs.append(probabilities(found) if self.about.classes else found)
            if block is None:
                return
            yield block, outputs

    def sums(self, block: Block, outputs: list[np.ndarray]) -> np.ndarray:
        """What the own members add to the sums over all, (sums, rows, ...), float64."""
        classes, weighted = self.about.classes, self.weighted
        shape = (len(block.x), classes) if classes else (len(block.x), *self.about.outputs)
        found = np.zeros((2 + bool(classes) + weighted, *shape))
        for each, output in zip(self.own, outputs, strict=True):
            found[0] += output
            found[1] += np.square(output, dtype=np.float64)
            if not classes:
                continue
            vote = combining.votes(output)
            found[2] += vote
            if self.stacking is not None:
                found[3] += self.stacking.weights[each.place] * combining.logs(output)
            elif weighted:
                found[3] += each.member.weight * vote
        return found

    @property
    def weighted(self) -> bool:
        """Whether a sum with weights is needed, too."""
        return self.stacking is not None or any(each.weight != 1 for each in self.members)

    def combined(self, sums: np.ndarray) -> Combined:
        """What the sums over all members make."""
        members, classes = len(self.members), self.about.classes
        spread = combining.deviation(sums[0], sums[1], members)
        outputs = sums[0] / members
        if self.stacking is not None:
            outputs = combining.softmax(sums[3] + self.stacking.bias)
        elif classes and self.combine == "vote":
            outputs = sums[2 + self.weighted] / sum(each.weight for each in self.members)
        kind = self.about.dtype
        return Combined(outputs.astype(kind), spread.astype(kind), sums[2] if classes else None)

    def together(
        self, comm: Communicator, rows: dict[Any, NewRows]
    ) -> Iterator[tuple[Block, list[np.ndarray], Combined | None]]:
        """Each block of the rows, what the own members predict for it, and on one rank in turn what all do; collective.

        Block k is combined on rank k mod N.
        """
        for number, (block, outputs) in enumerate(self.blocks(comm.mpi, rows)):
            sums, place = self.sums(block, outputs), number % comm.size
            if sums.size:
                comm.reduce(sums, place)
            yield block, outputs, self.combined(sums) if comm.rank == place else None

    def labels(self, world: MPI.Intracomm, source: str) -> np.ndarray:
        """Of all training rows of a source; collective."""
        with refuse_together(world):
            rows = self.rows(source, "train", world.size)
        return np.concatenate([np.asarray(block.y) for block, _ in self.blocks(world, rows, NO_SHARE)])

    def tested(self, world: MPI.Intracomm, source: str) -> bool:
        """Whether a source has a test part; collective."""
        answer = False
        with contextlib.suppress(UsageError):
            answer = bool(self.rows(source, "test", world.size))
        return bool(world.allreduce(answer, MPI.LAND))

    # -- what is fitted ----------------------------------------------------------------------------------------------

    def stack(self, comm: Communicator, source: str, held_out: np.ndarray) -> None:
        """Fit stacking on these training rows (sorted numbers), which no member was trained on; collective."""
        logs, labels, at = [], [], 0
        with refuse_together(comm.mpi):
            rows = self.rows(source, "train", comm.size)
        for block, outputs in self.blocks(comm.mpi, rows):
            inside = held_out[slice(*np.searchsorted(held_out, (at, at + len(block.x))))] - at
            logs.append(np.array([combining.logs(each[inside]) for each in outputs]))
            labels.append(np.asarray(block.y)[inside])
            at += len(block.x)
        whole = np.zeros((len(self.members), len(held_out), self.about.classes))
        for place, each in enumerate(self.own):
            whole[each.place] = np.concatenate([part[place] for part in logs])
        comm.reduce(whole)
        fitted = combining.stack(whole, np.concatenate(labels)) if comm.rank == 0 else None
        self.stacking = Stacking(*comm.mpi.bcast(fitted))

    def out_of_bag(self, comm: Communicator, source: str, bags: dict[int, np.ndarray]) -> dict[str, float] | None:
        """Score each training row by the members that have not seen it; collective. The same on all ranks.

        bags: of the own members, by number, which of the training rows each has not seen. Of values the root mean
        square of the errors.
        """
        with refuse_together(comm.mpi):
            rows = self.rows(source, "train", comm.size)
        found, at = np.zeros(3), 0
        for number, (block, outputs) in enumerate(self.blocks(comm.mpi, rows)):
            y, place = np.asarray(block.y), number % comm.size
            shape = (len(y), self.about.classes) if self.about.classes else (len(y), *self.about.outputs)
            sums = np.zeros((2, *shape))
            for each, output in zip(self.own, outputs, strict=True):
                unseen = bags[each.member.number][at : at + len(y)].reshape(-1, *[1] * (len(shape) - 1))
                sums += np.where(unseen, [output, np.ones(shape)], 0.0)
            at += len(y)
            comm.reduce(sums, place)
            if comm.rank == place:
                judged = sums[1].reshape(len(y), -1)[:, 0] > 0
                mean = sums[0][judged] / sums[1][judged]
                if self.about.classes:
                    found += [*scored(mean, y[judged]), judged.sum()]
                else:
                    found += [0, np.square(mean - y[judged]).sum(), judged.sum()]
        comm.mpi.Allreduce(MPI.IN_PLACE, found)
        loss, score, count = found.tolist()
        if not count:
            return None
        if self.about.classes:
            return {"loss": loss / count, "accuracy": score / count, "rows": count}
        return {"rmse": float(np.sqrt(score / count / max(1, int(np.prod(self.about.outputs))))), "rows": count}


def seen_as(trained: Trained) -> tuple:
    """What tells members apart that see other numbers in the same rows."""
    recipe = json.dumps(trained.schema.recipe)  # its fills may be those of other rows
    return str(trained.dtype), recipe, *((name, each.tobytes()) for name, each in sorted(trained.statistics.items()))


def scored(p: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(sum of log losses, right answers) of probabilities (rows, classes)."""
    chosen = p[np.arange(len(y)), y].astype(np.float64)
    return float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).sum()), float((p.argmax(axis=1) == y).sum())


def calibration_error(measures: ClassMeasures) -> float:
    """Of what the measures were told."""
    return float(measures.found()["expected_calibration_error"])
