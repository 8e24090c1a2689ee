"""Recovery of surviving ranks: they continue from the state of the run that one of them holds in memory.

    step      40        41                         41        42
    rank 0    |---------|----                rank 0 |---------|
    rank 1    |---------|----      lost      rank 1 |---------|      holds the state after step 41: all begin there
    rank 2    |------ killed
    rank 3    |---------                     rank 2 |---------|

Where all ranks hold the same vectors, and exchange them by messages alone, a rank that has ended a step holds what all
hold after that step. So the rank that is furthest has everything: the others take its vectors, and the survivors repeat
the step under way with their shares of the same batch. No step is lost or counted twice, and no disk is read. The same
holds for rounds of federated averaging. Ranks with vectors of their own: recovery_points.py."""

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.attributes import SUMMED
from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.formatting import counted
from hpcdl.recovery.recovery_points import Anchors
from hpcdl.runs.agreement import Step
from hpcdl.runs.ownership import averaged
from hpcdl.runs.progress import Progress
from hpcdl.runs.resume import position

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")
NEW = 2  # role of a new rank; 0: a rank that trains, 1: a data server


@dataclass(frozen=True)
class Handover:
    """What the surviving ranks continue from, as told by the rank that has the state of the run. progress: where the
    run is. owed: True if work due after its last step (hpcdl/runs/stopping.py) is still to be done. saved: step of the
    last checkpoint; folder: where the run writes; None: none. batch: examples of a step. recorded: the last step with
    agreed losses. fresh: later steps, with the losses of all ranks. recent: lines of metrics.jsonl that a lost rank 0
    may not have written. ranks: of the last leg. redone: steps to repeat. shrunk, lost, losses: of `Survivor`."""

    progress: Progress
    owed: bool
    saved: int | None
    folder: str | None
    batch: int
    recorded: int
    fresh: list[Step]
    recent: list[dict] = field(default_factory=list)
    ranks: int = 0
    redone: int = 0
    shrunk: list[tuple[int, list[int]]] = field(default_factory=list)
    lost: int = 0
    losses: list[dict] = field(default_factory=list)


