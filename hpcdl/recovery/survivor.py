"""What ranks that outlive others go on from: the state of the run that one of them holds, in memory.

    step      40        41                         41        42
    rank 0    |---------|----                rank 0 |---------|
    rank 1    |---------|----      gone      rank 1 |---------|      it holds what is after step 41: all begin there
    rank 2    |------ killed
    rank 3    |---------                     rank 2 |---------|

Where all ranks hold the same vectors, and exchange them by messages alone, a rank that has ended a step holds what all
hold after that step, for each has added its share to it. So whoever is furthest has everything: the others take its
vectors, and the step that it was in is done again, by those that are left, with their shares of the same batch. No step
is lost, none counted twice, and nothing is read from a disk. So it is with the rounds of federated averaging.

Where each rank has vectors of its own, all go back to the last step after which they have met, each to what it had
itself then (recovery_points.py).

This is what one rank knows; how they find each other again is recovery/ulfm_recovery.py.
"""

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
NEW = 2  # a role beside those that do not serve (0) and serve (1)


@dataclass(frozen=True)
class Handover:
    """What those that are left go on from, as the rank knows it that has the state of the run.

    progress: where the run is. owed: whether what is due after its last step (hpcdl/runs/stopping.py) is still
    to be done. saved: the step of the last checkpoint. folder: where it writes. batch: examples of a step.

    recorded: the step up to which ranks had agreed on losses. fresh: the steps that were done since, with the losses of
    all ranks. recent: the lines of metrics.jsonl that rank 0 may have died before it wrote.

    ranks: how many the last leg had. redone: steps that are done again. shrunk, lost, losses: as a survivor has them.
    """

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
    """Of one rank, for all legs of a run. everyone: the communicator of this leg, once it is made.

    run: that of this leg, once it has begun. handover: what this leg goes on from; None: it is the first. found: the
    state of the run, on rank 0. since: when the last leg has failed. losses: of all legs before, for the summary.
    shared: losses of all ranks by step, of those since the last meeting at least.

    anchors: what this rank goes back to, where its vectors are its own. serves: whether it is a data server;
    data_servers: how many of these are left. note: what else there is to say where a leg goes on. number: of this rank,
    in the world that is left. shrunk: of each leg before, how many ranks trained, and which of these are gone, by their
    numbers among them. lost: how many are gone in all. joined: how many of this leg's ranks, the last ones, were
    started anew, and have nothing.
    """

    def __init__(self) -> None:
        self.everyone: Communicator | None = None
        self.run: Run | None = None
        self.handover: Handover | None = None
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
        """Whether this leg goes on from what a rank holds."""
        return self.handover is not None

    def refuse(self, run: "Run") -> None:
        """Raise AgreedError where a rank has what no other has."""
        alone = [name for name, each in run.state.tracked.items() if not isinstance(each, Same)]
        if alone and not run.held.own:
            raise AgreedError(f"--survive: each rank has its own {' and '.join(alone)}, which would be gone with it")
        if "{ranks}" in run.data.order and "clients" not in run.fixed:  # whose rows are theirs, on any rank
            raise AgreedError(
                "--survive: the rows of a rank would be gone with it; take --placement shared or streamed, with "
                "--partition iid"
            )

    def follow(self, run: "Run") -> None:
        """A leg has begun. Raises AgreedError as `refuse` does."""
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
        """All ranks learn the loss of the step under way: the sum of what each of them says. Collective.

        A rank that has done a step then knows its loss, whoever is lost. Ranks that go back to an anchor
        (recovery_points.py) agree there, and need not share.
        """
        if not run.agreement.steps_done:
            self.shared.clear()
        total = np.array([loss])
        with run.stopwatch.apart():
            run.bookkeeping.all_reduce(total)
        self.shared[run.step + 1] = float(total[0])

    def meets(self, run: "Run") -> bool:
        """Whether the ranks have to agree after this step, whenever they did before."""
        return self.anchors is not None and self.anchors.after(run)

    def passed(self, run: "Run") -> None:
        """A step has come to its end, with its boundary."""
        if self.anchors is not None:
            self.anchors.passed(run)

    def load(self, run: "Run", found: Checkpoint | None) -> None:
        """Give all ranks of a leg that begins what is theirs; found: of the rank that had it, on rank 0. Collective."""
        if run.held.own:
            self.anchors = self.anchors or Anchors()
            self.anchors.give_back(run, self.joined)
        else:
            run.state.load(run.held.peers, found)

    def told(self, gone: list[int]) -> str:
        """Which ranks are gone, in words; by their numbers in the last leg."""
        if not gone:  # a call has failed, and all have come back
            return "no rank is gone"
        return f"{format_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone"

    def adapt(self, options: Any) -> Any:
        """The options of the next leg, as far as they depend on who is left."""
        alone = bool(options.data_servers) and not self.data_servers
        self.note = ", and read the rows themselves, for no data server is left" if alone else ""
        return replace(options, data_servers=self.data_servers)

    def hand_over(self, left: MPI.Intracomm, before: MPI.Intracomm | None) -> tuple[MPI.Intracomm, list[int]]:
        """Order those that are left: data servers, who has the state, new ranks last; returns their world, and who is
        gone.

        left: those of the world `before` that are left, and new ones, which have been in none. gone: their ranks there.
        Collective. Raises TrainingError where only data servers are left.
        """
        run, place, redone = self.run, left.rank, 0
        alike: Any = left.Split(NEW if before is None else int(self.serves), place)
        if self.serves:
            place -= 2 * left.size
        elif before is not None:
            assert run is not None
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
            raise TrainingError("only data servers are left: no rank that trains")
        spent = dict(filter(None, comm.allgather((before.rank, self.spent()) if before is not None else None)))
        facts: Any = None
        if comm.rank == self.data_servers:
            assert run is not None and before is not None
            self.found = self.hold([spent.get(rank, {}) for rank in range(before.size)])
            facts = Handover(
                run.progress,
                self.owes,
                run.saved,
                None if run.folder.path is None else str(run.folder.path),
                run.batch,
                *self.unrecorded(),
                ranks=before.size,
                redone=redone,
                shrunk=self.shrunk,
                lost=self.lost,
                losses=self.losses,
            )
        self.handover = facts = comm.bcast(facts, self.data_servers)
        self.shrunk, self.lost, self.losses = facts.shrunk, facts.lost, facts.losses
        if self.joined:  # as many as are gone
            del self.shrunk[-1]
        gone = [rank for rank in range(facts.ranks) if rank not in spent]
        left_over = comm.size - self.joined
        self.losses.append({"step": facts.progress.step, "redone": facts.redone, "ranks": gone, "left": left_over})
        self.losses[-1] |= {"respawned": self.joined} if self.joined else {}
        return comm, gone

    def unrecorded(self) -> tuple[int, list[Step], list[dict]]:
        """`recorded`, `fresh` and `recent` of a handover, as this rank knows them."""
        assert self.run is not None
        known, last = min(self.run.agreement.step, self.run.step), self.run.step
        done = self.run.agreement.steps_done[: last - known]
        return (
            known,
            [step._replace(loss=self.shared[n]) for n, step in enumerate(done, known + 1)],
            self.run.metrics.recent,
        )

    def spent(self) -> dict:
        """What this leg has cost this rank."""
        assert self.run is not None
        known = self.run.legs.measured()
        return {name: known[name] for name in SUMMED}

    def hold(self, table: list[dict]) -> Checkpoint:
        """The state of the run as this rank holds it. table: what each rank has spent in this leg, where known."""
        run = self.run
        assert run is not None
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
        """Whether the boundary of the last step has not been passed."""
        return self.run is not None and self.run.bounded.step != self.run.step
