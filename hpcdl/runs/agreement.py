"""What the ranks of a run agree on between steps: losses, signals, limits and the next meeting, in one small message.

    rank 0   | losses of the steps since the last time | signals | late? | steps until the next | seconds | sent | votes
    rank 1   | its own losses                          | signals | 0     | 0                    | 0       | sent | votes
      ...      + sum over the ranks
    all      | the losses of all                       | any?    | late? | steps until the next | seconds | of all

Sent are bytes and messages; seconds are those of the training; votes are those for fewer threads and for more.

What depends on a clock is decided by rank 0 alone, and travels; so all ranks take the same decisions. Where steps are
short they meet only every few steps, about ten times a second; where a meeting takes long, as on networks of high
latency, so seldom that meetings take a twentieth of the time, but every two seconds at least. A loss that is not a
finite number ends the run: its step and rank are found by a second message.
"""

from typing import NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.faults import clock

SECONDS = 0.1  # the ranks agree about that often, or at every step when steps are longer
SHARE = 1 / 20  # of the time, that meetings may take
SELDOM = 2.0  # seconds between two of them, even so
MOST = 1000  # steps between two meetings


class NotFinite(Exception):
    """A loss that is not a finite number: of which step, on which rank of those that agree."""

    def __init__(self, step: int, rank: int):
        super().__init__(step, rank)
        self.step, self.rank = step, rank


class Step(NamedTuple):
    """A step that is done: the sum of losses (of this rank, or of all), its examples, and the run's seconds by then."""

    loss: float
    total: int
    seconds: float

    @property
    def mean(self) -> float | None:
        """The loss of an example; None of a round of which all clients stay away."""
        return self.loss / self.total if self.total else None


class Agreed(NamedTuple):
    """The steps since the last meeting, with the losses of all ranks; whether one had a signal, whether it is late.

    sent: the bytes and messages that all ranks have sent so far; messages are NaN where they are not known. seconds: of
    the training, as rank 0 has them. threads: of matrix products, -1 where one rank is short of cores, 1 where none is.
    """

    steps: list[Step]
    signalled: bool
    late: bool
    sent: tuple[float, float]
    seconds: float
    threads: int


class Agreement:
    """The meetings of the ranks of `comm`. step: the step as of the last one. fewest, most: steps between two."""

    def __init__(self, comm: Communicator, step: int = 0, fewest: int = 1):
        self.comm, self.step, self.fewest = comm, step, fewest
        self.interval, self.most = fewest, MOST
        self.steps_done: list[Step] = []
        self.begun = self.met = clock.seconds()
        self.took = 0.0  # seconds in the last meeting

    def start(self) -> None:
        """The loop begins."""
        self.begun = self.met = clock.seconds()

    def due(self, step: int) -> bool:
        """Whether it is time to meet again."""
        return step - self.step >= self.interval

    def meet(self, signals: int, time_limit: float, sent: tuple[float, float], threads: int = 0) -> Agreed:
        """Agree on the steps in `steps_done`. Raises NotFinite, on all ranks, for the first loss that is no number.

        sent: the bytes and messages that this rank, or those that it speaks for, have sent so far. threads: -1 where it
        is short of cores, 1 where it could use more.
        """
        count = len(self.steps_done)
        message = np.zeros(count + 8)
        message[:count] = [step.loss for step in self.steps_done]
        message[count] = signals
        if self.comm.rank == 0:
            message[count + 1] = bool(time_limit) and clock.seconds() - self.begun >= time_limit
            lately = (clock.seconds() - self.met) / count
            message[count + 2] = min(self.most, max(1, self.pause // lately))
            message[count + 3] = self.steps_done[-1].seconds
        message[count + 4 :] = *sent, threads < 0, threads > 0
        asked = clock.seconds()
        self.comm.all_reduce(message)
        self.took = clock.seconds() - asked
        losses, (signalled, late, interval, seconds, *of_all, fewer, more) = message[:count], message[count:].tolist()
        if not np.isfinite(losses).all():
            raise self._not_finite()
        steps = [step._replace(loss=loss) for step, loss in zip(self.steps_done, losses, strict=True)]
        self.steps_done, self.step = [], self.step + count
        self.interval, self.met = max(self.fewest, int(interval)), clock.seconds()
        votes = -1 if fewer else int(more == self.comm.size)
        return Agreed(steps, bool(signalled), bool(late), tuple(of_all), seconds, votes)

    @property
    def pause(self) -> float:
        """Seconds until the next meeting."""
        return min(SELDOM, max(SECONDS, self.took / SHARE))

    def _not_finite(self) -> NotFinite:
        """The first step with such a loss, and the first rank that has it; collective."""
        count = len(self.steps_done)
        first = np.full(self.comm.size, count, np.int64)
        bad = np.flatnonzero(~np.isfinite([step.loss for step in self.steps_done]))
        first[self.comm.rank] = bad[0] if bad.size else count
        self.comm.all_reduce(first, op="min")
        rank = int(first.argmin())
        return NotFinite(self.step + 1 + int(first[rank]), rank)
