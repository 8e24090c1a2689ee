"""A run of replicas without common steps: rank 0 counts the steps of all ranks, and calls the ranks to meetings.

    rank 0, which works, too                                     each other rank
    adds its own steps, and the steps that it is told of         tells loss and examples of each step, and what it sent
    a step of the run is done when as many examples as its       goes on meanwhile
    batch has are computed, on whatever ranks
    for a score or a checkpoint:              -- MEET -->        comes when its step is done
                    all: stop exchanging; average the replicas, and the optimizers' states
    at the last score:                        -- SCORE -->       scores its replica
    goes on with the run's loop               -- GO_ON, END -->  goes on, or is done (also if the run cannot go on)

The average is scored and saved: a resumed run begins with it on all ranks, whatever their number. The learning rate
depends on the run's step as of the last meeting plus the rank's own steps since."""

import math
from typing import Any, Protocol

from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.framing import Frame, Inbox
from hpcdl.errors import TrainingError
from hpcdl.kernels.device import device_of
from hpcdl.memory import Memory
from hpcdl.optim.optimizer import AVERAGE
from hpcdl.runs import signals
from hpcdl.runs.folder import Folder
from hpcdl.runs.on_one_rank import OnOneRank
from hpcdl.runs.ownership import exchange
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.run import Run
from hpcdl.runs.segments import Legs

TAG = 4
DONE = Frame(TAG, ["loss", "examples", "signalled", ("sent", 2)])  # to rank 0: a step; what its rank has sent in all
CALL = Frame(TAG, ["what", "step", ("unused", 3)])  # from rank 0
MEET, SCORE, GO_ON, END = 1, 2, 3, 4  # rank 0's calls


class Exchange(Protocol):
    """A way to exchange values of replicas between meetings, such as `Pairs` (hpcdl/comm/gossip/pairwise.py)."""

    def rest(self, comm: Communicator) -> None:
        """Finish the messages under way and begin no others; collective over `comm`."""

    def go_on(self) -> None:
        """Exchange again after a meeting."""

    def close(self) -> None:
        """End the exchange, at a time when all ranks rest."""


class AsyncCoordinator(OnOneRank):
    """One rank's part in a run without common steps. parameters: average at the last meeting. over: no step follows."""

    def __init__(self, run: Run, replicas: Replicas, exchange: Exchange):
        super().__init__(replicas.model, replicas.parameters, replicas.optimizer)
        self.run, self.replicas, self.exchange, self.over = run, replicas, exchange, False
        self.consensus_distance = 0.0
        self.average_state = {
            name: device_of(vector).zeros(vector.size, vector.dtype) for name, vector in self.optimizer.state.items()
        }

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        super().join(bookkeeping, memory)
        self.replicas.peers = bookkeeping

    def weigh(self, memory: Memory) -> None:
        super().weigh(memory)
        memory.hold("parameters", self.replicas.replica)
        for vector in self.average_state.values():
            memory.hold("optimizer", vector)

    def tracked(self) -> dict[str, Tracked]:
        state = {f"optimizer/{name}": Same(vector) for name, vector in self.average_state.items()}
        return super().tracked() | (state if self.leads else {})

    def show_average(self) -> None:
        """Do nothing: each meeting averages iterates and their means anew, and `refresh` swaps the two."""

    hide_average = show_average  # nothing is to be swapped back

    def scores(self, data: Any) -> dict:
        return super().scores(data) | {"consensus_distance": self.consensus_distance}

    def last_scores(self, data: Any) -> dict:
        return self.replicas.last_scores(data)

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """Do nothing: all ranks have told their costs at the meeting."""

    def agree(self, everyone: Communicator) -> bool | None:
        return None

    def open(self) -> None:
        """Begin the run; on each rank, a resumed run begins with the saved average. Collective."""
        run, replicas = self.run, self.replicas
        if self.goes_on:
            if self.leads and self.optimizer.averaged:  # swap iterates and means back
                exchange(self.parameters, self.average_state[AVERAGE])
            run.bookkeeping.broadcast(self.parameters)
            replicas.replica[:] = self.parameters
            for name, vector in self.average_state.items():
                run.bookkeeping.broadcast(vector)
                self.optimizer.state[name][:] = vector
        self.over, self.talk = run.over, run.bookkeeping.split(0, name="progress")
        heard: Any = (DONE, range(1, run.comm.size)) if run.comm.rank == 0 else (CALL, [0])
        self.inbox = Inbox(self.talk, heard[0], [] if self.over else heard[1])

    def add(self, loss: float, examples: int) -> None:
        """Count a step of this rank: its sum of losses, and its number of examples."""
        raise NotImplementedError

    def obey(self) -> None:
        """Follow a call of rank 0, if any has come, between two steps."""

    def meet(self) -> None:
        """Average parameters and optimizer states over all ranks; collective."""
        with self.run.comm.timeline.span("meet"):
            self.exchange.rest(self.run.bookkeeping)
            self.replicas.refresh()
            self.consensus_distance = self.replicas.distance()
            for name, vector in self.average_state.items():
                vector[:] = self.optimizer.state[name]
                self.run.bookkeeping.all_reduce(vector, op="mean")
            self.run.legs.gather(self.run.bookkeeping)

    def go_on(self, step: int) -> None:
        """Continue after a meeting, or end if `over`. step: the run's step."""
        self.optimizer.step = step
        if not self.over:
            self.exchange.go_on()

    def close(self) -> None:
        """End the exchange, and return when no message is under way; collective."""
        self.exchange.close()
        self.talk.wait_until(lambda: not self.talk.in_flight)
        self.talk.free()


