"""Replay memories on ranks of their own, each with a shard of all transitions; learners ask them for samples ahead.

    learner                                                   memory, for its shard
        ask: rows, for which step          ------------>        when so many environment steps have come:
        learn from the sample before                            draw
        take: a sample                     <------------        sample
        |TD errors|                        ------------>        its priorities

A learner asks AHEAD samples in advance, so that drawing and sending go on while it computes; so priorities are that
much late. Each shard is drawn from by its own priorities, as much as any other, which for shards of equal size and sum
is what one memory would draw.

`RemoteShard` asks, `ShardServer` answers; `LocalShard` is a memory on the learner's own rank, to which nothing travels.

(Horgan et al., "Distributed prioritized experience replay", ICLR 2018)
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox
from hpcdl.comm.requests import Request
from hpcdl.parameter_server.store_messages import new_header, numbers
from hpcdl.random import Random
from hpcdl.rl.chunk import bounded, padded
from hpcdl.rl.replay import Replay, Sample
from hpcdl.rl.tally import ByKind, RankCounts
from hpcdl.rl.transition_stream import Intake

AHEAD = 2  # samples that a learner asks for in advance

ASKED = numbers("operation", "rows", "beta", "key", "beyond", "allowed", "status")


class ShardOperation(IntEnum):
    """What a learner wants: a sample (of 0 rows: to hear how far it is), new priorities, the memory kept, an end."""

    SAMPLE, PRIORITIES, KEEP, CLOSE = range(4)


class ShardTag(IntEnum):
    """Whose message it is; those of a feed are smaller."""

    ASKED, SERIALS, ERRORS, TOLD, SAMPLE = range(31, 36)


class Wanted(NamedTuple):
    """A sample of so many rows, drawn with `key` once `beyond` steps have come; so many are `allowed` to come then."""

    rows: int
    beta: float
    key: int
    beyond: float
    allowed: float


class SampleFormat:
    """How a sample of so many rows travels: one vector of bytes, each array from a multiple of 8 bytes on."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        row, many = np.dtype(np.int64), (tuple(shape), np.dtype(dtype))
        plain: tuple[int, ...] = ()
        self.kinds = {
            "index": (plain, row),
            "serial": (plain, row),
            "observations": many,
            "actions": (plain, row),
            "returns": (plain, np.dtype(np.float32)),
            "discounts": (plain, np.dtype(np.float32)),
            "next_observations": many,
            "weights": (plain, np.dtype(np.float32)),
        }

    def arrays(self, message: np.ndarray, rows: int) -> Sample:
        """The sample in a vector of bytes, as views of it."""
        at, found = 0, {}
        for name, (shape, dtype) in self.kinds.items():
            length = rows * int(np.prod(shape)) * dtype.itemsize
            found[name] = message[at : at + length].view(dtype).reshape(rows, *shape)
            at += padded(length)
        return Sample(**found)

    def empty(self, rows: int) -> np.ndarray:
        """A vector of bytes as long as a sample of so many rows."""
        lengths = [rows * int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.kinds.values()]
        return np.zeros(sum(map(padded, lengths)), np.uint8)

    def packed(self, sample: Sample) -> np.ndarray:
        """The sample in such a vector."""
        message = self.empty(len(sample.actions))
        for into, array in zip(self.arrays(message, len(sample.actions)), sample, strict=True):
            into[...] = array
        return message


class RemoteShard:
    """What a learner knows of a memory on another rank. heard(tally message): is given what it tells."""

    def __init__(
        self,
        comm: Communicator,
        rank: int,
        form: SampleFormat,
        by_kind: ByKind,
        heard: Callable[[int, np.ndarray], None],
    ):
        self.comm, self.rank, self.form, self.by_kind, self.heard = comm, rank, form, by_kind, heard
        self.coming: deque[tuple[Wanted, np.ndarray, np.ndarray, list[Request]]] = deque()
        self.sending: list[Request] = []

    def ask(self, wanted: Wanted) -> None:
        """For a sample, which `take` gives when it has come."""
        told, message = np.empty(1 + RankCounts.length), self.form.empty(wanted.rows)
        requests = [
            self.comm.iwait(told, self.rank, ShardTag.TOLD),
            self.comm.iwait(message, self.rank, ShardTag.SAMPLE),
        ]
        self.coming.append((wanted, told, message, requests))
        self._say(ShardOperation.SAMPLE, **wanted._asdict())

    @property
    def ready(self) -> bool:
        """Whether the sample that was asked for first has come."""
        return all(request.done for request in self.coming[0][3])

    def take(self) -> Sample | None:
        """That sample, which has come; None: it was asked for to hear how far the memory is."""
        wanted, told, message, _ = self.coming.popleft()
        self.heard(self.rank, told[1:])
        return self.form.arrays(message, wanted.rows) if wanted.rows else None

    def update(self, sample: Sample, errors: np.ndarray) -> None:
        """The |TD errors| of its rows become priorities."""
        self._say(ShardOperation.PRIORITIES, rows=len(errors))
        pairs = (sample.serial, ShardTag.SERIALS), (bounded(errors), ShardTag.ERRORS)
        with self.by_kind("priorities"):
            self.sending += [self.comm.ipush(np.ascontiguousarray(each), self.rank, tag) for each, tag in pairs]

    def keep(self) -> None:
        """Let it be written beside the checkpoint."""
        self._say(ShardOperation.KEEP)

    def close(self, status: int) -> None:
        """No more is asked; returns when what was has been answered."""
        self._say(ShardOperation.CLOSE, status=status)
        self.comm.wait_until(lambda: all(each.done for *_, requests in self.coming for each in requests), patient=True)
        self.comm.wait_until(lambda: all(each.done for each in self.sending))
        if self.coming:
            self.heard(self.rank, self.coming[-1][1][1:])

    def _say(self, operation: ShardOperation, **more: float) -> None:
        header = new_header(ASKED, operation=operation, **more).reshape(1).view("f8")
        self.sending = [each for each in self.sending if not each.done]
        with self.by_kind("control"):
            self.sending.append(self.comm.ipush(header, self.rank, ShardTag.ASKED))


