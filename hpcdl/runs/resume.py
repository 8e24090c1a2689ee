"""The attributes of a run in a checkpoint, and resuming a run from the last checkpoint that is not damaged."""

import copy
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdl.checkpoint.attributes import check_attributes
from hpcdl.checkpoint.checkpoint_file import Checkpoint, Damaged, Stored
from hpcdl.checkpoint.rollback import folder_of, is_last, later_than, older_checkpoints, set_aside
from hpcdl.checkpoint.state import visible_to_all
from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.progress import exempt
from hpcdl.data.schema import Schema, name_list
from hpcdl.errors import AgreedError, UsageError, blamed_on
from hpcdl.formatting import counted
from hpcdl.machine.display import Display
from hpcdl.models.model import abilities_of, name_of, unwrapped
from hpcdl.runs.context import RunSetup
from hpcdl.runs.folder import Folder, automatic, check_run_folder, summary_of
from hpcdl.runs.progress import Progress
from hpcdl.runs.segments import Legs
from hpcdl.runs.summary import STARTED, started

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")
ALIKE = ("loss", "optimizer", "average", "seed", "batch", "class_weight")
CHANGES = ("loss", "optimizer", "batch", "class_weight")  # an heir may differ in them; the optimizer's vectors must fit


def position(setup: RunSetup, progress: Progress, legs: Legs) -> dict:
    """Return the attributes of a checkpoint of the run in its present state; complete on rank 0, which writes it."""
    data, options = setup.data, setup.options
    computing = setup.model.computing if abilities_of(setup.model).module else None
    about = {"name": data.name, "features": list(data.features), "classes": data.classes, "rows": data.examples}
    about |= {"outputs": list(data.outputs)} if data.outputs else {}
    about |= {"sparse": True} if data.sparse else {}
    about["digest"] = data.digest if legs.comm.rank == 0 else None
    return {
        "strategy": setup.strategy,
        "model": name_of(unwrapped(setup.model)),
        "loss": options.loss,
        **({} if computing is None else {"computing": computing}),  # if it is not the type of the parameters
        "source": data.source,
        "meaning": data.schema.describe(),
        "launched_in": os.getcwd(),
        "layout": setup.model.layout.describe(),
        "data": about,
        **({"environment": data.environment} if hasattr(data, "environment") else {}),
        "order": setup.order,
        "optimizer": options.optimizer,
        "average": options.average or "none",
        "class_weight": options.class_weight or "none",
        "seed": options.seed,
        "batch": setup.batch,
        "epoch": progress.step / setup.per_epoch,
        **progress.attributes(),
        "fixed": setup.fixed,
        "legs": legs.so_far(progress, legs.table),
        "sent": legs.sent_so_far,
    }


def refuse_another(mine: dict, found: Checkpoint, resume: str, per_epoch: int, heir: bool = False) -> None:
    """Raise UsageError unless the checkpoint fits `mine`, this run's attributes (`position`): model, data, loss,
    optimizer, seed, batch size, class weights, and `fixed` entries. Within an epoch the order of rows must fit, too:
    else some rows come twice, others never. Attributes that a checkpoint of an older version lacks count as equal.
    heir: as in RunContext."""
    check_attributes(found.attributes, f"--resume {resume}")
    refusal = refusal_of(resume)
    older = {"average": "none", **{name: mine[name] for name in ("class_weight", "loss")}}
    mine, theirs = copy.deepcopy(mine), older | copy.deepcopy(found.attributes)
    refuse_another_environment(mine, theirs, resume)
    if mine["layout"] != theirs["layout"]:
        said = []
        for each in (theirs, mine):
            kinds = " and ".join(sorted({tensor["dtype"] for tensor in each["layout"]}))
            number = sum(math.prod(tensor["shape"]) for tensor in each["layout"])
            said.append(f"{each['model']} with {number} parameters of {kinds}")
        raise UsageError(f"{refusal} model is {said[0]}, not {said[1]}")
    digests = [about["data"].pop("digest", None) for about in (mine, theirs)]
    if None not in digests and digests[0] == digests[1]:
        theirs["data"]["name"] = mine["data"]["name"]  # mostly the file's name, which may change: the rows count
    if mine["data"] != theirs["data"]:
        rows = [f"{each['data']['name']} with {each['data']['rows']} training rows" for each in (theirs, mine)]
        raise UsageError(f"{refusal} data are {rows[0]}, not {rows[1]}")
    if None not in digests and digests[0] != digests[1]:
        name = mine["data"]["name"]
        raise UsageError(f"{refusal} data are other ones: {name} has the same name and shape, but other contents")
    refuse_other_names(mine, theirs, refusal)
    for name in [each for each in ALIKE if not (heir and each in CHANGES)]:
        if mine[name] != theirs[name]:
            raise UsageError(f"{refusal} {name.replace('_', ' ')} is {theirs[name]}, not {mine[name]}")
    for name, value in mine["fixed"].items():
        before = theirs["fixed"].get(name, value)
        if before != value:
            raise UsageError(f"{refusal} {name.replace('_', ' ')} is {before}, not {value}")
    was, now, at = theirs.get("order"), mine["order"], theirs["step"] % per_epoch
    if at and None not in (was, now) and was != now:
        raise UsageError(
            f"{refusal} checkpoint is {counted(at, 'step')} into an epoch of {per_epoch}, with {was}, now {now}: "
            "take --placement, --partition, --shuffle-window and number of ranks of that run, or a checkpoint at the "
            "end of an epoch"
        )