class Leader(AsyncCoordinator):
    """Rank 0, which counts the steps of all ranks, and records, scores and saves the run."""

    def __init__(self, run: Run, replicas: Replicas, exchange: Exchange):
        super().__init__(run, replicas, exchange)
        self.loss, self.examples = 0.0, 0  # of the run's current step
        self.met = False  # True if the ranks have met since the last step of the run
        self.changed = False  # True if the means of iterates and averages were swapped after the last meeting

    def add(self, loss: float, examples: int) -> None:
        self._count(0, loss, examples)
        self.inbox.look()
        while not self.over and (come := self.inbox.arrived()):
            for source in come:
                if not self.over:
                    loss, examples, signalled, sent = self.inbox.take(source).item()
                    self.inbox.listen(source)
                    self.run.signalled |= bool(signalled)
                    self.others_sent.note(source, *sent.tolist())
                    self._count(source, loss, int(examples))
            self.inbox.look()

    def _count(self, rank: int, loss: float, examples: int) -> None:
        """Count a step of a rank; examples that the run's step no longer needs belong to the run's next step."""
        run = self.run
        if not math.isfinite(loss):
            self.fail(run.not_finite(run.step + 1, rank))
            return
        while examples and not self.over:
            total = min(run.batch, run.data.examples - run.step % run.per_epoch * run.batch)
            part = min(examples, total - self.examples)
            share = loss * part / examples
            self.loss, self.examples = self.loss + share, self.examples + part
            loss, examples = loss - share, examples - part
            if self.examples == total:
                run.record(self.loss, total)
                self.loss, self.examples = 0.0, 0
                run.boundary()
                self.over |= run.over
                if self.met:
                    self.met = False
                    self._tell_all(END if self.over else GO_ON)
                    self.go_on(run.step)

    def fail(self, error: TrainingError) -> None:
        """Keep the error, call all ranks to a last meeting, so that no message is under way, and end the run."""
        super().fail(error)
        self.refresh()
        self.over, self.met = True, False
        self._tell_all(END)
        self.go_on(self.run.step)

    def refresh(self) -> None:
        """Call all ranks to a meeting, unless they have met since the last step; swap means as `average_shown` says."""
        if not self.met:
            self.met = True
            self._tell_all(MEET)
            self.meet()
            self.changed = False
            for rank, spent in enumerate(self.run.legs.table[1:], 1):
                self.others_sent.note(rank, spent["bytes_sent_per_rank"], spent["messages_per_rank"])
            self.optimizer.step = self.run.step  # as it is saved
        if self.changed != self.average_shown:
            self.changed = self.average_shown
            exchange(self.parameters, self.average_state[AVERAGE])

    def last_scores(self, data: Any) -> dict:
        self._tell_all(SCORE)
        return super().last_scores(data)

    def _tell_all(self, what: int) -> None:
        for rank in range(1, self.run.comm.size):
            CALL.send(self.talk, rank, CALL.header(what=what, step=self.run.step))

    def close(self) -> None:
        """Receive the messages sent after the end of the run, up to each rank's last one; collective."""
        while self.inbox.pending:
            self.talk.wait_until(self.inbox.arrived)
            for source in self.inbox.arrived():
                if self.inbox.take(source)["examples"] >= 0:
                    self.inbox.listen(source)
        super().close()


class Follower(AsyncCoordinator):
    """Any rank but 0: tells rank 0 its steps, and comes to meetings."""

    signal_told = False  # True if rank 0 knows of a signal

    def add(self, loss: float, examples: int) -> None:
        if examples or (signals.received and not self.signal_told):
            self.signal_told, sent = bool(signals.received), self.run.comm.traffic.sent_so_far
            DONE.send(self.talk, 0, DONE.header(loss=loss, examples=examples, signalled=self.signal_told, sent=sent))
        self.inbox.look()

    def obey(self) -> None:
        if not self.inbox.arrived():
            return
        with self.run.stopwatch.apart():
            what, step = self._hear()
            while what in (MEET, SCORE):
                with self.run.memory.paused():
                    if what == MEET:
                        self.meet()
                    else:
                        self.last_scores(self.run.data)
                what, step = self._hear()
        self.over = what == END
        self.go_on(step)
        if self.over and self.optimizer.averaged:
            exchange(self.parameters, self.average_state[AVERAGE])

    def _hear(self) -> tuple[int, int]:
        self.talk.wait_until(self.inbox.arrived)
        call = self.inbox.take(0)
        what, step = int(call["what"]), int(call["step"])
        if what != END:
            self.inbox.listen(0)
        return what, step

    def close(self) -> None:
        if self.inbox.room:  # the last word: examples below zero
            DONE.send(self.talk, 0, DONE.header(examples=-1))
        super().close()