class LocalShard:
    """A memory on the learner's own rank; what is asked for is drawn when it is taken. save(): writes it."""

    def __init__(self, intake: Intake, prioritized: bool, random: Random, save: Callable[[], None]):
        self.intake, self.prioritized, self.random, self.save = intake, prioritized, random, save
        self.wanted: deque[Wanted] = deque()

    def ask(self, wanted: Wanted) -> None:
        self.wanted.append(wanted)
        self.intake.allow(wanted.allowed)

    @property
    def ready(self) -> bool:
        self.intake.attend()
        return enough(self.wanted[0], self.intake)

    def take(self) -> Sample | None:
        return drawn(self.wanted.popleft(), self.intake.replay, self.random)

    def update(self, sample: Sample, errors: np.ndarray) -> None:
        if self.prioritized:
            self.intake.replay.update(sample.index, sample.serial, bounded(errors))

    def keep(self) -> None:
        self.save()

    def close(self, status: int) -> None:
        self.intake.close(status)


def enough(wanted: Wanted, intake: Intake) -> bool:
    """Whether so many steps have come, and there is something to draw."""
    return intake.steps >= wanted.beyond and (wanted.rows == 0 or intake.replay.size > 0)


def drawn(wanted: Wanted, replay: Replay, random: Random) -> Sample | None:
    """The sample that is wanted; None for one of no rows."""
    return replay.sample(wanted.rows, wanted.beta, random("sample", wanted.key)) if wanted.rows else None


class ShardServer:
    """The other side: serves the shard that `intake` fills to the ranks `learners`, until all have closed.

    save(): writes the memory. status: the largest with which a learner has closed.
    """

    def __init__(
        self, comm: Communicator, intake: Intake, learners: list[int], random: Random, save: Callable[[], None]
    ):
        self.comm, self.intake, self.random, self.save = comm, intake, random, save
        self.replay, self.by_kind, self.first = intake.replay, intake.by_kind, learners[0]
        self.form = SampleFormat(self.replay.shape, self.replay.dtype)
        self.inbox = Inbox(comm, ShardTag.ASKED, learners, len(ASKED), "f8")  # type: ignore[arg-type]
        self.waiting: dict[int, deque[Wanted]] = {learner: deque() for learner in learners}
        self.open, self.status = set(learners), 0
        self.sending: list[Request] = []

    def serve(self) -> None:
        """Until all learners have closed, and all actors have ended."""
        self.comm.wait_until(lambda: not self.open, self.attend, patient=True)
        self.intake.close(self.status)
        self.comm.wait_until(lambda: all(each.done for each in self.sending))

    def attend(self) -> bool:
        """Take in what has come, and answer what can be; whether there was anything to do."""
        busy = self.intake.attend()
        while come := self.inbox.arrived():
            for learner in come:
                self._note(learner, self.inbox.take(learner).view(ASKED)[0])
            busy = True
        for learner, waiting in self.waiting.items():
            while waiting and enough(waiting[0], self.intake):
                self._answer(learner, waiting.popleft())
                busy = True
        return busy

    def _note(self, learner: int, asked: np.ndarray) -> None:
        operation = asked["operation"]
        if operation == ShardOperation.CLOSE:
            self.open.discard(learner)
            self.status = max(self.status, int(asked["status"]))
            while self.waiting[learner]:
                self._answer(learner, self.waiting[learner].popleft()._replace(rows=0))
            return
        if operation == ShardOperation.SAMPLE:
            rows, key = int(asked["rows"]), int(asked["key"])
            beta, beyond, allowed = (float(asked[name]) for name in ("beta", "beyond", "allowed"))
            self.waiting[learner].append(Wanted(rows, beta, key, beyond, allowed))
            self.intake.allow(float(asked["allowed"]))
        elif operation == ShardOperation.PRIORITIES:
            serials, errors = np.empty(int(asked["rows"]), np.int64), np.empty(int(asked["rows"]), np.float32)
            for array, tag in ((serials, ShardTag.SERIALS), (errors, ShardTag.ERRORS)):
                self.comm.iwait(array, learner, tag).wait(doze=True)
            self.replay.update(serials % self.replay.capacity, serials, errors)
        else:
            self.save()
        self.inbox.listen(learner)

    def _answer(self, learner: int, wanted: Wanted) -> None:
        tally = self.intake.tally
        if learner == self.first:
            told = np.concatenate([[self.intake.steps], tally.packed()])
        else:  # returns are told once
            told = np.concatenate([[self.intake.steps], np.zeros(RankCounts.length)])
        sample = drawn(wanted, self.replay, self.random)
        message = np.empty(0, np.uint8) if sample is None else self.form.packed(sample)
        self.sending = [each for each in self.sending if not each.done]
        with self.by_kind("samples" if wanted.rows else "control"):
            self.sending.append(self.comm.ipush(told, learner, ShardTag.TOLD))
            self.sending.append(self.comm.ipush(message, learner, ShardTag.SAMPLE))
