"""AD-PSGD: asynchronous gossip in pairs, in which no rank waits for another to compute.

    each rank i has a model x_i of its own and, as often as it can,
        picks a random neighbour j:   x_i, x_j <- (x_i + x_j) / 2, both at once
        w <- a copy of x_i
        g <- sum over its share of a batch of grad f(w; x, y)
        x_i <- x_i - lr N / b g                    (or the rule of the optimizer)

Averagings go on while g is computed: some enter x_i between the copy and the update, by so many is g stale. A fast rank
takes more steps than a slow one; the mean of all x_i moves with each of them by lr / b g, and with no averaging.

    lower rank i                  higher rank j           Of a pair, the lower rank sends its x, and remembers what it
    a <- x_i      -- a -->        x_j <- (a + x_j) / 2    sent; the higher one averages, and sends the mean back. A
                  <-- m --        m <- x_j                rank that has picked a lower one asks that to do so.
    x_i <- x_i + m - a

Atomic: until m has come, i neither sends its x to another nor averages what others sent. Its own steps go on; they are
in x_i - a, so all is as if the averaging had been done at once, and the steps after it. Without steps both hold the
same bits. No circle: only lower ranks have an m to wait for, from higher ones. The highest of them that waits does so
for one that waits for none, which answers; so, in turn, do all others, on any graph: it need not be bipartite. And
nobody stands still meanwhile: messages are taken forward between the layers of the backward pass and between steps.

Cost of a step: one averaging, 2K values on one edge of the graph, K each way; memory for about 5 vectors of K. A rank
that computes for long between two layers lets those who wait for its m do steps of their own, without averagings.

Rank 0, a worker too, keeps the count: each rank tells it loss and examples of its steps, and a step of the run is done
when so many examples are as its batch has. For an evaluation or a checkpoint rank 0 calls all ranks to a meeting: open
averagings are finished, none is begun, and the average of all is made. These messages are the run's, and counted apart.

What is saved is the average of the models, and of the optimizers' states: a run that is resumed begins there on all
ranks, whatever their number; nothing of an asynchronous run repeats to the bit. The step that sets the learning rate is
the run's as of the last meeting, and a rank's own steps since then.

(Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018. There a
thread of each worker talks, and only ranks of one side of a bipartite graph begin an averaging.)
"""

import math
import os
import time
from collections import Counter

import numpy as np

from hpcdl.comm.progress import activity
from hpcdl.errors import LoneError, TrainingError, UsageError
from hpcdl.kernels.device import CPU, device_of
from hpcdl.kernels.reduce import add_into, add_scaled, scale
from hpcdl.runs import signals
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.run import Done
from hpcdl.comm.inbox import Inbox

SIGN, VALUES, MEAN, PROGRESS = 1, 2, 3, 4  # tags
ASKING, ASK_ME, LAST = 1, 2, 3  # signs: my values are on their way; send me yours; no more signs
MEET, SCORE, GO_ON, END = 1, 2, 3, 4  # what rank 0 tells
LULL = 1e-3  # seconds for which a rank without examples rests


def train(comm, model, data, optimizer, run, topology):
    """Train on all ranks of `comm`, the neighbours of a graph in pairs; returns the average, the same on each.

    Raises UsageError for a graph that `check` refuses.
    """
    check(topology)
    x = getattr(model, "device", CPU).empty(model.layout.size, model.layout.dtype)
    x[:] = model.initialize(run.random)
    w, gradient = (device_of(x).empty(x.size, x.dtype) for _ in range(2))
    pairs = Pairs(comm, x, topology)
    lead = (Leader if comm.rank == 0 else Follower)(run, pairs, optimizer)
    run.extra |= {"method": "adpsgd", "topology": topology.spec, "allreduce": None}
    lead.begin("gossip", model, data)
    pairs.listen()
    batches, taken, steps, staleness = data.cursor(run.batch, (comm.rank, comm.size)), run.step, 0, Counter()
    run.start()
    while not lead.over:
        with run.timed():
            with run.fetching():
                batch = batches.take(*divmod(taken, run.per_epoch))
            loss, taken = 0.0, taken + 1
            if len(batch.y):
                pairs.pick(run.random("pair", comm.rank, taken), taken)
                w[:], copied = x, pairs.averagings
                loss = run.backward(w, batch, gradient, meanwhile=pairs.look)
                pairs.look()
                optimizer.update(x, gradient, scale=comm.size / batch.total)
                pairs.moved = True
                staleness[pairs.averagings - copied] += 1
                steps += 1
            else:
                pairs.look()
                time.sleep(LULL)
            lead.report(loss, len(batch.y))
        lead.obey()
    batches.close()
    lead.close()
    with activity.inside("gather the summary"):
        counts = run.own.mpi.allgather((steps, pairs.averagings, staleness))
    stale = sum((each for _, _, each in counts), Counter())
    run.extra["steps_per_rank"], run.extra["averagings_per_rank"], _ = map(list, zip(*counts, strict=True))
    run.extra["staleness_histogram"] = [stale[each] for each in range(max(stale, default=-1) + 1)]
    run.end()
    return run.parameters


