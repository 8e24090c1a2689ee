"""The members of an ensemble: how they differ, and their training, each as a run of its own.

    member m     seed + m, its own draw of rows and features (hpcdl/data/resampling.py), its own options
    group g      ranks g R to (g + 1) R - 1, of R ranks for each member: trains the members g, g + G, g + 2 G, ...

The members are alike long, so they are dealt out in a fixed way: nobody asks anybody, and no group waits for another
before all are done. A member that cannot go on is left out, and the others go on.

Snapshots are of one run of all ranks, whose rate falls to 0 in K cycles; the checkpoint at the end of a cycle is a
member. Boosting trains one member after another, each by all ranks, on rows drawn by weights that the member before it
has changed: weights in the gradient would need every strategy to know of them.
"""

import contextlib
import itertools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.export import write_json
from hpcdl.comm import refuse_together
from hpcdl.data.data_options import DataOptions, held_out_rows
from hpcdl.data.format import find_data_file, read_info
from hpcdl.data.resampling import Draw
from hpcdl.errors import AgreedError, UsageError, blamed_on, line
from hpcdl.files import atomic_write
from hpcdl.launch.command_lines import Command
from hpcdl.launch.isolated_run import FAILED, Outcome, all_come, attempt, failure, record
from hpcdl.launch.launch_consistency import reading
from hpcdl.optim.schedules import cycle
from hpcdl.plugins import names_in, names_in_line, refuse_untrusted
from hpcdl.runs.folder import summary_of
from hpcdl.runs.help import dashed
from hpcdl.runs.options import Options
from hpcdl.search import combining, journal
from hpcdl.search.ensemble import MEMBER, MEMBERS, Ensemble, EnsembleMember
from hpcdl.search.search_log_reader import best as best_of
from hpcdl.search.search_log_reader import read
from hpcdl.search.space import Space

KEPT = 100_000  # checkpoints of a run of snapshots: those at the end of a cycle, and where it was interrupted
WEIGHTS = "weights.npz"  # of boosting, for the member after this one
Stop = Callable[[], bool]  # whether all is to end
UNFINISHED = ("signal", "time limit")  # why a run ended that is to be gone on with


class Spec(NamedTuple):
    """A member as it is to be trained. differs: in a few words; draw: of its rows and features; trust: what in its
    checkpoint may be called.
    """

    number: int
    command: Command
    seed: int
    differs: str
    draw: Draw
    trust: tuple[str, ...] = ()


def varied(vary: list[str]) -> list[dict[str, str]]:
    """What --vary "model=mlp:64|mlp:256" says, as values by option, in turns. Raises UsageError."""
    choices: dict[str, list[str]] = {}
    for each in vary:
        name, equals, texts = each.partition("=")
        name = dashed(name.strip())
        values = [text.strip() for text in texts.split("|")]
        if not equals or not name or not all(values) or name in choices:
            raise UsageError(f"--vary {each}: say an option once and its values, as --vary 'model=mlp:64|mlp:256'")
        choices[name] = values
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def named_in(lines: list[str], vary: list[str]) -> list[tuple[str, str]]:
    """The names of code in lines of trainings and in --vary, each with its option."""
    turns = [f"--{name}={text}" for turn in varied(vary) for name, text in turn.items()]
    return [name for each in (*lines, *map(shlex.quote, turns)) for name in names_in_line(each)]


def names_told(options: Options) -> list[str]:
    """The names of code that a checkpoint repeats of the options of a training."""
    return [name for key in ("data", "model") for name in names_in(key, getattr(options, key))]


def member_spec(options: Any, number: int, command: Command, turn: dict[str, str], trust: tuple[str, ...]) -> Spec:
    """Member number so many of what train-ensemble is asked for. turn: its values of --vary; trust: of the Spec."""
    seed = options.seed + number
    differs = [f"seed={seed}", *(f"{name}={value}" for name, value in turn.items())]
    draw = Draw(options.seed, number, options.bagging, None, options.subspace)
    return Spec(number, command, seed, " ".join(differs), draw, trust)


def searched(folder: str, best: int, trust: tuple[str, ...] = ()) -> tuple[str, list[dict[str, str]]]:
    """The program of a search and the option values of its best trials, the best first. Raises UsageError.

    trust: the values of --trust.
    """
    try:
        found = read(Path(folder))
        program, described = (found.settings.get(name) for name in ("program", "space"))
        if not isinstance(program, str) or not isinstance(described, list):
            raise UsageError("its journal does not say what was searched")
        known = Space.read(described)
    except UsageError as error:
        raise UsageError(f"--from {folder}: {error}") from None
    rows = best_of(found.rows(), best)
    if len(rows) < best:
        raise UsageError(f"--from {folder} --best {best}: it has {len(rows)} trials with a score")
    turns = [known.texts(row.values) for row in rows]
    named = named_in([with_values(program, turn) for turn in turns], [])
    refuse_untrusted(named, str(Path(folder) / journal.NAME), trust)
    return program, turns


