"""A run of replicas that have no common steps: rank 0 keeps the tally of what all do, and calls them to meetings.

    rank 0, which works, too                                     each other rank
    adds its own steps, and those that it is told of             tells loss and examples of each step, and what it sent
    a step of the run is done when so many examples are          goes on meanwhile
    as its batch has, whoever has computed them
    for a score or a checkpoint:              -- MEET -->        comes when its step is done
                    all: exchanges rest; average of the replicas, and of the optimizers' states
    at the last one:                          -- SCORE -->       scores its replica
    goes on with the run's loop               -- GO_ON, END -->  goes on, or is done, also where the run cannot go on

The average is what is scored and saved: a run that is gone on with begins there on all ranks, whatever their number.
The step that sets the learning rate is the run's as of the last meeting, and a rank's own steps since then. All
messages are the run's own, and counted apart.
"""

import math
from typing import Any, Protocol

import numpy as np

from hpcdl.checkpoint.state import Same, Tracked
from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox
from hpcdl.comm.progress import activity
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
NUMBERS = 5  # of a message
MEET, SCORE, GO_ON, END = 1, 2, 3, 4  # what rank 0 tells


class Exchange(Protocol):
    """What the replicas exchange between meetings, such as `Pairs` (hpcdl/comm/gossip/pairwise.py)."""

    def rest(self, comm: Communicator) -> None:
        """Finish what is under way, and begin nothing; collective over `comm`."""

    def go_on(self) -> None:
        """Begin again."""

    def close(self) -> None:
        """It is over; all ranks rest."""


class AsyncCoordinator(OnOneRank):
    """What this rank has of the tally. parameters: the average as of the last meeting. over: no step is to come."""

    def __init__(self, run: Run, replicas: Replicas, exchange: Exchange):
        super().__init__(replicas.model, replicas.parameters, replicas.optimizer)
        self.run, self.replicas, self.exchange, self.over = run, replicas, exchange, False
        self.consensus_distance = 0.0
        self.average_state = {
            name: device_of(vector).zeros(vector.size, vector.dtype) for name, vector in self.optimizer.state.items()
        }

    def join(self, bookkeeping: Communicator, memory: Memory) -> None:
        super().join(bookkeeping, memory)
        self.replicas.everyone = bookkeeping

    def weigh(self, memory: Memory) -> None:
        """The replica and the average of the optimizers' states, too, beside the average."""
        super().weigh(memory)
        memory.hold("parameters", self.replicas.replica)
        for vector in self.average_state.values():
            memory.hold("optimizer", vector)

    def tracked(self) -> dict[str, Tracked]:
        state = {f"optimizer/{name}": Same(vector) for name, vector in self.average_state.items()}
        return super().tracked() | (state if self.leads else {})

    def show_average(self) -> None:
        """The means of both are made anew at each meeting, and change places there (`refresh`)."""

    def hide_average(self) -> None:
        """So nothing has to change back."""

    def scores(self, data: Any) -> dict:
        return super().scores(data) | {"consensus_distance": self.consensus_distance}

    def last_scores(self, data: Any) -> dict:
        return self.replicas.last_scores(data)

    def gather_costs(self, legs: Legs, folder: Folder) -> None:
        """All ranks have told at the meeting."""

    def agree(self, everyone: Communicator) -> bool | None:
        """Replicas need not."""
        return None

    def open(self) -> None:
        """The run has begun: every rank starts from the average that it goes on from, and is heard; collective."""
        run, replicas = self.run, self.replicas
        if self.goes_on:
            if self.leads and self.optimizer.averaged:  # they change back
                exchange(self.parameters, self.average_state[AVERAGE])
            run.bookkeeping.broadcast(self.parameters)
            replicas.replica[:] = self.parameters
            for name, vector in self.average_state.items():
                run.bookkeeping.broadcast(vector)
                self.optimizer.state[name][:] = vector
        self.over, self.talk = run.over, run.bookkeeping.split(0, name="progress")
        others = range(1, run.comm.size) if run.comm.rank == 0 else [0]
        self.inbox = Inbox(self.talk, TAG, [] if self.over else others, NUMBERS, "f8")

    def add(self, loss: float, examples: int) -> None:
        """A step of this rank is done, of so many examples and with this sum of losses."""
        raise NotImplementedError

    def obey(self) -> None:
        """Between two steps: do what rank 0 has told."""

    def meet(self) -> None:
        """The averages over all ranks; collective."""
        with self.run.comm.timeline.span("meet"):
            self.exchange.rest(self.run.bookkeeping)
            self.replicas.refresh()
            self.consensus_distance = self.replicas.distance()
            for name, vector in self.average_state.items():
                vector[:] = self.optimizer.state[name]
                self.run.bookkeeping.all_reduce(vector, op="mean")
            self.run.legs.gather(self.run.bookkeeping)

    def go_on(self, step: int) -> None:
        """The meeting is over, after so many steps of the run."""
        self.optimizer.step = step
        if not self.over:
            self.exchange.go_on()

    def tell(self, to: int, *message: float) -> None:
        """Send these numbers, at most NUMBERS, to the rank `to`."""
        self.talk.ipush(np.array([*message, *[0.0] * (NUMBERS - len(message))]), to, TAG)

    def close(self) -> None:
        """Nothing is under way any more when this returns; collective."""
        self.exchange.close()
        self.talk.wait_until(lambda: not any(each.communicator is self.talk for each in activity.in_flight))
        self.talk.free()


