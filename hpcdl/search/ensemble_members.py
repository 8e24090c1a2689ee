"""Training of an ensemble's members: how they differ, and their runs, each in a folder of its own.

    member m     seed + m, its own draw of rows and features (hpcdl/data/resampling.py), its own options
    group g      ranks g R to (g + 1) R - 1, R ranks per member: trains members g, g + G, g + 2 G, ...

Members take equally long, so they are assigned statically: groups do not communicate before all members are done. A
member that fails is left out, and the others go on.

Snapshots come from one run of all ranks, whose learning rate falls to 0 in K cycles; the checkpoint at the end of a
cycle is a member. Boosting trains one member after another, each on all ranks, on rows resampled by weights that the
previous member has changed: weights in the gradient would have to be known to every strategy.
"""

import contextlib
import dataclasses
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
from hpcdl.formatting import dashed
from hpcdl.launch.command_lines import Command
from hpcdl.launch.isolated_run import FAILED, Outcome, all_come, attempt, failure, record
from hpcdl.launch.launch_consistency import reading
from hpcdl.optim.schedules import cycle
from hpcdl.plugins import names_in, names_in_line, refuse_untrusted
from hpcdl.runs.context import RunContext
from hpcdl.runs.folder import summary_of
from hpcdl.runs.options import Options
from hpcdl.search import combining, journal
from hpcdl.search.ensemble import MEMBER, MEMBERS, Ensemble, EnsembleMember
from hpcdl.search.search_log_reader import best as best_of
from hpcdl.search.search_log_reader import read
from hpcdl.search.space import Space

KEPT = 100_000  # checkpoints that a run of snapshots keeps
WEIGHTS = "weights.npz"  # boosting weights for the next member
Stop = Callable[[], bool]  # True once training is to end
UNFINISHED = ("signal", "time limit")  # stop reasons of runs that can be continued


class MemberSpec(NamedTuple):
    """Specification of a member. differs: how it differs, in words; draw: of its rows and features; trust: names of
    code that its checkpoint may call."""

    number: int
    command: Command
    seed: int
    differs: str
    draw: Draw
    trust: tuple[str, ...] = ()


def variations(vary: list[str]) -> list[dict[str, str]]:
    """Return the option values of --vary "model=mlp:64|mlp:256", one dictionary per combination. Raises UsageError."""
    choices: dict[str, list[str]] = {}
    for each in vary:
        name, equals, texts = each.partition("=")
        name = dashed(name.strip())
        values = [text.strip() for text in texts.split("|")]
        if not equals or not name or not all(values) or name in choices:
            raise UsageError(f"--vary {each}: say an option once and its values, as --vary 'model=mlp:64|mlp:256'")
        choices[name] = values
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def plugin_names(lines: list[str], vary: list[str]) -> list[tuple[str, str]]:
    """Return (option, name) of the user's code named in command lines and in --vary."""
    turns = [f"--{name}={text}" for turn in variations(vary) for name, text in turn.items()]
    return [name for each in (*lines, *map(shlex.quote, turns)) for name in names_in_line(each)]


def plugin_names_of_options(options: Options) -> list[str]:
    """Return (option, name) of the user's code that a checkpoint stores from the options of a training."""
    return [name for key in ("data", "model") for name in names_in(key, getattr(options, key))]


def member_spec(
    options: Any, number: int, command: Command, turn: dict[str, str], trust: tuple[str, ...]
) -> MemberSpec:
    """Return the specification of a member. turn: its values of --vary; trust: as in Spec."""
    seed = options.seed + number
    differs = [f"seed={seed}", *(f"{name}={value}" for name, value in turn.items())]
    draw = Draw(options.seed, number, options.bagging, None, options.subspace)
    return MemberSpec(number, command, seed, " ".join(differs), draw, trust)


def best_of_search(folder: str, best: int, trust: tuple[str, ...] = ()) -> tuple[str, list[dict[str, str]]]:
    """Return the program of a search and the option values of its best trials, the best first. Raises UsageError.

    trust: the values of --trust.
    """
    try:
        trials = read(Path(folder))
        program, space_lines = (trials.settings.get(name) for name in ("program", "space"))
        if not isinstance(program, str) or not isinstance(space_lines, list):
            raise UsageError("its journal does not say what was searched")
        space = Space.read(space_lines)
    except UsageError as error:
        raise UsageError(f"--from {folder}: {error}") from None
    rows = best_of(trials.rows(), best)
    if len(rows) < best:
        raise UsageError(f"--from {folder} --best {best}: it has {len(rows)} trials with a score")
    turns = [space.texts(row.values) for row in rows]
    named = plugin_names([with_options(program, turn) for turn in turns], [])
    refuse_untrusted(named, str(Path(folder) / journal.NAME), trust)
    return program, turns


def has_values(data: str) -> bool:
    """True if a data set has values to predict; False for user-defined data, which are not open yet."""
    with contextlib.suppress(UsageError):
        return not read_info(find_data_file(data)).classes
    return False