def of_values(data: str) -> bool:
    """Whether a data set has values to predict; of one's own, that shows when it is there."""
    with contextlib.suppress(UsageError):
        return not read_info(find_data_file(data)).classes
    return False


def with_values(text: str, values: dict[str, str]) -> str:
    """The line of a training with some options more, which win."""
    return " ".join([text, *(f"--{name}={shlex.quote(value)}" for name, value in values.items())])


# -- the training of one ---------------------------------------------------------------------------------------------


def path_of(folder: Path, number: int) -> Path:
    """The folder of a member's run."""
    return folder / MEMBERS / f"{number:04d}"


def done(path: Path) -> bool:
    """Whether a member's run has ended, well or not."""
    found = summary_of(path)
    return failure(path) is not None or (found is not None and found.get("stopped") not in UNFINISHED)


def snapshots_of(count: int) -> Callable[[Any, Any, int], None]:
    """What prepares a run of so many snapshots: a checkpoint at the end of each cycle."""

    def prepare(data: Any, options: Any, workers: int) -> None:
        steps = options.plan(workers, data)[2]
        length = cycle(steps, count)
        if length * (count - 1) >= steps:
            raise UsageError(f"--snapshots {count}: {steps} steps are not so many cycles; give more --epochs")
        options.checkpoint_every, options.keep = length, KEPT

    return prepare


def train_one(comm: MPI.Intracomm, spec: Spec, folder: Path, seed: int, snapshots: int = 0) -> Outcome:
    """Train a member on the ranks of `comm`, from its last checkpoint where it has one; collective.

    seed: of the ensemble. snapshots: how many cycles it is to have.
    """
    path, how = path_of(folder, spec.number), None
    try:
        with refuse_together(comm), blamed_on(f"{path} cannot be written"):
            if comm.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                (path / FAILED).unlink(missing_ok=True)
                draw = {"rows": spec.draw.rows, "features": spec.draw.features, "ensemble_seed": seed}
                about = {"number": spec.number, "differs": spec.differs, "seed": spec.seed, **draw}
                if not (path / MEMBER).exists():
                    write_json(about, path / MEMBER)
                how = [f"--resume={path}"] if (path / "checkpoint.h5").exists() else [f"--out={path}", "--force"]
        how = [*comm.bcast(how), f"--seed={spec.seed}"]
        with reading(comm) as read:
            options = spec.command.options(read, *how)
        options.data_seed, prepare = seed, snapshots_of(snapshots) if snapshots else None

        def prepared(data: Any, options: Any, workers: int) -> None:
            spec.draw.apply(data)
            if prepare is not None:
                prepare(data, options, workers)

        options.prepare = prepared
    except AgreedError as error:
        ended = Outcome(failed=line(error))
        if comm.rank == 0:
            record(path, ended)
        return ended
    return attempt(comm, spec.command.training, options, path)


def news(folder: Path, spec: Spec, end: Outcome) -> str:
    """What is said of a member that has ended."""
    if end.failed is not None:
        return f"failed: {end.failed}"
    if end.stopped in UNFINISHED:
        return "stopped"
    found = summary_of(path_of(folder, spec.number)) or {}
    names = [name for name in ("test_accuracy", "test_rmse", "test_loss") if isinstance(found.get(name), int | float)]
    return ", ".join(f"{name.replace('_', ' ')} {found[name]:.4g}" for name in names)


def stopping(comm: MPI.Intracomm, stop: Stop) -> bool:
    """Whether a rank of these was told to end; collective."""
    return bool(comm.allreduce(int(stop())))


def beside(
    world: MPI.Intracomm,
    specs: list[Spec],
    ranks: int,
    folder: Path,
    seed: int,
    stop: Stop,
    told: Callable[[Spec, Outcome], None],
) -> bool:
    """Train the members that are not done, each on so many ranks; collective. Whether they were stopped.

    told(spec, outcome): is called on the first rank of a member's group.
    """
    groups = world.size // ranks
    group = world.rank // ranks if world.rank < groups * ranks else None
    comm: Any = world.Split(MPI.UNDEFINED if group is None else group, world.rank)
    stopped = False
    if group is not None:
        for spec in specs[group::groups]:
            if comm.bcast(done(path_of(folder, spec.number)) if comm.rank == 0 else None):
                continue
            if stopping(comm, stop):
                stopped = True
                break
            ended = train_one(comm, spec, folder, seed)
            if comm.rank == 0:
                told(spec, ended)
            if ended.stopped in UNFINISHED:
                stopped = True
                break
        comm.Free()
    all_come(world)
    return bool(world.allreduce(stopped))


def snapshots(folder: Path, spec: Spec, count: int) -> list[EnsembleMember]:
    """The members that a run of so many snapshots has left: the checkpoints at the ends of its cycles."""
    path = path_of(folder, spec.number)
    steps = (summary_of(path) or {}).get("steps", 0)
    length, found = cycle(steps, count), []
    for number in range(count):
        step = min((number + 1) * length, steps)
        name = "checkpoint.h5" if step == steps else f"checkpoint-{step:09d}.h5"
        if (path / name).is_file():
            found.append(EnsembleMember(number, f"{MEMBERS}/{path.name}/{name}", f"step={step}"))
    return found


