"""What ranks go on from when servers or workers of replicated slices are gone: what those that are left hold together.

    who is left says     servers: of each slice that they hold the pushes that they have; workers: those acknowledged
    of each slice        the server, or else who of its replicas has followed furthest, speaks for it
    of each worker       a push that all slices have is applied to all; one that some lack is dropped from all
    a new store          of the servers that are left, on which the slices are cut anew, with as many replicas again

    consistency    where workers go on                                  what a worker that is gone had not pushed
    bsp            all after the last whole round                       the round is done again, by those that are left
    ssp            each after its last push that is on all slices       is added to the next pushes of those
    async          whoever asks gets the steps that nobody has pushed   is given out again

So each step is made of the examples that it is made of when nobody is gone, and each push is applied to all slices once
or to none. What was acknowledged is on all servers of its slice, and so on one that is left: where all of them are gone
at once, the run is over.

The first of the servers that are left runs the run. That of rank 0 notes after each step how far the run is, for those
that hold replicas of its slice (OnServers.note): a step that it had not noted is scored and saved again by who
takes its place, and recorded once.
"""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.formatting import counted
from hpcdl.kernels.device import CPU
from hpcdl.parameter_server.clocks import ClockProgress
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.replication import PendingPush, SliceReplica, commit, vectors
from hpcdl.parameter_server.slice_server import SliceServer
from hpcdl.parameter_server.slice_state import SliceState
from hpcdl.recovery.survivor import Handover, Survivor
from hpcdl.runs.agreement import Step
from hpcdl.runs.progress import Progress

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

SERVER = 1 << 40  # that of a slice is further than any that follows it


class WorkShare(NamedTuple):
    """From step `first` on a worker has part `part` of `parts` of each batch; an orphan: of this step alone."""

    first: int
    part: int
    parts: int


class WorkDivision(NamedTuple):
    """Who computes what, by the ranks of workers. shares: each from its first step on. orphans: what a worker adds to
    its next push, of workers that are gone. begun: the clocks at which it began."""

    shares: dict[int, list[WorkShare]]
    orphans: dict[int, list[WorkShare]]
    begun: dict[int, int]

    def again(self, pushed: dict[int, int], left: list[int]) -> "WorkDivision":
        """Among the workers that are left, where each had made so many pushes.

        Batches that somebody has begun stay divided as they are: what those that are gone had not pushed of them is
        dealt out to the others.
        """
        ahead = max(*pushed.values(), *(of[-1].first for of in self.shares.values()))  # some who had begun may be gone
        waiting = {each: self.orphans.get(each, []) if pushed[each] == self.begun[each] else [] for each in pushed}
        adopted = [each for rank in pushed if rank not in left for each in waiting[rank]]
        for rank in [each for each in pushed if each not in left]:
            adopted += [share_at(self.shares[rank], step)._replace(first=step) for step in range(pushed[rank], ahead)]
        shares = {rank: [*self.shares[rank], WorkShare(ahead, index, len(left))] for index, rank in enumerate(left)}
        for rank, of in shares.items():
            while len(of) > 1 and of[1].first <= pushed[rank]:
                del of[0]
        orphans = {rank: [*waiting[rank], *adopted[index :: len(left)]] for index, rank in enumerate(left)}
        return WorkDivision(shares, orphans, {rank: pushed[rank] for rank in left})

    def only(self, left: list[int]) -> "WorkDivision":
        """Of these workers, where each computes whole batches."""
        return WorkDivision({rank: self.shares[rank] for rank in left}, {}, {rank: self.begun[rank] for rank in left})

    def numbered(self, numbers: dict[int, int]) -> "WorkDivision":
        """The same under other numbers of the ranks."""

        def under(of: dict[int, Any]) -> dict[int, Any]:
            return {numbers[rank]: each for rank, each in of.items()}

        return WorkDivision(under(self.shares), under(self.orphans), under(self.begun))


def share_at(shares: list[WorkShare], step: int) -> WorkShare:
    """Of the shares of a worker that of a step."""
    return next(each for each in reversed(shares) if each.first <= step)


class Known(NamedTuple):
    """What a rank that is left knows: of a worker `clock`, its pushes that are acknowledged (-1: it is none).

    slices: of each slice that a server holds how far it has followed, and the pushes that it has of each client.
    """

    rank: int
    ready: bool
    clock: int
    slices: dict[int, tuple[int, dict[int, int]]]
    spent: dict