class Survivor:
    """One rank's part of all legs of a run, which losses of ranks divide. everyone: this leg's communicator, once it is
    made. run: this leg's, once it has begun. handover: what this leg continues from; None in the first leg. found:
    the state of the run, on rank 0. since: when the last leg failed. losses: an entry of the summary for each loss of
    ranks. shared: training loss of all ranks by step, at least since ranks last agreed. anchors: states to which this
    rank goes back, if its vectors are its own. serves: True for a data server. data_servers: how many are left. note:
    text that the next leg's message adds. number: this rank's number among the survivors. shrunk: for each earlier leg,
    how many ranks trained, and which of them are lost. lost: how many ranks, in all. joined: how many ranks of this
    leg, its last ones, are new and have no state."""

    def __init__(self) -> None:
        self.everyone: Any = None  # Communicator
        self.run: Any = None  # Run, once the leg has begun
        self.handover: Any = None  # Handover
        self.found: Checkpoint | None = None
        self.since = 0.0
        self.losses: list[dict] = []
        self.shared: dict[int, float] = {}
        self.anchors: Anchors | None = None
        self.serves, self.data_servers, self.note = False, 0, ""
        self.number = self.lost = self.joined = 0
        self.shrunk: list[tuple[int, list[int]]] = []

    @property
    def goes_on(self) -> bool:
        """True if this leg continues from the memory of a rank."""
        return self.handover is not None

    def refuse(self, run: "Run") -> None:
        """Raise AgreedError if vectors or rows would be lost with a rank."""
        alone = [name for name, each in run.state.tracked.items() if not isinstance(each, Same)]
        if alone and not run.held.own:
            raise AgreedError(f"--survive: each rank has its own {' and '.join(alone)}, which a lost rank takes away")
        if "{ranks}" in run.data.order and "clients" not in run.fixed:  # clients keep their rows
            raise AgreedError(
                "--survive: the rows of a lost rank would be lost, too; take --placement shared or streamed, with "
                "--partition iid"
            )

    def follow(self, run: "Run") -> None:
        """Begin a leg. Raises AgreedError as `refuse` and `Anchors.follow` do."""
        self.refuse(run)
        if run.held.own:
            self.anchors = self.anchors or Anchors()
            self.anchors.follow(run)
        self.run, self.found, before = run, None, self.handover
        if before is not None:
            run.stop(before.progress.stopped)
            if before.owed:
                run.bounded = replace(run.bounded, step=run.step - 1)
            alone = run.comm.rank > 0  # the sum counts once
            run.agreement.step = before.recorded
            run.agreement.steps_done = [step._replace(loss=0.0) if alone else step for step in before.fresh]
            run.metrics.recent = before.recent
            self.shared = {step: each.loss for step, each in enumerate(before.fresh, before.recorded + 1)}
            last = self.losses[-1]
            last["seconds"] = time.monotonic() - self.since
            left = f"{counted(run.comm.size, 'rank')} {'goes' if run.comm.size == 1 else 'go'} on"
            left += f" from step {run.step}" if last["redone"] else ""
            left += f", of which {self.joined} {'is' if self.joined == 1 else 'are'} new" if self.joined else ""
            left += self.note
            said = f"{self.told(last['ranks'])} after step {run.step + last['redone']}; {left}"
            run.display.line(f"{said}, {last['seconds']:.2f} s later")
            log.warning("%s", said)
        run.report(losses=self.losses)

    def share(self, run: "Run", loss: float) -> None:
        """Sum the loss of the step under way over all ranks, so that a rank that has done it knows the sum, whoever is
        lost. Collective. Ranks that go back to an anchor (recovery_points.py) agree there, and need not share."""
        if not run.agreement.steps_done:
            self.shared.clear()
        total = np.array([loss])
        with run.stopwatch.apart():
            run.bookkeeping.all_reduce(total)
        self.shared[run.step + 1] = float(total[0])

    def meets(self, run: "Run") -> bool:
        """True if the last step is an anchor, after which the ranks must agree, even if they have just agreed."""
        held = run.held
        return self.anchors is not None and (held.synchronized is None or held.synchronized(run.step))

    def passed(self, run: "Run") -> None:
        """Keep this rank's state after a step that is an anchor."""
        if self.anchors is not None and self.meets(run):
            self.anchors.keep(run)

    def load(self, run: "Run", found: Checkpoint | None) -> None:
        """Load the state of the run at the begin of a leg; collective. found: this state, on rank 0."""
        if run.held.own:
            self.anchors = self.anchors or Anchors()
            self.anchors.give_back(run, self.joined)
        else:
            run.state.load(run.held.peers, found)

    def told(self, gone: list[int]) -> str:
        """Return in words which ranks are lost, by their numbers in the last leg."""
        if not gone:  # a call has failed, and all have come back
            return "no rank is gone"
        return f"{format_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone"

    def adapt(self, options: Any) -> Any:
        """Return the options of the next leg, some of which depend on the ranks left."""
        alone = bool(options.data_servers) and not self.data_servers
        self.note = ", and read the rows themselves, as no data server is left" if alone else ""
        return replace(options, data_servers=self.data_servers)

    def hand_over(self, left: MPI.Intracomm, before: MPI.Intracomm | None) -> tuple[MPI.Intracomm, list[int]]:
        """Order the ranks left: data servers, the rank with the state, other ranks, new ranks. Return their new world,
        and the lost ranks as numbered in `before`, the last world; before: None on a new rank. Collective. Raises
        TrainingError if only data servers are left."""
        run, place, redone = self.run, left.rank, 0
        alike: Any = left.Split(NEW if before is None else int(self.serves), place)
        if self.serves:
            place -= 2 * left.size
        elif before is not None:
            redone = self.anchors.go_back(run, alike) if self.anchors is not None else 0
            reached = alike.allgather((run.step, not self.owes))
            trained, size = alike.allgather(run.comm.rank), run.comm.size
            self.shrunk.append((size, [rank for rank in range(size) if rank not in trained]))
            place = -1 if alike.rank == reached.index(max(reached)) else place
        alike.Free()
        comm: Any = left.Split(0, place)
        left.Free()
        self.data_servers, self.joined = comm.allreduce(int(self.serves)), comm.allreduce(int(before is None))
        if self.data_servers + self.joined == comm.size:
            raise TrainingError("no rank that trains is left, only data servers")
        spent = dict(filter(None, comm.allgather((before.rank, self.spent()) if before is not None else None)))
        facts: Any = None
        if comm.rank == self.data_servers:
            assert before is not None
            self.found = self.hold([spent.get(rank, {}) for rank in range(before.size)])
            known, folder = min(run.agreement.step, run.step), run.folder.path and str(run.folder.path)
            done = enumerate(run.agreement.steps_done[: run.step - known], known + 1)
            fresh = [step._replace(loss=self.shared[number]) for number, step in done]
            where = run.progress, self.owes, run.saved, folder, run.batch, known, fresh, run.metrics.recent
            facts = Handover(*where, before.size, redone, self.shrunk, self.lost, self.losses)
        self.handover = facts = comm.bcast(facts, self.data_servers)
        self.shrunk, self.lost, self.losses = facts.shrunk, facts.lost, facts.losses
        if self.joined:  # as many as were lost
            del self.shrunk[-1]
        gone = [rank for rank in range(facts.ranks) if rank not in spent]
        left_over = comm.size - self.joined
        self.losses.append({"step": facts.progress.step, "redone": facts.redone, "ranks": gone, "left": left_over})
        self.losses[-1] |= {"respawned": self.joined} if self.joined else {}
        return comm, gone

    def spent(self) -> dict:
        """Return what this leg has cost this rank, by name: bytes, messages and seconds."""
        known = self.run.legs.measured()
        return {name: known[name] for name in SUMMED}

    def hold(self, table: list[dict]) -> Checkpoint:
        """Return the state of the run as this rank holds it. table: what each rank has spent in this leg, or {}."""
        run = self.run
        run.legs.table = table
        totals = [sum(row.get(name) or 0 for row in table) for name in ("bytes_sent_per_rank", "messages_per_rank")]
        run.legs.sent = float(totals[0]), float(totals[1])
        vectors: dict[str, np.ndarray] = {}
        if self.anchors is None:
            alone = Communicator(MPI.COMM_SELF, ends_job=False)
            with averaged(run.held, lambda: run.over):  # as a checkpoint has it
                vectors = {name: vector.copy() for name, vector in run.state.collect(alone, False)[0].items()}
            alone.free()
        progress = run.progress
        if self.owes:
            progress = replace(progress, best=run.bounded.best, waited=run.bounded.waited)
        return Checkpoint(vectors, position(run.setup, progress, run.legs))

    @property
    def owes(self) -> bool:
        """True if work that is due after the last step, at its boundary, is still to be done."""
        return self.run is not None and self.run.bounded.step != self.run.step
