"""How far a run is, as a checkpoint says it beside its vectors; and going on from one, the last that is whole."""

import copy
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.checkpoint.attributes import check_attributes
from hpcdl.checkpoint.checkpoint_file import Checkpoint, Damaged, Stored
from hpcdl.checkpoint.rollback import folder_of, is_last, later_than, older_checkpoints, set_aside
from hpcdl.checkpoint.state import visible_to_all
from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.progress import activity
from hpcdl.data.schema import Schema, name_list
from hpcdl.errors import AgreedError, UsageError, blamed_on
from hpcdl.formatting import counted
from hpcdl.machine.display import Display
from hpcdl.models.model import abilities_of, name_of, unwrapped
from hpcdl.runs.context import RunSetup
from hpcdl.runs.folder import Folder, automatic, check_run_folder
from hpcdl.runs.progress import Progress
from hpcdl.runs.segments import Legs
from hpcdl.runs.summary import STARTED, started

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")
ALIKE = ("optimizer", "average", "seed", "batch")
CHANGES = ("optimizer", "batch")  # of them what an heir may have of its own; the optimizer's vectors must fit


def position(setup: RunSetup, progress: Progress, legs: Legs) -> dict:
    """The attributes of a checkpoint of a run that is there; whole on rank 0, which writes it."""
    data, options = setup.data, setup.options
    return {
        "strategy": setup.strategy,
        "model": name_of(unwrapped(setup.model)),
        "loss": options.loss,
        **computing(setup.model),
        "source": data.source,
        "meaning": data.schema.describe(),
        "launched_in": os.getcwd(),
        "layout": setup.model.layout.describe(),
        "data": {
            "name": data.name,
            "features": list(data.features),
            "classes": data.classes,
            **({"outputs": list(data.outputs)} if data.outputs else {}),
            **({"sparse": True} if data.sparse else {}),
            "rows": data.examples,
            "digest": data.digest if legs.comm.rank == 0 else None,
        },
        **({"environment": data.environment} if hasattr(data, "environment") else {}),
        "order": setup.order,
        "optimizer": options.optimizer,
        "average": options.average or "none",
        "seed": options.seed,
        "batch": setup.batch,
        "epoch": progress.step / setup.per_epoch,
        **progress.attributes(),
        "fixed": setup.fixed,
        **legs.attributes(progress),
    }


def computing(model: Any) -> dict:
    """In which type a model computes, where that is not the type of its parameters."""
    kind = model.computing if abilities_of(model).module else None
    return {} if kind is None else {"computing": kind}


def refuse_another(mine: dict, found: Checkpoint, resume: str, per_epoch: int, heir: bool = False) -> None:
    """Raise UsageError for a checkpoint of another model, data, optimizer, seed or batch size than `mine`, a position.

    Also for one in the middle of an epoch whose rows are now visited in another order: some would be seen twice, and
    others never. What a checkpoint of an older version does not say is taken for the same.
    """
    check_attributes(found.attributes, f"--resume {resume}")
    refusal = refusal_of(resume)
    mine, theirs = copy.deepcopy(mine), {"average": "none"} | copy.deepcopy(found.attributes)
    refuse_another_environment(mine, theirs, resume)
    if mine["layout"] != theirs["layout"]:
        sizes = [
            f"{sum(math.prod(tensor['shape']) for tensor in each['layout'])} parameters of "
            + " and ".join(sorted({tensor["dtype"] for tensor in each["layout"]}))
            for each in (theirs, mine)
        ]
        before, now = f"{theirs['model']} with {sizes[0]}", f"{mine['model']} with {sizes[1]}"
        raise UsageError(f"{refusal} model is {before}, not {now}")
    digests = [about["data"].pop("digest", None) for about in (mine, theirs)]
    if None not in digests and digests[0] == digests[1]:
        theirs["data"]["name"] = mine["data"]["name"]  # that of the file, for most; the rows are what counts
    if mine["data"] != theirs["data"]:
        rows = [f"{each['data']['name']} with {each['data']['rows']} training rows" for each in (theirs, mine)]
        raise UsageError(f"{refusal} data are {rows[0]}, not {rows[1]}")
    if None not in digests and digests[0] != digests[1]:
        name = mine["data"]["name"]
        raise UsageError(f"{refusal} data are other ones: {name} has the same name and shape, but other contents")
    refuse_other_names(mine, theirs, refusal)
    for name in [each for each in ALIKE if not (heir and each in CHANGES)]:
        if mine[name] != theirs[name]:
            raise UsageError(f"{refusal} {name} is {theirs[name]}, not {mine[name]}")
    for name, value in mine["fixed"].items():
        before = theirs["fixed"].get(name, value)
        if before != value:
            raise UsageError(f"{refusal} {name.replace('_', ' ')} is {before}, not {value}")
    was, now, at = theirs.get("order"), mine["order"], theirs["step"] % per_epoch
    if at and None not in (was, now) and was != now:
        raise UsageError(
            f"{refusal} checkpoint is {counted(at, 'step')} into an epoch of {per_epoch}, with {was}; now it would "
            f"be {now}: take --placement, --partition and ranks as they were, or a checkpoint of an epoch's end"
        )