def refuse_another_environment(mine: dict, theirs: dict, where: str) -> None:
    """Raise UsageError unless both runs learn from data, or both act in the same environment."""
    before, now = (each.get("environment", {}).get("name") for each in (theirs, mine))
    if before != now:
        was = f"environment {before}" if before else f"data {theirs['data']['name']}"
        new = f"environment {now}" if now else f"data {mine['data']['name']}"
        raise UsageError(f"--resume {where}: that run learns from the {was}, not from the {new}")


def refuse_other_names(mine: dict, theirs: dict, refusal: str) -> None:
    """Raise UsageError if numbers stand for other classes or columns than in the resumed run."""
    if "meaning" not in theirs:  # an older version's
        return
    before, now = (Schema.read(each["meaning"], f"{refusal} data") for each in (theirs, mine))
    if before.labels != now.labels:
        names = [name_list(each.labels) if each.labels else "numbers" for each in (before, now)]
        raise UsageError(f"{refusal} classes are {names[0]}, not {names[1]}")
    before.refuse_other_columns(now, mine["data"]["name"])


def refusal_of(resume: str) -> str:
    """Return the beginning of a message that refuses the run or checkpoint named by --resume."""
    return f"--resume {resume}: that run's"


def open_folder(run: "Run") -> Folder:
    """Make the folder of a run, and load the checkpoint that its options name; collective. Raises AgreedError, before
    anything is written, if the folder cannot be made or the checkpoint belongs to another run."""
    out, resume, leads = run.options.out, run.options.resume, run.comm.rank == 0
    path = automatic(run.strategy) if out == "auto" else None if out in ("", "none") else Path(out)
    survivor = run.survivor
    left = survivor is not None and survivor.goes_on  # continues from a rank's memory
    folder, found = Folder(path, run.comm.rank), None
    later: list[Path] = []
    same = left or (bool(resume) and path is not None and path.resolve() == folder_of(resume).resolve())
    try:
        with refuse_together(run.bookkeeping.mpi):
            if path is not None and leads:
                if same and run.options.force:
                    raise UsageError("--force would remove the run that --resume continues: give another --out")
                check_run_folder(path, same or run.options.force or out == "auto")  # auto: a name that no other job has
            if leads and (path is not None or resume):
                _ = run.data.digest  # now, while all ranks wait: it may take a pass over the data
            if same and leads:
                folder.claim(outlived=left)  # before the checkpoint is read, as the folder's owner may replace it
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
                        found.attributes["best"] = None  # best.h5 is set aside: the next evaluation is the best
        if resume or left:
            with run.bookkeeping.inside("broadcast"):
                attributes = run.bookkeeping.mpi.bcast(found.attributes if found else None)
            if left:
                survivor.load(run, found)
            else:
                run.state.load(run.held.peers, found, refusal_of(resume))
            run.held.resumed(run.bookkeeping)
            if run.context.heir and attributes["batch"] != run.batch:  # the same epoch, in steps of this run
                before, attributes["step"] = attributes["step"], round(attributes["epoch"] * run.per_epoch)
                attributes["updates"] = round(attributes["updates"] * attributes["step"] / max(1, before))
            run.go_on_from(attributes)
            run.saver.saved = (survivor.handover.saved if left else run.step) if same else None
        with refuse_together(run.bookkeeping.mpi):
            whole = leads and same and run.over and (left or is_last(resume))
            if whole and (summary_of(folder.path) or {}).get("steps") == run.step:  # its summary is written
                folder.leave()
            elif leads:
                folder.create(run.options, same, run.setup.used, run.context.repeated)
                if same and not left and not is_last(resume):
                    with blamed_on(f"--out {path} cannot be written"):
                        set_aside(Path(resume), later)
        with run.bookkeeping.inside("broadcast"):
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
        run.saver.begin(folder, run.held, run.held.peers, run.legs, run.bookkeeping)
    except BaseException:
        folder.close()
        raise
    return folder


def whole_one(resume: str, comm: Communicator, display: Display) -> tuple[str, Checkpoint | None]:
    """Return the path of the checkpoint that --resume names and, on rank 0, its content (else None). Of a folder: the
    latest undamaged one (with a warning unless it is the last). Collective. Raises AgreedError if there is none."""
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
            with comm.inside("look for older checkpoints"):
                beside = [str(each) for each in older_checkpoints(Path(resume))] if os.path.isdir(resume) else []
                older = comm.mpi.bcast(beside)
        if not older:
            more = "; all older checkpoints beside it are damaged, too" if resume != asked else ""
            raise AgreedError(f"{first}{more}")
        resume = older.pop(0)
        display.line(f"warning: {problem}; going on from {resume}")


def problem_with(comm: Communicator, found: Checkpoint | None, problem: str) -> str:
    """Return on all ranks what is wrong with a checkpoint, "" if nothing; each rank reads some pieces. found, problem:
    on rank 0, the checkpoint (None if damaged), and the problem seen when it was read ("" if none). Collective."""
    seen = visible_to_all(comm, found)
    look, share = (found, (0, 1)) if seen is None else (Checkpoint(seen, {}, seen.joined), (comm.rank, comm.size))
    if look is not None and not problem:
        assert isinstance(look.vectors, Stored)
        with exempt():
            broken = next(filter(None, look.problems(True, *share)), "")
        problem = f"{look.vectors.path} is damaged: {broken}" if broken else ""
    with comm.inside("read the pieces"):
        return next(filter(None, comm.mpi.allgather(problem)), "")
