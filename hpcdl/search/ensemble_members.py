"""Training of an ensemble's members, each in a folder of its own.

    member m     seed + m, its own draw of rows and features (hpcdl/data/resampling.py), its own options
    group g      ranks g R to (g + 1) R - 1, R ranks per member: trains members g, g + G, g + 2 G, ...

Members take equally long, so groups are static and communicate only at the end. A failed member is left out. Snapshots
come from one run of all ranks, whose learning rate falls to 0 in K cycles; the checkpoint at the end of a cycle is a
member. Boosting trains one member after another, each on all ranks, on rows resampled by weights that depend on the
previous member. (Weights in the gradient would need support by every strategy.)"""

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
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_write
from hpcdl.formatting import dashed
from hpcdl.launch.command_lines import Command
from hpcdl.launch.isolated_run import FAILED, Outcome, attempt_in, failure, placed, side_by_side
from hpcdl.optim.schedules import cycle
from hpcdl.plugins import names_in_line, refuse_untrusted
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
    """A member to train. differs: what sets it apart, as text. draw: its rows and features. trust: as of --trust."""

    number: int
    command: Command
    differs: str
    draw: Draw
    trust: tuple[str, ...] = ()


OnEnd = Callable[[MemberSpec, Outcome], None]


def variations(vary: list[str]) -> list[dict[str, str]]:
    """Return the option values of --vary "model=mlp:64|mlp:256", one dictionary per combination. Raises UsageError."""
    choices: dict[str, list[str]] = {}
    for each in vary:
        name, equals, texts = each.partition("=")
        name = dashed(name.strip())
        values = [text.strip() for text in texts.split("|")]
        if not equals or not name or not all(values) or name in choices:
            raise UsageError(f"--vary {each}: give an option once, with its values, as --vary 'model=mlp:64|mlp:256'")
        choices[name] = values
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def plugin_names(lines: list[str], vary: list[str]) -> list[tuple[str, str]]:
    """Return (option, name) for each name of the user's code in command lines and in --vary."""
    turns = [f"--{name}={text}" for turn in variations(vary) for name, text in turn.items()]
    return [name for each in (*lines, *map(shlex.quote, turns)) for name in names_in_line(each)]


def best_of_search(folder: str, best: int, trust: tuple[str, ...] = ()) -> tuple[str, list[dict[str, str]]]:
    """Return a search's program and the option values of its `best` best trials, the best first. Raises UsageError."""
    try:
        trials = read(Path(folder))
        program, space_lines = (trials.settings.get(name) for name in ("program", "space"))
        if not isinstance(program, str) or not isinstance(space_lines, list):
            raise UsageError("its journal names no program and space")
        space = Space.read(space_lines)
    except UsageError as error:
        raise UsageError(f"--from {folder}: {error}") from None
    rows = best_of(trials.rows(), best)
    if len(rows) < best:
        raise UsageError(f"--from {folder} --best {best}: the search has only {len(rows)} trials with a score")
    turns = [space.texts(row.values) for row in rows]
    named = plugin_names([with_options(program, turn) for turn in turns], [])
    refuse_untrusted(named, str(Path(folder) / journal.NAME), trust)
    return program, turns


def has_values(data: str) -> bool:
    """True if a data set has values to predict, not classes; False for user-defined data, which are not open yet."""
    with contextlib.suppress(UsageError):
        return not read_info(find_data_file(data)).classes
    return False


def with_options(text: str, values: dict[str, str]) -> str:
    """Return the command line with options appended, which replace earlier ones."""
    return " ".join([text, *(f"--{name}={shlex.quote(value)}" for name, value in values.items())])


def member_folder(folder: Path, number: int) -> Path:
    return folder / MEMBERS / f"{number:04d}"


def has_ended(path: Path) -> bool:
    """True if a member's run has ended or failed."""
    summary = summary_of(path)
    return failure(path) is not None or (summary is not None and summary.get("stopped") not in UNFINISHED)