class Leader(AsyncCoordinator):
    """Rank 0: adds up, and runs the run."""

    def __init__(self, run: Run, replicas: Replicas, exchange: Exchange):
        super().__init__(run, replicas, exchange)
        self.loss, self.examples = 0.0, 0  # of the step of the run that is under way
        self.met = False  # since the last step of the run
        self.changed = False  # whether the means of iterates and of averages have changed places since the last meeting

    def add(self, loss: float, examples: int) -> None:
        self._count(0, loss, examples)
        self.inbox.look()
        while not self.over and (come := self.inbox.arrived()):
            for source in come:
                if not self.over:
                    loss, examples, signalled, *sent = self.inbox.take(source).tolist()
                    self.inbox.listen(source)
                    self.run.signalled |= bool(signalled)
                    self.others_sent.note(source, *sent)
                    self._count(source, loss, int(examples))
            self.inbox.look()

    def _count(self, rank: int, loss: float, examples: int) -> None:
        """A step of a rank is done; what it has too many for a step of the run is of the next one."""
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
                self._boundary()

    def _boundary(self) -> None:
        self.run.boundary()
        self.over |= self.run.over
        if self.met:
            self.met = False
            self._tell_all(END if self.over else GO_ON)
            self.go_on(self.run.step)

    def fail(self, error: TrainingError) -> None:
        """Call all ranks together once more, so that nothing is under way, and end."""
        super().fail(error)
        self.refresh()
        self.over, self.met = True, False
        self._tell_all(END)
        self.go_on(self.run.step)

    def refresh(self) -> None:
        """Call all ranks to a meeting, unless they have met since the last step."""
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
            self.tell(rank, what, self.run.step)

    def close(self) -> None:
        """Take what was told too late for the run, up to each rank's last word."""
        while self.inbox.pending:
            self.talk.wait_until(self.inbox.arrived)
            for source in self.inbox.arrived():
                if self.inbox.take(source)[1] >= 0:
                    self.inbox.listen(source)
        super().close()


class Follower(AsyncCoordinator):
    """The other ranks."""

    signal_told = False  # whether rank 0 knows of a signal

    def add(self, loss: float, examples: int) -> None:
        if examples or (signals.received and not self.signal_told):
            self.tell(0, loss, examples, bool(signals.received), *self.run.comm.traffic.sent_so_far)
            self.signal_told = bool(signals.received)
        self.inbox.look()

    def obey(self) -> None:
        """Meet the others, where rank 0 calls."""
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
        """What rank 0 tells, and the run's step."""
        self.talk.wait_until(self.inbox.arrived)
        what, step, *_ = map(int, self.inbox.take(0))
        if what != END:
            self.inbox.listen(0)
        return what, step

    def close(self) -> None:
        """The last word: examples below zero."""
        if self.inbox.room:
            self.tell(0, 0, -1)
        super().close()