class ServedSurvivor(Survivor):
    """Of one rank, for all legs of a run with servers. store: of this leg, once all slices have their replicas.

    progress: of the store whose place the next one takes. division: of the batches. servers: how many there are.
    signalled: whether a rank has had a signal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store: ParameterStore | None = None
        self.progress: ClockProgress | None = None
        self.division: WorkDivision | None = None
        self.servers = 0
        self.signalled = False

    def refuse(self, run: "Run") -> None:
        if "{ranks}" in run.data.order:
            raise AgreedError(
                "--replicas: the rows of a worker would be gone with it; take --placement shared or streamed"
            )

    def follow(self, run: "Run") -> None:
        super().follow(run)
        self.store = None
        run.signalled |= self.signalled

    def begin(self, store: ParameterStore) -> None:
        """All slices have their replicas: from now on ranks can be outlived."""
        assert self.run is not None
        if self.division is None:
            parts = store.clients if store.consistency.clocked else range(1)
            shares = {
                rank: [WorkShare(0, number % len(parts), len(parts))] for number, rank in enumerate(store.clients)
            }
            self.division = WorkDivision(shares, {}, dict.fromkeys(store.clients, self.run.step))
        self.store = store

    def adapt(self, options: Any) -> Any:
        return replace(options, replicas=min(options.replicas, self.servers), servers=self.servers)

    def hand_over(self, left: MPI.Intracomm, before: MPI.Intracomm | None) -> tuple[MPI.Intracomm, list[int]]:
        """As `Survivor` has it; raises TrainingError, on all that are left, where a slice is gone, or all workers."""
        run = self.run
        assert run is not None and before is not None  # nobody is started anew beside servers
        folder, batch = run.folder, run.batch
        known = {each.rank: each for each in left.allgather(self.known(before.rank))}
        gone = self.told([rank for rank in range(before.size) if rank not in known])
        if not all(each.ready for each in known.values()):
            raise TrainingError(f"{gone} before the first step: start the run again")
        assert self.store is not None and self.division is not None
        speakers = speakers_of(known, len(self.store.slices), f"{gone}; {folder.kept()}")
        workers = [rank for rank, each in known.items() if each.clock >= 0]
        if not workers:
            raise TrainingError(f"{gone}, and no worker is left; {folder.kept()}")
        has = [known[rank].slices[which][1] for which, rank in enumerate(speakers)]
        whole = {client: min(each[client] for each in has) for client in has[0]}
        refuse_lost(known, whole)
        kept = sum(whole[each] - known[each].clock for each in workers)
        if self.store.consistency.in_rounds:
            whole = dict.fromkeys(whole, min(whole.values()))
        spoken = [which for which, rank in enumerate(speakers) if rank == before.rank]
        for which in spoken:
            settle(*self.held(which), whole)

        servers = [speakers[0], *(each for each, of in known.items() if of.clock < 0 and each != speakers[0])]
        order = [*servers, *workers]
        numbers = {rank: number for number, rank in enumerate(order)}
        comm: Any = left.Split(0, numbers[before.rank])
        left.Free()
        vectors_of_all = self._gather(comm, spoken, [numbers[each] for each in speakers])
        facts: Any = None
        if comm.rank == 0:
            note = self._noted()
            state, step = self.held(0)[0], note["step"]
            progress = Progress.read(note | {"updates": state.update.optimizer.step})
            losses = {each: loss for each, loss in state.losses.items() if each >= step}
            clocks = {numbers[each]: whole[each] for each in workers}
            served = state.clocks.progress(losses)._replace(of_client=clocks, counted=step)
            spent = [known[rank].spent if rank in known else {} for rank in range(before.size)]
            self.found = Checkpoint(vectors_of_all, self._attributes(progress, note["sent"], spent))
            handover = Handover(
                replace(progress, stopped=note["reason"]),
                False,
                note["saved"],
                None if folder.path is None else str(folder.path),
                batch,
                note["known"],
                note["fresh"],
            )
            facts = handover, served, note["signalled"]
        self.handover, self.progress, self.signalled = comm.bcast(facts)
        assert self.handover is not None
        clocked, division = self.store.consistency.clocked, self.division
        self.division = (division.again(whole, workers) if clocked else division.only(workers)).numbered(numbers)
        self.servers = len(servers)
        self.losses.append(
            {
                "step": self.handover.progress.step,
                "redone": 0,
                "ranks": [rank for rank in range(before.size) if rank not in known],
                "left": comm.size,
                "servers": len(servers),
                "workers": len(workers),
                "pushes_kept": kept,
            }
        )
        return comm, self.losses[-1]["ranks"]

    def known(self, rank: int) -> Known:
        """What this rank knows."""
        store, slices = self.store, {}
        if store is not None and store.serves:
            for which in (rank, *store.server.replicas.of):
                state, kept = self.held(which)
                far = state.taken if isinstance(state, SliceReplica) else SERVER
                slices[which] = far, {c: n + (c in kept) for c, n in state.clocks.of_client.items()}
        clock = store.clock if store is not None and store.works else -1
        return Known(rank, store is not None, clock, slices, self.spent())

    def held(self, which: int) -> tuple[SliceState, dict[int, PendingPush]]:
        """A slice that this server holds, and of it the pushes that are not applied."""
        assert self.store is not None
        server = self.store.server
        if which == self.store.comm.rank:
            return server, server.copies.pending
        replica = server.replicas.of[which]
        return replica, replica.pending

    def _gather(self, comm: MPI.Intracomm, spoken: list[int], speakers: list[int]) -> dict[str, np.ndarray]:
        """On rank 0 the whole vectors, as a checkpoint names them; spoken: the slices that this rank sends."""
        assert self.store is not None
        slices, whole = self.store.slices, {}
        for which in spoken if comm.rank > 0 else ():
            for vector in vectors(self.held(which)[0]):
                comm.Send(vector, 0)
        if comm.rank == 0:
            mine = self.held(0)[0]
            names = ["parameters", *(f"optimizer/{name}" for name in mine.update.state)]
            whole = {name: CPU.empty(slices[-1].stop, mine.values.dtype) for name in names}
            for which, rank in enumerate(speakers):
                here = vectors(self.held(which)[0]) if rank == 0 else []
                for number, name in enumerate(names):
                    if here:
                        whole[name][slices[which]] = here[number]
                    else:
                        comm.Recv(whole[name][slices[which]], rank)
        return whole

    def _noted(self) -> dict:
        """On who runs the run from now on: how far it is, as its lead has noted it last."""
        run, state = self.run, self.held(0)[0]
        assert run is not None
        notes = state.copies.notes if isinstance(state, SliceServer) else state.notes  # type: ignore
        found = [json.loads(noted) for _, noted in notes.entries]
        first = self.handover
        since, fresh = (run.legs.first, []) if first is None else (first.recorded, first.fresh)
        steps = dict(enumerate(fresh, since + 1))
        for each in found:
            steps |= {number: Step(*step) for number, step in enumerate(each["fresh"], each["first"] + 1)}
        facts = found[-1] if found else run.note(0) | {"known": since}
        facts["fresh"] = [steps[number] for number in range(facts["known"] + 1, facts["step"] + 1)]
        return facts

    def _attributes(self, progress: Progress, sent: dict, spent: list[dict]) -> dict:
        """How far the run is, as a checkpoint has it. spent: what each rank has in this leg, where known."""
        run = self.run
        assert run is not None
        return {
            **progress.attributes(),
            "epoch": progress.step / run.per_epoch,
            "batch": run.batch,
            "legs": run.legs.so_far(progress, spent),
            "sent": sent,
        }


def speakers_of(known: dict[int, Known], slices: int, gone: str) -> list[int]:
    """Of each slice the rank that has followed it furthest. Raises TrainingError where nobody has it."""
    found = []
    for which in range(slices):
        holders = [rank for rank, each in known.items() if which in each.slices]
        if not holders:
            raise TrainingError(f"all replicas of slice {which} of {counted(slices, 'slice')} are gone: {gone}")
        found.append(max(holders, key=lambda rank: known[rank].slices[which][0]))
    return found


def refuse_lost(known: dict[int, Known], whole: dict[int, int]) -> None:
    """Raise TrainingError where a push that was acknowledged is not on all slices."""
    for rank, each in known.items():
        if each.clock > whole.get(rank, each.clock):
            raise TrainingError(
                f"push {each.clock - 1} of rank {rank} was acknowledged, and only {whole[rank]} of its pushes are there"
            )


def settle(state: SliceState, kept: dict[int, PendingPush], whole: dict[int, int]) -> None:
    """Bring a slice to where each client has made so many pushes; others of a round that is not whole are dropped."""
    for client in sorted(whole):
        if state.clocks.of_client[client] < whole[client]:
            commit(state, kept, client)
    for _ in state.clocks.complete():
        state.apply_round()
    if state.clocks.consistency.in_rounds:
        state.round.clear()
        state.losses = {step: loss for step, loss in state.losses.items() if step < min(whole.values())}
    state.clocks.of_client |= whole