def snapshot_options(count: int, data: Any, options: Options, workers: int) -> Options:
    """Return the options of a run of `count` snapshots: a checkpoint at the end of each cycle. Raises UsageError."""
    steps = options.plan(workers, data)[2]
    length = cycle(steps, count)
    if length * (count - 1) >= steps:
        raise UsageError(f"--snapshots {count}: {steps} steps are too few for so many cycles; give more --epochs")
    return dataclasses.replace(options, checkpoint_every=length, keep=KEPT)


def train_one(comm: MPI.Intracomm, spec: MemberSpec, folder: Path, snapshots: int = 0) -> Outcome:
    """Train a member on `comm`, from its last checkpoint if any; collective. snapshots: number of cycles; 0: none."""
    path, seed = member_folder(folder, spec.number), spec.draw.seed + spec.number

    def begin() -> list[str]:
        path.mkdir(parents=True, exist_ok=True)
        (path / FAILED).unlink(missing_ok=True)
        if not (path / MEMBER).exists():
            about = {"number": spec.number, "differs": spec.differs, "seed": seed}
            about |= {"rows": spec.draw.rows, "features": spec.draw.features, "ensemble_seed": spec.draw.seed}
            write_json(about, path / MEMBER)
        return placed(path)

    def prepare(data: Any, options: Options, workers: int) -> tuple[Any, Options]:
        data = spec.draw.resample(data)
        return data, snapshot_options(snapshots, data, options, workers) if snapshots else options

    context = RunContext(data_seed=spec.draw.seed, prepare=prepare)
    return attempt_in(comm, spec.command, path, begin, [f"--seed={seed}"], context)


def outcome_text(folder: Path, spec: MemberSpec, end: Outcome) -> str:
    if end.failed is not None:
        return f"failed: {end.failed}"
    if end.stopped in UNFINISHED:
        return "stopped"
    summary = summary_of(member_folder(folder, spec.number)) or {}
    known = ("test_accuracy", "test_rmse", "test_rmse_standardized", "test_loss")
    names = [name for name in known if isinstance(summary.get(name), int | float)]
    return ", ".join(f"{name.replace('_', ' ')} {summary[name]:.4g}" for name in names)


def train_unless_ended(comm: MPI.Intracomm, spec: MemberSpec, folder: Path, stop: Stop, on_end: OnEnd) -> bool:
    """Train a member unless its run has ended; collective. Returns True if stop() or a signal or time limit stopped it.
    on_end(spec, outcome): called on the first rank when the training has ended or was stopped."""
    if comm.bcast(has_ended(member_folder(folder, spec.number)) if comm.rank == 0 else None):
        return False
    if comm.allreduce(int(stop())):
        return True
    outcome = train_one(comm, spec, folder)
    if comm.rank == 0:
        on_end(spec, outcome)
    return outcome.stopped in UNFINISHED


def train_in_groups(
    world: MPI.Intracomm, specs: list[MemberSpec], ranks: int, folder: Path, stop: Stop, on_end: OnEnd
) -> bool:
    """Train the members that have not ended, in groups of `ranks` ranks; collective. Returns True if it was stopped."""
    groups = world.size // ranks

    def train(group: int, comm: MPI.Intracomm) -> bool:
        return any(train_unless_ended(comm, spec, folder, stop, on_end) for spec in specs[group::groups])

    return any(side_by_side(world, [ranks] * groups, train))


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