def with_options(text: str, values: dict[str, str]) -> str:
    """Return the command line with more options appended, which win."""
    return " ".join([text, *(f"--{name}={shlex.quote(value)}" for name, value in values.items())])


# -- training of a member --------------------------------------------------------------------------------------------


def member_folder(folder: Path, number: int) -> Path:
    """Return the folder of a member's run."""
    return folder / MEMBERS / f"{number:04d}"


def has_ended(path: Path) -> bool:
    """True if a member's run has ended or failed."""
    summary = summary_of(path)
    return failure(path) is not None or (summary is not None and summary.get("stopped") not in UNFINISHED)


def snapshot_hook(count: int) -> Callable[[Any, Any, int], Options]:
    """Return the hook that prepares a run of `count` snapshots: a checkpoint at the end of each cycle."""

    def prepare(data: Any, options: Any, workers: int) -> Options:
        steps = options.plan(workers, data)[2]
        length = cycle(steps, count)
        if length * (count - 1) >= steps:
            raise UsageError(f"--snapshots {count}: {steps} steps are not so many cycles; give more --epochs")
        return dataclasses.replace(options, checkpoint_every=length, keep=KEPT)

    return prepare


def train_one(comm: MPI.Intracomm, spec: MemberSpec, folder: Path, seed: int, snapshots: int = 0) -> Outcome:
    """Train a member on the ranks of `comm`, from its last checkpoint if it has one; collective.

    seed: of the ensemble. snapshots: number of cycles.
    """
    path, arguments = member_folder(folder, spec.number), None
    try:
        with refuse_together(comm), blamed_on(f"{path} cannot be written"):
            if comm.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                (path / FAILED).unlink(missing_ok=True)
                draw = {"rows": spec.draw.rows, "features": spec.draw.features, "ensemble_seed": seed}
                description = {"number": spec.number, "differs": spec.differs, "seed": spec.seed, **draw}
                if not (path / MEMBER).exists():
                    write_json(description, path / MEMBER)
                arguments = [f"--resume={path}"] if (path / "checkpoint.h5").exists() else [f"--out={path}", "--force"]
        arguments = [*comm.bcast(arguments), f"--seed={spec.seed}"]
        with reading(comm) as read:
            options = spec.command.options(read, *arguments)
    except AgreedError as error:
        outcome = Outcome(failed=line(error))
        if comm.rank == 0:
            record(path, outcome)
        return outcome

    def prepare(data: Any, options: Options, workers: int) -> tuple[Any, Options]:
        data = spec.draw.resample(data)
        return data, snapshot_hook(snapshots)(data, options, workers) if snapshots else options

    return attempt(comm, spec.command.training, options, path, RunContext(data_seed=seed, prepare=prepare))


def outcome_text(folder: Path, spec: MemberSpec, end: Outcome) -> str:
    """Return the progress text for a member that has ended."""
    if end.failed is not None:
        return f"failed: {end.failed}"
    if end.stopped in UNFINISHED:
        return "stopped"
    summary = summary_of(member_folder(folder, spec.number)) or {}
    names = [name for name in ("test_accuracy", "test_rmse", "test_loss") if isinstance(summary.get(name), int | float)]
    return ", ".join(f"{name.replace('_', ' ')} {summary[name]:.4g}" for name in names)


def any_stops(comm: MPI.Intracomm, stop: Stop) -> bool:
    """True if any of these ranks is to stop; collective."""
    return bool(comm.allreduce(int(stop())))


def train_in_groups(
    world: MPI.Intracomm,
    specs: list[MemberSpec],
    ranks: int,
    folder: Path,
    seed: int,
    stop: Stop,
    on_end: Callable[[MemberSpec, Outcome], None],
) -> bool:
    """Train the remaining members, each on `ranks` ranks, in groups side by side; collective. Returns True if stopped.

    on_end(spec, outcome): called on the first rank of a member's group when the member has ended.
    """
    groups = world.size // ranks
    group = world.rank // ranks if world.rank < groups * ranks else None
    comm: Any = world.Split(MPI.UNDEFINED if group is None else group, world.rank)
    stopped = False
    if group is not None:
        for spec in specs[group::groups]:
            if comm.bcast(has_ended(member_folder(folder, spec.number)) if comm.rank == 0 else None):
                continue
            if any_stops(comm, stop):
                stopped = True
                break
            outcome = train_one(comm, spec, folder, seed)
            if comm.rank == 0:
                on_end(spec, outcome)
            if outcome.stopped in UNFINISHED:
                stopped = True
                break
        comm.Free()
    all_come(world)
    return bool(world.allreduce(stopped))


def snapshot_members(folder: Path, spec: MemberSpec, count: int) -> list[EnsembleMember]:
    """Return the members of a run of `count` snapshots: the checkpoints at the ends of its cycles."""
    path = member_folder(folder, spec.number)
    steps = (summary_of(path) or {}).get("steps", 0)
    length, members = cycle(steps, count), []
    for number in range(count):
        step = min((number + 1) * length, steps)
        name = "checkpoint.h5" if step == steps else f"checkpoint-{step:09d}.h5"
        if (path / name).is_file():
            members.append(EnsembleMember(number, f"{MEMBERS}/{path.name}/{name}", f"step={step}"))
    return members