def check(topology) -> None:
    """Raise UsageError where the edges of the graph do not go both ways, or have weights."""
    if topology.directed:
        raise UsageError(
            f"adpsgd averages in pairs, and the edges of {topology.spec} go one way; take ring, hypercube or another"
        )
    if topology.weights:
        raise UsageError(f"adpsgd averages two at a time, half and half: leave the weights out of {topology.spec}")


class Pairs:
    """The averagings of this rank's model `x` with its neighbours in the graph.

    averagings: how many have entered x. moved: x has changed since it was sent, by a step. resting: this rank does not
    begin any.
    """

    def __init__(self, comm, x, topology):
        self.comm, self.x, self.topology = comm, x, topology
        self.wishes = {}  # higher ranks to send x to, the first one first
        self.wished = set()  # lower ranks that have been told to send theirs
        self.arriving = {}  # lower ranks that send theirs, with the array and the request of its receipt
        self.rooms = []  # arrays to send from, and the request of the message that was sent from there last
        self.sent = self.sending = self.mean = self.answer = None  # what was sent to a higher rank, and its answer
        self.averagings, self.moved, self.resting = 0, False, False
        one, other = (device_of(x).zeros(1, x.dtype) for _ in range(2))  # compile what an averaging needs, before it
        add_into(one, other)
        add_scaled(one, other, -1.0)
        scale(one, 0.5)

    def listen(self) -> None:
        """From now on the neighbours are heard."""
        neighbours = sorted(to for rank, to in self.topology.edges if rank == self.comm.rank)
        self.signs = Inbox(self.comm, SIGN, neighbours, 1, np.int64)

    def pick(self, random, count: int) -> None:
        """Begin an averaging with a random neighbour, or see to it that the neighbour does.

        A pair that waits for its turn already is not put down once more.
        """
        neighbours = self.topology.graph(count)[self.comm.rank]
        if neighbours:
            other = neighbours[random.integers(len(neighbours))]
            if other > self.comm.rank:
                self.wishes[other] = True
            elif other not in self.wished:
                self.wished.add(other)
                self.sign(other, ASK_ME)
        self.look()

    def sign(self, to: int, what: int) -> None:
        self.comm.ipush(np.array([what]), to, SIGN)

    def look(self, _=None) -> bool:
        """Take the averagings as far as messages have come; whether any was done."""
        before = self.averagings
        self.signs.look()
        for source in self.signs.arrived():
            self._heed(source, self.signs.take(source)[0])
        if self.answer is not None and self.answer.done:
            self._take_mean()
        if self.answer is None:
            for source in [source for source, (_, request) in self.arriving.items() if request.done]:
                self._average(source)
            if self.wishes and not self.resting:
                self._send(next(iter(self.wishes)))
        if self.answer is not None or self.wished:
            os.sched_yield()  # the other one of the pair may share this core
        return self.averagings > before

    def _heed(self, source: int, sign: int) -> None:
        if sign == ASKING:
            room = self._room()
            self.arriving[source] = room, self.comm.iwait(room, source, VALUES)
        elif sign == ASK_ME:
            self.wishes[source] = True
        if sign != LAST:
            self.signs.listen(source)

    def _send(self, to: int) -> None:
        """x goes to a higher rank."""
        del self.wishes[to]
        self.sent, self.mean, self.moved = self._room(), self._room(), False
        self.sent[:] = self.x
        self.sign(to, ASKING)
        self.sending = self.comm.ipush(self.sent, to, VALUES)
        self.answer = self.comm.iwait(self.mean, to, MEAN)

    def _take_mean(self) -> None:
        """x <- x + mean - what was sent."""
        if self.moved:
            add_scaled(self.x, self.sent, -1.0)
            add_into(self.x, self.mean)
        else:
            self.x[:] = self.mean
        self.rooms += (self.sent, self.sending), (self.mean, self.answer)
        self.answer = None
        self.averagings += 1

    def _average(self, source: int) -> None:
        """x <- (x + values of a lower rank) / 2, which is sent back."""
        room, _ = self.arriving.pop(source)
        add_into(self.x, room)
        scale(self.x, 0.5)
        room[:] = self.x
        self.rooms.append((room, self.comm.ipush(room, source, MEAN)))
        self.wished.discard(source)
        self.averagings += 1

    def _room(self):
        """An array that no message is in."""
        for which, (room, request) in enumerate(self.rooms):
            if request.done:
                del self.rooms[which]
                return room
        return device_of(self.x).empty(self.x.size, self.x.dtype)

    def rest(self, own) -> None:
        """Begin none, and answer until no averaging of any rank is under way; collective."""
        self.resting = True
        self.comm.wait_until(lambda: self.answer is None, self.look)
        all_rest = own.ibarrier()
        self.comm.wait_until(lambda: all_rest.done, self.look)

    def close(self) -> None:
        """Hear the last sign of each neighbour; all ranks rest."""
        for neighbour in list(self.signs.room):
            self.sign(neighbour, LAST)
        self.comm.wait_until(lambda: not self.signs.coming, self.look)