def train_boosted(
    world: MPI.Intracomm, specs: list[MemberSpec], folder: Path, validation: float, stop: Stop, on_end: OnEnd
) -> tuple[bool, dict[int, float]]:
    """Train SAMME's members one after another on all ranks; collective. Returns (stopped, weight of the vote by member
    number). Ends early at a member that has failed or is no better than chance; this member is left out."""
    weights: np.ndarray | None = None
    alphas: dict[int, float] = {}
    for spec in specs:
        resampled = spec._replace(draw=spec.draw._replace(rows=weights is not None, weights=weights))
        if train_unless_ended(world, resampled, folder, stop, on_end):
            return True, alphas
        if world.bcast(failure(member_folder(folder, spec.number)) if world.rank == 0 else None) is not None:
            break  # the next members depend on this one
        alpha, weights = boosting_result(world, spec, folder, validation, weights)
        if alpha <= 0:
            break
        alphas[spec.number] = alpha
    return False, alphas


def boosting_result(
    world: MPI.Intracomm, spec: MemberSpec, folder: Path, validation: float, weights: np.ndarray | None
) -> tuple[float, np.ndarray]:
    """Return the weight of a member's vote and the next member's row weights, stored or from `weights`; collective."""
    path = member_folder(folder, spec.number) / WEIGHTS
    stored = None
    with refuse_together(world), blamed_on(f"{path} cannot be read"):
        if world.rank == 0 and path.is_file():
            with np.load(path) as file:
                stored = float(file["alpha"]), file["weights"]
    if (stored := world.bcast(stored)) is not None:
        return stored
    wrong, classes = misclassified_rows(world, spec, folder, validation)
    if weights is None:
        weights = np.full(len(wrong), 1 / len(wrong))
    error, alpha, weights = combining.samme(weights, wrong, classes)
    with refuse_together(world), blamed_on(f"{path} cannot be written"):
        if world.rank == 0:
            with atomic_write(path) as into:
                np.savez(into, error=error, alpha=alpha, weights=weights)
    return alpha, weights


def misclassified_rows(
    world: MPI.Intracomm, spec: MemberSpec, folder: Path, validation: float
) -> tuple[np.ndarray, int]:
    """Return (mask of training rows not held out: True if the member is wrong, number of classes); collective."""
    member = EnsembleMember(spec.number, str(member_folder(folder, spec.number).relative_to(folder)))
    ensemble = Ensemble(folder, [member], "mean", spec.draw.seed, trust=spec.trust)
    with refuse_together(world):
        ensemble.open(0, 1)
        if not ensemble.reference.classes:
            raise UsageError("--boost samme needs classes; these data have numbers to predict")
        rows = ensemble.rows(ensemble.reference.source, "train", world.size)
    wrong, labels = [], []
    for block, outputs in ensemble.blocks(world, rows, (world.rank, world.size)):
        y = np.asarray(block.y)
        labels.append(y)
        wrong.append(outputs[0].argmax(axis=1) != y if outputs else np.zeros(len(y), bool))
    misclassified = np.concatenate(wrong).astype(np.uint8)
    world.Allreduce(MPI.IN_PLACE, misclassified)
    held_out = held_out_of(np.concatenate(labels), ensemble.reference.classes, spec.draw.seed, validation)
    return np.delete(misclassified.astype(bool), held_out), ensemble.reference.classes


def held_out_of(y: np.ndarray, classes: int, seed: int, validation: float) -> np.ndarray:
    """Return the sorted numbers of training rows held out as a validation part of this fraction, for all members."""
    return held_out_rows(y, classes, DataOptions("iid", np.dtype(np.float32), seed, validation, "", False))


def out_of_bag_masks(
    ensemble: Ensemble, specs: dict[int, MemberSpec], held_out: np.ndarray, y: np.ndarray, classes: int
) -> dict[int, np.ndarray]:
    """Return a mask (rows,) per member of this rank, by number: True for rows neither held out nor trained on. y: of
    all rows; classes: 0 for values."""
    rows, masks = len(y), {}
    training = np.delete(np.arange(rows), held_out)
    for loaded in ensemble.local_members:
        unseen = np.zeros(rows, bool)
        unseen[training] = True
        draw = specs[loaded.member.number].draw
        unseen[training[draw.examples(len(training), y[training] if classes else None)]] = False
        masks[loaded.member.number] = unseen
    return masks
