"""What the ranks of a run agree on between steps: losses, signals, limits and the next meeting, in one small message.

    rank 0   | losses of the steps since the last time | signals | late? | steps until the next | seconds | sent | votes
    rank 1   | its own losses                          | signals | 0     | 0                    | 0       | sent | votes
      ...      + sum over the ranks
    all      | the losses of all                       | any?    | late? | steps until the next | seconds | of all

Rank 0 alone decides what depends on a clock, so that all ranks decide alike. With short steps the ranks meet about ten
times a second. Slow meetings, as on networks of high latency, take at most a twentieth of the time, but the ranks meet
at least every two seconds. seconds: of the training. sent: bytes, messages. votes: for fewer or more threads."""

from typing import NamedTuple

import numpy as np

from hpcdl import drill
from hpcdl.comm import Communicator

SECONDS = 0.1  # seconds between two meetings; with longer steps, the ranks meet at every step
SHARE = 1 / 20  # largest share of the time for meetings
SELDOM = 2.0  # largest number of seconds between two meetings
MOST = 1000  # largest number of steps between two meetings


class NotFinite(Exception):
    """A loss is not finite. args: the step of the loss, and its rank among the ranks that agree."""


class Step(NamedTuple):
    """A finished step. loss: sum of losses, of this rank or all. total: examples. seconds: of the run by then."""

    loss: float
    total: int
    seconds: float

    @property
    def mean(self) -> float | None:
        """The mean loss of an example; None without examples, as in a round that all clients miss."""
        return self.loss / self.total if self.total else None


class Agreed(NamedTuple):
    """The result of a meeting. steps: since the last meeting, with the losses of all ranks. signalled: a rank had a
    signal. late: the time limit is over. sent: bytes and messages of all ranks so far; messages: NaN if unknown.
    seconds: of the training. threads: -1 if a rank is short of cores, 1 if all could use more BLAS threads, or 0."""

    steps: list[Step]
    signalled: bool
    late: bool
    sent: tuple[float, float]
    seconds: float
    threads: int


class Agreement:
    """Meetings of the ranks of `comm`. step: of the last one. fewest, most: limits of the steps between meetings."""

    def __init__(self, comm: Communicator, step: int = 0, fewest: int = 1):
        self.comm, self.step, self.fewest = comm, step, fewest
        self.interval, self.most = fewest, MOST
        self.steps_done: list[Step] = []
        self.took = 0.0  # seconds in the last meeting
        self.start()

    def start(self) -> None:
        """Start the clocks: the loop begins."""
        self.begun = self.met = drill.seconds()

    def due(self, step: int) -> bool:
        """True if a meeting is due after this step."""
        return step - self.step >= self.interval

    def meet(self, signals: int, time_limit: float, sent: tuple[float, float], threads: int = 0) -> Agreed:
        """Agree on the steps in `steps_done`. Raises NotFinite, on all ranks, for the first loss that is not finite.
        sent: bytes and messages so far of this rank and the ranks it speaks for. threads: its vote, as in `Agreed`."""
        count = len(self.steps_done)
        message = np.zeros(count + 8)
        message[:count] = [step.loss for step in self.steps_done]
        message[count] = signals
        if self.comm.rank == 0:
            message[count + 1] = bool(time_limit) and drill.seconds() - self.begun >= time_limit
            lately = (drill.seconds() - self.met) / count
            pause = min(SELDOM, max(SECONDS, self.took / SHARE))  # seconds until the next meeting
            message[count + 2] = min(self.most, max(1, pause // lately))
            message[count + 3] = self.steps_done[-1].seconds
        message[count + 4 :] = *sent, threads < 0, threads > 0
        asked = drill.seconds()
        self.comm.all_reduce(message)
        self.took = drill.seconds() - asked
        losses, (signalled, late, interval, seconds, *of_all, fewer, more) = message[:count], message[count:].tolist()
        if not np.isfinite(losses).all():
            raise self._not_finite()
        steps = [step._replace(loss=loss) for step, loss in zip(self.steps_done, losses, strict=True)]
        self.steps_done, self.step = [], self.step + count
        self.interval, self.met = max(self.fewest, int(interval)), drill.seconds()
        votes = -1 if fewer else int(more == self.comm.size)
        return Agreed(steps, bool(signalled), bool(late), tuple(of_all), seconds, votes)

    def _not_finite(self) -> NotFinite:
        count = len(self.steps_done)
        first = np.full(self.comm.size, count, np.int64)
        bad = np.flatnonzero(~np.isfinite([step.loss for step in self.steps_done]))
        first[self.comm.rank] = bad[0] if bad.size else count
        self.comm.all_reduce(first, op="min")
        rank = int(first.argmin())
        return NotFinite(self.step + 1 + int(first[rank]), rank)