class Average(Replicas):
    """The replicas as they were at the last meeting; announce(): called on rank 0, alone, before they are scored."""

    def __init__(self, run, own, announce):
        super().__init__(run, own)
        self.announce = announce

    def refresh(self) -> None:
        super().refresh()
        self.apart = super().distance()

    def distance(self) -> float:
        return self.apart

    def accuracies(self):
        self.announce()
        return super().accuracies()


class Progress:
    """What all ranks together have done: rank 0 counts (Leader), the others tell it, and do as it says (Follower)."""

    def __init__(self, run, pairs: Pairs, optimizer):
        self.run, self.pairs, self.optimizer, self.over = run, pairs, optimizer, False
        self.replicas = run.replicas = Average(run, pairs.x, self.announce)
        self.state = {
            name: device_of(vector).zeros(vector.size, vector.dtype) for name, vector in optimizer.state.items()
        }

    def begin(self, strategy: str, model, data) -> None:
        """Begin the run; every rank starts from the average that is resumed from."""
        run, average = self.run, self.replicas.average
        if run.comm.rank == 0:
            run.track("parameters", average)
            for name, vector in self.state.items():
                run.track(f"optimizer/{name}", vector)
        run.begin(strategy, model, average, self.optimizer, data, alone=True, refresh=self.refresh)
        if run.options.resume:
            run.own.broadcast(average)
            self.pairs.x[:] = average
            for name, vector in self.state.items():
                run.own.broadcast(vector)
                self.optimizer.state[name][:] = vector
        self.over, self.talk = run.over, run.own.split(0, name="progress")
        others = range(1, run.comm.size) if run.comm.rank == 0 else [0]
        self.inbox = Inbox(self.talk, PROGRESS, [] if self.over else others, 3, "f8")

    def refresh(self) -> None:
        """Called on rank 0 only."""

    def announce(self) -> None:
        """Rank 0 does."""

    def meet(self) -> None:
        """The averages of all ranks; collective."""
        with self.run.comm.timeline.span("meet"):
            self.pairs.rest(self.run.own)
            self.replicas.refresh()
            for name, vector in self.state.items():
                vector[:] = self.optimizer.state[name]
                self.run.own.all_reduce(vector, op="mean")

    def go_on(self, step: int) -> None:
        """The meeting is over; averagings begin again, if there is a step to come."""
        self.optimizer.step, self.pairs.resting = step, self.over

    def tell(self, to: int, *what: float) -> None:
        self.talk.ipush(np.array(what, "f8"), to, PROGRESS)

    def close(self) -> None:
        """Nothing is under way any more when this returns."""
        self.pairs.close()
        ours = self.pairs.comm, self.talk
        self.talk.wait_until(lambda: not any(each.communicator in ours for each in activity.in_flight))
        self.talk.free()