def refuse_another_environment(mine: dict, theirs: dict, where: str) -> None:
    """Raise UsageError where one has learned to act, and the other from data; or both to act, but elsewhere."""
    places = [each.get("environment", {}).get("name") for each in (theirs, mine)]
    if places[0] != places[1]:
        said = [
            f"environment {name}" if name else f"data {each['data']['name']}"
            for name, each in zip(places, (theirs, mine), strict=True)
        ]
        raise UsageError(f"--resume {where}: that run learns from the {said[0]}, not from the {said[1]}")


def refuse_other_names(mine: dict, theirs: dict, refusal: str) -> None:
    """Raise UsageError where numbers stand for other classes or columns than in the run that is gone on with."""
    if "meaning" not in theirs:  # an older version's
        return
    before, now = (Schema.read(each["meaning"], f"{refusal} data") for each in (theirs, mine))
    if before.labels != now.labels:
        names = [name_list(each.labels) if each.labels else "numbers" for each in (before, now)]
        raise UsageError(f"{refusal} classes are {names[0]}, not {names[1]}")
    before.refuse_other_columns(now, mine["data"]["name"])


def refusal_of(resume: str) -> str:
    """How a refusal of what --resume names begins."""
    return f"--resume {resume}: that run's"


def in_steps_of(setup: RunSetup, attributes: dict) -> None:
    """Let a checkpoint's attributes be as far in epochs as they are, where the steps of this run are others."""
    if attributes["batch"] != setup.batch:
        before, attributes["step"] = attributes["step"], round(attributes["epoch"] * setup.per_epoch)
        attributes["updates"] = round(attributes["updates"] * attributes["step"] / max(1, before))