# -- boosting --------------------------------------------------------------------------------------------------------


class BoostingResult(NamedTuple):
    """Result of a SAMME member: its weighted error, the weight of its vote, the row weights for the next member."""

    error: float
    alpha: float
    weights: np.ndarray


def train_boosted(
    world: MPI.Intracomm,
    specs: list[MemberSpec],
    folder: Path,
    seed: int,
    validation: float,
    stop: Stop,
    on_end: Callable[[MemberSpec, Outcome], None],
) -> tuple[bool, list[tuple[MemberSpec, BoostingResult]]]:
    """SAMME: train the members one after another on all ranks; collective. Returns (stopped, results by member).

    Ends early at a member that is no better than chance; that member is left out.
    """
    weights: np.ndarray | None = None
    results: list[tuple[MemberSpec, BoostingResult]] = []
    for spec in specs:
        path = member_folder(folder, spec.number)
        if not world.bcast(has_ended(path) if world.rank == 0 else None):
            if any_stops(world, stop):
                return True, results
            resampled = spec._replace(draw=spec.draw._replace(rows=weights is not None, weights=weights))
            outcome = train_one(world, resampled, folder, seed)
            if world.rank == 0:
                on_end(spec, outcome)
            if outcome.stopped in UNFINISHED:
                return True, results
        if world.bcast(failure(path) if world.rank == 0 else None) is not None:
            break  # later members depend on it
        result = boosting_result(world, spec, folder, seed, validation, weights)
        if result.alpha <= 0:
            break
        results.append((spec, result))
        weights = result.weights
    return False, results


def boosting_result(
    world: MPI.Intracomm, spec: MemberSpec, folder: Path, seed: int, validation: float, weights: np.ndarray | None
) -> BoostingResult:
    """Return the boosting result of a trained member, from its folder or from predictions of all rows; collective."""
    path = member_folder(folder, spec.number) / WEIGHTS
    stored = None
    with refuse_together(world), blamed_on(f"{path} cannot be read"):
        if world.rank == 0 and path.is_file():
            with np.load(path) as file:
                stored = BoostingResult(float(file["error"]), float(file["alpha"]), file["weights"])
    stored = world.bcast(stored)
    if stored is not None:
        return stored
    wrong, classes = misclassified_rows(world, spec, folder, seed, validation)
    if weights is None:
        weights = np.full(len(wrong), 1 / len(wrong))
    result = BoostingResult(*combining.samme(weights, wrong, classes))
    with refuse_together(world), blamed_on(f"{path} cannot be written"):
        if world.rank == 0:
            with atomic_write(path) as into:
                np.savez(into, **result._asdict())
    return result


def misclassified_rows(
    world: MPI.Intracomm, spec: MemberSpec, folder: Path, seed: int, validation: float
) -> tuple[np.ndarray, int]:
    """Return which training rows a member misclassifies, and the number of classes; collective.

    Each rank predicts a part of the blocks.
    """
    member = EnsembleMember(spec.number, str(member_folder(folder, spec.number).relative_to(folder)))
    ensemble = Ensemble(folder, [member], "mean", seed, trust=spec.trust)
    with refuse_together(world):
        ensemble.open(0, 1)
        if not ensemble.reference.classes:
            raise UsageError("--boost samme is of classes; these data have values to predict")
        rows = ensemble.rows(ensemble.reference.source, "train", world.size)
    wrong, labels = [], []
    for block, outputs in ensemble.blocks(world, rows, (world.rank, world.size)):
        y = np.asarray(block.y)
        labels.append(y)
        wrong.append(outputs[0].argmax(axis=1) != y if outputs else np.zeros(len(y), bool))
    misclassified = np.concatenate(wrong).astype(np.uint8)
    world.Allreduce(MPI.IN_PLACE, misclassified)
    held_out = held_out_of(np.concatenate(labels), ensemble.reference.classes, seed, validation)
    return np.delete(misclassified.astype(bool), held_out), ensemble.reference.classes


def held_out_of(y: np.ndarray, classes: int, seed: int, validation: float) -> np.ndarray:
    """Return the training rows (sorted) that this fraction holds out, the same for all members."""
    return held_out_rows(y, classes, DataOptions("iid", np.dtype(np.float32), seed, validation, "", False))


def out_of_bag_masks(
    ensemble: Ensemble, specs: dict[int, MemberSpec], held_out: np.ndarray, rows: int
) -> dict[int, np.ndarray]:
    """Return, for each member of this rank, a mask (rows,) of the training rows that it was not trained on.

    Rows of the validation part are excluded: they are not part of an out-of-bag score.
    """
    training, masks = np.delete(np.arange(rows), held_out), {}
    for loaded in ensemble.local_members:
        unseen = np.zeros(rows, bool)
        unseen[training] = True
        unseen[training[specs[loaded.member.number].draw.examples(len(training))]] = False
        masks[loaded.member.number] = unseen
    return masks