class Leader(Progress):
    """Rank 0: runs the run."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.loss, self.examples, self.met = 0.0, 0, False

    def report(self, loss: float, examples: int) -> None:
        """A step of this rank, and those that others have told of."""
        self.count(0, loss, examples)
        self.inbox.look()
        while not self.over and (come := self.inbox.arrived()):
            for source in come:
                if not self.over:
                    loss, examples, signalled = self.inbox.take(source)
                    self.inbox.listen(source)
                    self.run.signalled |= bool(signalled)
                    self.count(source, loss, int(examples))
            self.inbox.look()

    def count(self, rank: int, loss: float, examples: int) -> None:
        """A step of a rank is done; what it has too many for a step of the run is of the next one."""
        run = self.run
        if not math.isfinite(loss):
            raise LoneError(str(run.infinite(run.step + 1, rank)))
        while examples and not self.over:
            total = min(run.batch, run.data.examples - run.step % run.per_epoch * run.batch)
            part = min(examples, total - self.examples)
            share = loss * part / examples
            self.loss, self.examples = self.loss + share, self.examples + part
            loss, examples = loss - share, examples - part
            if self.examples == total:
                run.record(self.loss, Done(total))
                self.loss, self.examples = 0.0, 0
                self.boundary()

    def boundary(self) -> None:
        try:
            self.run.boundary()
        except TrainingError as error:
            raise LoneError(str(error)) from None
        self.over = self.run.over
        if self.met:
            self.met = False
            self.tell_all(END if self.over else GO_ON)
            self.go_on(self.run.step)

    def refresh(self) -> None:
        if not self.met:
            self.met = True
            self.tell_all(MEET)
            self.meet()
            self.optimizer.step = self.run.step  # as it is saved

    def announce(self) -> None:
        self.tell_all(SCORE)

    def tell_all(self, what: int) -> None:
        for rank in range(1, self.run.comm.size):
            self.tell(rank, what, self.run.step, 0)

    def obey(self) -> None:
        """Others do."""

    def close(self) -> None:
        """Take what was told too late for the run, up to each rank's last word."""
        while self.inbox.coming:
            self.talk.wait_until(self.inbox.arrived)
            for source in self.inbox.arrived():
                if self.inbox.take(source)[1] >= 0:
                    self.inbox.listen(source)
        super().close()


class Follower(Progress):
    """The other ranks."""

    signalled = False  # whether rank 0 knows of a signal

    def report(self, loss: float, examples: int) -> None:
        """Tell rank 0 of a step."""
        if examples or (signals.received and not self.signalled):
            self.tell(0, loss, examples, bool(signals.received))
            self.signalled = bool(signals.received)
        self.inbox.look()

    def obey(self) -> None:
        """Meet the others, where rank 0 calls."""
        if not self.inbox.arrived():
            return
        does, (what, step) = {MEET: self.meet, SCORE: self.replicas.accuracies}, self.hear()
        while what in does:
            does[what]()
            what, step = self.hear()
        self.over = what == END
        self.go_on(step)

    def hear(self) -> tuple[int, int]:
        """What rank 0 tells, and the run's step."""
        self.talk.wait_until(self.inbox.arrived)
        what, step, _ = map(int, self.inbox.take(0))
        if what != END:
            self.inbox.listen(0)
        return what, step

    def close(self) -> None:
        """The last word."""
        if self.inbox.room:
            self.tell(0, 0, -1, 0)
        super().close()