def open_folder(run: "Run") -> Folder:
    """Make the folder of a run that begins, and let it go on from the checkpoint that its options name; collective.

    Raises AgreedError, before anything is written, where the folder cannot be, or the checkpoint is of another run.
    """
    out, resume, leads = run.options.out, run.options.resume, run.comm.rank == 0
    path = automatic(run.strategy) if out == "auto" else None if out in ("", "none") else Path(out)
    survivor = run.survivor
    left = survivor is not None and survivor.goes_on  # from what a rank holds in memory
    folder, found = Folder(path, run.comm.rank), None
    later: list[Path] = []
    same = left or (bool(resume) and path is not None and path.resolve() == folder_of(resume).resolve())
    try:
        with refuse_together(run.bookkeeping.mpi):
            if path is not None and leads:
                if same and run.options.force:
                    raise UsageError("--force would remove the run that --resume goes on with: give another --out")
                check_run_folder(path, same or run.options.force or out == "auto")  # of which no other job has the name
            if leads and (path is not None or resume):
                _ = run.data.digest  # now, while all wait for it: a pass over the data, where nobody knows it yet
            if same and leads:
                folder.claim(outlived=left)  # before the checkpoint is read: who has the folder writes the next one
        if resume and not left:
            resume, found = whole_one(resume, run.bookkeeping, run.display)
            if resume != run.options.resume:
                run.options = replace(run.options, resume=resume)
                run.setup = replace(run.setup, options=run.options)
        with refuse_together(run.bookkeeping.mpi):
            if left and leads:
                found = survivor.found
            elif found is not None:
                mine = position(run.setup, run.progress, run.legs)
                refuse_another(mine, found, run.options.resume, run.per_epoch, run.context.heir)
                run.state.check_vectors(found, run.comm.size, refusal_of(resume))
                if same:
                    later = later_than(found.attributes["step"], Path(resume))
                    if any(each.name == "best.h5" for each in later):
                        found.attributes["best"] = None  # there is no file of it any more: the next one is the best
        if resume or left:
            with activity.inside("broadcast", run.bookkeeping):
                attributes = run.bookkeeping.mpi.bcast(found.attributes if found else None)
            if left:
                survivor.load(run, found)
            else:
                run.state.load(run.held.peers, found, refusal_of(resume))
            run.held.resumed(run.bookkeeping)
            if run.context.heir:
                in_steps_of(run.setup, attributes)
            run.go_on_from(attributes)
            run.saver.saved = (survivor.handover.saved if left else run.step) if same else None
        with refuse_together(run.bookkeeping.mpi):
            if leads and same and (left or is_last(resume)) and run.over and folder.ended(run.step):
                folder.leave()
            elif leads:
                folder.create(run.options, same, run.setup.used, run.context.repeated)
                if same and not left and not is_last(resume):
                    with blamed_on(f"--out {path} cannot be written"):
                        set_aside(Path(resume), later)
        with activity.inside("broadcast", run.bookkeeping):
            folder.path, folder.left = run.bookkeeping.mpi.bcast((folder.path, folder.left))
        with refuse_together(run.bookkeeping.mpi):
            if left:
                before = survivor.handover
                folder.open(before.recorded, before.recent, run.step if before.owed else None)
            else:
                folder.open(run.step)
            folder.record_flight(run.comm.size, run.options.flight, run.everyone.family())
            if leads and folder.path is not None:
                folder.write(STARTED, started(run.setup, run.step, run.steps, run.legs.hosts))
        run.saver.begin(folder, run.held, run.legs, run.bookkeeping)
    except BaseException:
        folder.close()
        raise
    return folder


def whole_one(resume: str, comm: Communicator, display: Display) -> tuple[str, Checkpoint | None]:
    """The checkpoint that --resume names, and on rank 0 what it holds; collective.

    Of a folder, where the last one is damaged, it is the latest before that is whole, and a line says so. Raises
    AgreedError where there is none.
    """
    asked, older = resume, None  # type: str, list[str] | None
    first = ""
    while True:
        found, problem = None, ""
        with refuse_together(comm.mpi):
            if comm.rank == 0:
                try:
                    found = Checkpoint.read(Path(resume), pieces=False)
                except Damaged as error:
                    problem = str(error)
        problem = problem_with(comm, found, problem)
        if not problem:
            return resume, found
        first = first or problem
        if older is None:
            with activity.inside("look for older checkpoints", comm):
                beside = [str(each) for each in older_checkpoints(Path(resume))] if os.path.isdir(resume) else []
                older = comm.mpi.bcast(beside)
        if not older:
            more = "; none beside it is whole" if resume != asked else ""
            raise AgreedError(f"{first}{more}")
        resume = older.pop(0)
        display.line(f"warning: {problem}; going on from {resume}")


def problem_with(comm: Communicator, found: Checkpoint | None, problem: str) -> str:
    """What is wrong with a checkpoint that rank 0 has read, on all ranks, each of which reads some of its pieces.

    problem: what rank 0 knows to be wrong already. Collective.
    """
    seen = visible_to_all(comm, found)
    look, share = (found, (0, 1)) if seen is None else (Checkpoint(seen, {}, seen.joined), (comm.rank, comm.size))
    if look is not None and not problem:
        assert isinstance(look.vectors, Stored)
        with activity.exempt():
            broken = next(filter(None, look.problems(True, *share)), "")
        problem = f"{look.vectors.path} is damaged: {broken}" if broken else ""
    with activity.inside("read the pieces", comm):
        return next(filter(None, comm.mpi.allgather(problem)), "")