# -- boosting --------------------------------------------------------------------------------------------------------


class Boosted(NamedTuple):
    """What a member of SAMME has brought: its weighted error, the weight of its vote, the weights for the next one."""

    error: float
    alpha: float
    weights: np.ndarray


def in_sequence(
    world: MPI.Intracomm,
    specs: list[Spec],
    folder: Path,
    seed: int,
    validation: float,
    stop: Stop,
    told: Callable[[Spec, Outcome], None],
) -> tuple[bool, list[tuple[Spec, Boosted]]]:
    """SAMME: train the members one after another, by all ranks; collective. Whether it was stopped; what they brought.

    It ends before, with a member that is no better than chance: that is left out.
    """
    weights: np.ndarray | None = None
    found: list[tuple[Spec, Boosted]] = []
    for spec in specs:
        path = path_of(folder, spec.number)
        if not world.bcast(done(path) if world.rank == 0 else None):
            if stopping(world, stop):
                return True, found
            drawn = spec._replace(draw=spec.draw._replace(rows=weights is not None, weights=weights))
            ended = train_one(world, drawn, folder, seed)
            if world.rank == 0:
                told(spec, ended)
            if ended.stopped in UNFINISHED:
                return True, found
        if world.bcast(failure(path) if world.rank == 0 else None) is not None:
            break  # those that follow depend on it
        brought = boosted(world, spec, folder, seed, validation, weights)
        if brought.alpha <= 0:
            break
        found.append((spec, brought))
        weights = brought.weights
    return False, found


def boosted(
    world: MPI.Intracomm, spec: Spec, folder: Path, seed: int, validation: float, weights: np.ndarray | None
) -> Boosted:
    """What a trained member brings, as its folder says, or from its predictions of all training rows; collective."""
    path = path_of(folder, spec.number) / WEIGHTS
    kept = None
    with refuse_together(world), blamed_on(f"{path} cannot be read"):
        if world.rank == 0 and path.is_file():
            with np.load(path) as file:
                kept = Boosted(float(file["error"]), float(file["alpha"]), file["weights"])
    kept = world.bcast(kept)
    if kept is not None:
        return kept
    wrong, classes = mistakes(world, spec, folder, seed, validation)
    if weights is None:
        weights = np.full(len(wrong), 1 / len(wrong))
    found = Boosted(*combining.samme(weights, wrong, classes))
    with refuse_together(world), blamed_on(f"{path} cannot be written"):
        if world.rank == 0:
            with atomic_write(path) as into:
                np.savez(into, **found._asdict())
    return found


def mistakes(world: MPI.Intracomm, spec: Spec, folder: Path, seed: int, validation: float) -> tuple[np.ndarray, int]:
    """Which training examples a member takes for another class, and of how many classes; collective.

    Each rank predicts a part of each block of rows.
    """
    member = EnsembleMember(spec.number, str(path_of(folder, spec.number).relative_to(folder)))
    ensemble = Ensemble(folder, [member], "mean", seed, trust=spec.trust)
    with refuse_together(world):
        ensemble.open(0, 1)
        if not ensemble.about.classes:
            raise UsageError("--boost samme is of classes; these data have values to predict")
        rows = ensemble.rows(ensemble.about.source, "train", world.size)
    wrong, labels = [], []
    for block, outputs in ensemble.blocks(world, rows, (world.rank, world.size)):
        y = np.asarray(block.y)
        labels.append(y)
        wrong.append(outputs[0].argmax(axis=1) != y if outputs else np.zeros(len(y), bool))
    whole = np.concatenate(wrong).astype(np.uint8)
    world.Allreduce(MPI.IN_PLACE, whole)
    held_out = held_out_of(np.concatenate(labels), ensemble.about.classes, seed, validation)
    return np.delete(whole.astype(bool), held_out), ensemble.about.classes


def held_out_of(y: np.ndarray, classes: int, seed: int, validation: float) -> np.ndarray:
    """The training rows (sorted) that this fraction holds out: of all members the same."""
    return held_out_rows(y, classes, DataOptions("iid", np.dtype(np.float32), seed, validation, "", False))


def bags(ensemble: Ensemble, specs: dict[int, Spec], held_out: np.ndarray, rows: int) -> dict[int, np.ndarray]:
    """Of the members that this rank has: which of so many training rows each was not trained on; held-out ones neither.

    Those that validation holds out are left apart: they are no part of an out-of-bag score.
    """
    kept, found = np.delete(np.arange(rows), held_out), {}
    for each in ensemble.own:
        unseen = np.zeros(rows, bool)
        unseen[kept] = True
        unseen[kept[specs[each.member.number].draw.examples(len(kept))]] = False
        found[each.member.number] = unseen
    return found
