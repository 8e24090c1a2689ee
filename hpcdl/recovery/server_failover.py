"""Recovery from lost servers or workers of replicated slices: ranks continue from what the survivors hold together.

    survivors tell       servers: the pushes that they have of each slice they hold; workers: their acknowledged pushes
    of each slice        the server, or else the replica that has followed furthest, speaks for it
    of each worker       a push that all slices have is applied to all; a push that some lack is dropped from all
    a new store          of the surviving servers, on which the slices are cut anew, with as many replicas again

    consistency    where workers continue                               what a lost worker had not pushed
    bsp            all after the last whole round                       the survivors repeat the round
    ssp            each after its last push that is on all slices       is added to the survivors' next pushes
    async          whoever asks gets the steps that nobody has pushed   is given out again

So each step has the same examples as without a loss, and each push is applied to all slices once or to none. An
acknowledged push is on all servers of its slice; if all of these are lost at once, the run is over. The first surviving
server leads the run. After each step rank 0 sends the replicas of its slice a note on how far the run is
(OnServers.note): its successor scores and saves a step without a note again, and records it once."""

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
from hpcdl.parameter_server.replication import PendingPush, SliceReplica, commit
from hpcdl.parameter_server.slice_server import SliceServer
from hpcdl.parameter_server.slice_state import SliceState
from hpcdl.recovery.survivor import Handover, Survivor
from hpcdl.runs.agreement import Step
from hpcdl.runs.progress import Progress

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

SERVER = 1 << 40  # how far a slice's server has followed: further than any replica


class WorkShare(NamedTuple):
    """A worker's share: piece `part` of `parts` of each batch from step `first` on; an orphan: of step `first` only."""

    first: int
    part: int
    parts: int


class WorkDivision(NamedTuple):
    """The division of batches; all fields by rank of worker. shares: its shares, by their first steps. orphans: shares
    of lost workers, which it adds to its next push. begun: the clock at which the worker began."""

    shares: dict[int, list[WorkShare]]
    orphans: dict[int, list[WorkShare]]
    begun: dict[int, int]

    @classmethod
    def begun_by(cls, store: ParameterStore, step: int) -> "WorkDivision":
        """Return the division at the begin of a store: each worker gets a part of each batch; async: whole batches."""
        parts = len(store.clients) if store.consistency.clocked else 1
        shares = {rank: [WorkShare(0, number % parts, parts)] for number, rank in enumerate(store.clients)}
        return cls(shares, {}, dict.fromkeys(store.clients, step))

    def again(self, pushed: dict[int, int], left: list[int]) -> "WorkDivision":
        """Return the division among the workers `left`. pushed: number of pushes of each worker. Batches that were
        begun stay divided: pieces that lost workers had not pushed are dealt out to the workers left."""
        ahead = max(*pushed.values(), *(of[-1].first for of in self.shares.values()))  # a lost one may have begun more
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
        """Return the division for these workers, which compute whole batches."""
        return WorkDivision({rank: self.shares[rank] for rank in left}, {}, {rank: self.begun[rank] for rank in left})

    def numbered(self, numbers: dict[int, int]) -> "WorkDivision":
        """Return the division with ranks renumbered. numbers: old rank -> new rank."""

        def under(of: dict[int, Any]) -> dict[int, Any]:
            return {numbers[rank]: each for rank, each in of.items()}

        return WorkDivision(under(self.shares), under(self.orphans), under(self.begun))


def share_at(shares: list[WorkShare], step: int) -> WorkShare:
    """Return the share of a worker at a step."""
    return next(each for each in reversed(shares) if each.first <= step)


class Known(NamedTuple):
    """What a surviving rank knows. ready: it has a store. clock: acknowledged pushes of a worker; -1: a server. slices:
    of a server, by slice: how far it has followed, and each client's number of pushes. spent: costs of this leg."""

    rank: int
    ready: bool
    clock: int
    slices: dict[int, tuple[int, dict[int, int]]]
    spent: dict


class ServedSurvivor(Survivor):
    """One rank's part of all legs of a run with servers. store: this leg's, once all slices have replicas. progress: of
    the last store; None: none. division: of batches. servers: their number. signalled: a rank has had a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Any = None  # ParameterStore
        self.progress: ClockProgress | None = None
        self.division: Any = None  # WorkDivision
        self.servers = 0
        self.signalled = False

    def refuse(self, run: "Run") -> None:
        if "{ranks}" in run.data.order:
            what = "the rows of a lost worker would be lost, too; take --placement shared or streamed"
            raise AgreedError(f"--replicas: {what}")

    def follow(self, run: "Run") -> None:
        super().follow(run)
        self.store = None
        run.signalled |= self.signalled

    def begin(self, store: ParameterStore) -> None:
        """Begin the work of a leg: all slices of `store` have their replicas, and from now on ranks may be lost."""
        self.division = self.division or WorkDivision.begun_by(store, self.run.step)
        self.store = store

    def adapt(self, options: Any) -> Any:
        return replace(options, replicas=min(options.replicas, self.servers), servers=self.servers)

    def hand_over(self, left: MPI.Intracomm, before: MPI.Intracomm | None) -> tuple[MPI.Intracomm, list[int]]:
        """As `Survivor.hand_over`. Raises TrainingError, on all survivors, if a slice is lost, or all workers are."""
        run = self.run
        assert before is not None  # nobody is started anew beside servers
        folder, batch = run.folder, run.batch
        known = {each.rank: each for each in left.allgather(self.known(before.rank))}
        lost = [rank for rank in range(before.size) if rank not in known]
        gone = self.told(lost)
        if not all(each.ready for each in known.values()):
            raise TrainingError(f"{gone} before the first step: start the run again")
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
            epoch, legs = progress.step / run.per_epoch, run.legs.so_far(progress, spent)
            about = {"epoch": epoch, "batch": batch, "legs": legs, "sent": note["sent"]}
            self.found = Checkpoint(vectors_of_all, progress.attributes() | about)
            ended, path = replace(progress, stopped=note["reason"]), folder.path and str(folder.path)
            handover = Handover(ended, False, note["saved"], path, batch, note["known"], note["fresh"])
            facts = handover, served, note["signalled"]
        self.handover, self.progress, self.signalled = comm.bcast(facts)
        clocked, division = self.store.consistency.clocked, self.division
        self.division = (division.again(whole, workers) if clocked else division.only(workers)).numbered(numbers)
        self.servers = len(servers)
        self.losses.append({"step": self.handover.progress.step, "redone": 0, "ranks": lost, "left": comm.size})
        self.losses[-1] |= {"servers": len(servers), "workers": len(workers), "pushes_kept": kept}
        return comm, lost

    def known(self, rank: int) -> Known:
        store, slices = self.store, {}
        if store is not None and store.serves:
            for which in (rank, *store.server.replicas.of):
                state, kept = self.held(which)
                far = state.taken if isinstance(state, SliceReplica) else SERVER
                slices[which] = far, {c: n + (c in kept) for c, n in state.clocks.of_client.items()}
        clock = store.clock if store is not None and store.works else -1
        return Known(rank, store is not None, clock, slices, self.spent())

    def held(self, which: int) -> tuple[SliceState, dict[int, PendingPush]]:
        """Return slice number `which`, which this server holds, and the pushes to it that are not applied yet."""
        server = self.store.server
        if which == self.store.comm.rank:
            return server, server.copies.pending
        replica = server.replicas.of[which]
        return replica, replica.pending

    def _gather(self, comm: MPI.Intracomm, spoken: list[int], speakers: list[int]) -> dict[str, np.ndarray]:
        """Return the whole vectors on rank 0, by names in a checkpoint; spoken: the slices that this rank sends."""
        slices, whole = self.store.slices, {}
        for which in spoken if comm.rank > 0 else ():
            for vector in self.held(which)[0].vectors:
                comm.Send(vector, 0)
        if comm.rank == 0:
            mine = self.held(0)[0]
            names = ["parameters", *(f"optimizer/{name}" for name in mine.update.state)]
            whole = {name: CPU.empty(slices[-1].stop, mine.values.dtype) for name in names}
            for which, rank in enumerate(speakers):
                here = self.held(which)[0].vectors if rank == 0 else []
                for number, name in enumerate(names):
                    if here:
                        whole[name][slices[which]] = here[number]
                    else:
                        comm.Recv(whole[name][slices[which]], rank)
        return whole

    def _noted(self) -> dict:
        """Return how far the run is, by its leading server's last note. Called on the rank that leads from now on."""
        run, state = self.run, self.held(0)[0]
        notes = state.copies.notes if isinstance(state, SliceServer) else state.notes  # type: ignore
        found = [json.loads(noted) for _, noted in notes]
        first = self.handover
        since, fresh = (run.legs.first, []) if first is None else (first.recorded, first.fresh)
        steps = dict(enumerate(fresh, since + 1))
        for each in found:
            steps |= {number: Step(*step) for number, step in enumerate(each["fresh"], each["first"] + 1)}
        facts = found[-1] if found else run.note(0) | {"known": since}
        facts["fresh"] = [steps[number] for number in range(facts["known"] + 1, facts["step"] + 1)]
        return facts


def speakers_of(known: dict[int, Known], slices: int, gone: str) -> list[int]:
    """Return the rank that has followed each slice furthest. Raises TrainingError, with `gone`, if no rank has it."""
    found = []
    for which in range(slices):
        holders = [rank for rank, each in known.items() if which in each.slices]
        if not holders:
            raise TrainingError(f"all replicas of slice {which} of {counted(slices, 'slice')} are gone: {gone}")
        found.append(max(holders, key=lambda rank: known[rank].slices[which][0]))
    return found


def refuse_lost(known: dict[int, Known], whole: dict[int, int]) -> None:
    """Raise TrainingError if an acknowledged push is not on all slices. whole: pushes on all slices, by client."""
    for rank, each in known.items():
        if each.clock > whole.get(rank, each.clock):
            what = f"push {each.clock - 1} of rank {rank} was acknowledged"
            raise TrainingError(f"{what}, but the servers left hold only {counted(whole[rank], 'push')} of that rank")


def settle(state: SliceState, kept: dict[int, PendingPush], whole: dict[int, int]) -> None:
    """Apply pushes to a slice until whole[c] of each client c are applied; drop later ones of an incomplete round."""
    for client in sorted(whole):
        if state.clocks.of_client[client] < whole[client]:
            commit(state, kept, client)
    for _ in state.clocks.complete():
        state.apply_round()
    if state.clocks.consistency.in_rounds:
        state.round.clear()
        state.losses = {step: loss for step, loss in state.losses.items() if step < min(whole.values())}
    state.clocks.of_client |= whole
