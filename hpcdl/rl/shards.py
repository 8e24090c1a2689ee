"""Replay memories on ranks of their own, each with a shard of all transitions; learners prefetch samples.

    learner                                                   memory, for its shard
        request: rows, for which step      ------------>        when so many environment steps have arrived:
        learn from the sample before                            draw
        take: a sample                     <------------        sample
        |TD errors|                        ------------>        its priorities

A learner requests AHEAD samples in advance, so that drawing and sending overlap with computing; priorities are that
much older. Each shard is drawn from by its own priorities and equally often: for shards of equal size and sum this is
the distribution of a single memory.

`RemoteShard` requests, `ShardServer` replies; `LocalShard` is a memory on the learner's own rank, without messages.

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
from hpcdl.rl.chunk import padded, sendable_errors
from hpcdl.rl.replay import Replay, Sample
from hpcdl.rl.tally import BytesByKind, RankCounts
from hpcdl.rl.transition_stream import ChunkReceiver

AHEAD = 2  # samples requested in advance

REQUEST = numbers("operation", "rows", "beta", "key", "beyond", "allowed", "status")


class ShardOperation(IntEnum):
    """A learner's request: a sample (0 rows: only a report), new priorities, saving the memory, the end."""

    SAMPLE, PRIORITIES, KEEP, CLOSE = range(4)


class ShardTag(IntEnum):
    """Tags of these messages; transition streams use smaller ones."""

    REQUEST, SERIALS, ERRORS, REPORT, SAMPLE = range(31, 36)


class SampleRequest(NamedTuple):
    """Request of `rows` rows, drawn with `key` once `beyond` steps have arrived; `allowed` steps may arrive from then
    on."""

    rows: int
    beta: float
    key: int
    beyond: float
    allowed: float


class SampleFormat:
    """Format of a sample as one vector of bytes, each array aligned to 8 bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        row, frames = np.dtype(np.int64), (tuple(shape), np.dtype(dtype))
        scalar: tuple[int, ...] = ()
        self.kinds = {
            "index": (scalar, row),
            "serial": (scalar, row),
            "observations": frames,
            "actions": (scalar, row),
            "returns": (scalar, np.dtype(np.float32)),
            "discounts": (scalar, np.dtype(np.float32)),
            "next_observations": frames,
            "weights": (scalar, np.dtype(np.float32)),
        }

    def arrays(self, message: np.ndarray, rows: int) -> Sample:
        """Return the sample in a vector of bytes, as views."""
        offset, views = 0, {}
        for name, (shape, dtype) in self.kinds.items():
            length = rows * int(np.prod(shape)) * dtype.itemsize
            views[name] = message[offset : offset + length].view(dtype).reshape(rows, *shape)
            offset += padded(length)
        return Sample(**views)

    def empty(self, rows: int) -> np.ndarray:
        """Return a vector of bytes for a sample of `rows` rows."""
        lengths = [rows * int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.kinds.values()]
        return np.zeros(sum(map(padded, lengths)), np.uint8)

    def packed(self, sample: Sample) -> np.ndarray:
        """Return the sample as a vector of bytes."""
        message = self.empty(len(sample.actions))
        for into, array in zip(self.arrays(message, len(sample.actions)), sample, strict=True):
            into[...] = array
        return message


class RemoteShard:
    """A learner's view of a memory on another rank. on_report(rank, message): called with its reports."""

    def __init__(
        self,
        comm: Communicator,
        rank: int,
        form: SampleFormat,
        by_kind: BytesByKind,
        on_report: Callable[[int, np.ndarray], None],
    ):
        self.comm, self.rank, self.form, self.by_kind, self.on_report = comm, rank, form, by_kind, on_report
        self.expected: deque[tuple[SampleRequest, np.ndarray, np.ndarray, list[Request]]] = deque()
        self.sending: list[Request] = []

    def ask(self, request: SampleRequest) -> None:
        """Request a sample, which `take` returns once it has arrived."""
        report, message = np.empty(1 + RankCounts.length), self.form.empty(request.rows)
        requests = [
            self.comm.iwait(report, self.rank, ShardTag.REPORT),
            self.comm.iwait(message, self.rank, ShardTag.SAMPLE),
        ]
        self.expected.append((request, report, message, requests))
        self._say(ShardOperation.SAMPLE, **request._asdict())

    @property
    def ready(self) -> bool:
        """True if the oldest requested sample has arrived."""
        return all(request.done for request in self.expected[0][3])

    def take(self) -> Sample | None:
        """Return that sample; None if the request was for a report only."""
        request, report, message, _ = self.expected.popleft()
        self.on_report(self.rank, report[1:])
        return self.form.arrays(message, request.rows) if request.rows else None

    def update(self, sample: Sample, errors: np.ndarray) -> None:
        """Send the |TD errors| of its rows as new priorities."""
        self._say(ShardOperation.PRIORITIES, rows=len(errors))
        pairs = (sample.serial, ShardTag.SERIALS), (sendable_errors(errors), ShardTag.ERRORS)
        with self.by_kind("priorities"):
            self.sending += [self.comm.ipush(np.ascontiguousarray(each), self.rank, tag) for each, tag in pairs]

    def keep(self) -> None:
        """Request that the memory is written beside the checkpoint."""
        self._say(ShardOperation.KEEP)

    def close(self, status: int) -> None:
        """Send the end; return when all requests have been answered."""
        self._say(ShardOperation.CLOSE, status=status)
        self.comm.wait_until(
            lambda: all(each.done for *_, requests in self.expected for each in requests), patient=True
        )
        self.comm.wait_until(lambda: all(each.done for each in self.sending))
        if self.expected:
            self.on_report(self.rank, self.expected[-1][1][1:])

    def _say(self, operation: ShardOperation, **more: float) -> None:
        header = new_header(REQUEST, operation=operation, **more).reshape(1).view("f8")
        self.sending = [each for each in self.sending if not each.done]
        with self.by_kind("control"):
            self.sending.append(self.comm.ipush(header, self.rank, ShardTag.REQUEST))


class LocalShard:
    """A memory on the learner's own rank; samples are drawn when they are taken. save(): writes it."""

    def __init__(self, intake: ChunkReceiver, prioritized: bool, random: Random, save: Callable[[], None]):
        self.intake, self.prioritized, self.random, self.save = intake, prioritized, random, save
        self.requests: deque[SampleRequest] = deque()

    def ask(self, request: SampleRequest) -> None:
        self.requests.append(request)
        self.intake.allow(request.allowed)

    @property
    def ready(self) -> bool:
        self.intake.attend()
        return is_ready(self.requests[0], self.intake)

    def take(self) -> Sample | None:
        return draw_sample(self.requests.popleft(), self.intake.replay, self.random)

    def update(self, sample: Sample, errors: np.ndarray) -> None:
        if self.prioritized:
            self.intake.replay.update(sample.index, sample.serial, sendable_errors(errors))

    def keep(self) -> None:
        self.save()

    def close(self, status: int) -> None:
        self.intake.close(status)


def is_ready(request: SampleRequest, intake: ChunkReceiver) -> bool:
    """True if the requested number of steps has arrived and the memory is not empty."""
    return intake.steps >= request.beyond and (request.rows == 0 or intake.replay.size > 0)


def draw_sample(request: SampleRequest, replay: Replay, random: Random) -> Sample | None:
    """Return the requested sample; None for one of no rows."""
    return replay.sample(request.rows, request.beta, random("sample", request.key)) if request.rows else None


class ShardServer:
    """Serves the shard that `intake` fills to the ranks `learners`, until all have closed.

    save(): writes the memory. status: the largest with which a learner has closed.
    """

    def __init__(
        self, comm: Communicator, intake: ChunkReceiver, learners: list[int], random: Random, save: Callable[[], None]
    ):
        self.comm, self.intake, self.random, self.save = comm, intake, random, save
        self.replay, self.by_kind, self.first = intake.replay, intake.by_kind, learners[0]
        self.form = SampleFormat(self.replay.shape, self.replay.dtype)
        self.inbox = Inbox(comm, ShardTag.REQUEST, learners, len(REQUEST), "f8")  # type: ignore[arg-type]
        self.waiting: dict[int, deque[SampleRequest]] = {learner: deque() for learner in learners}
        self.open, self.status = set(learners), 0
        self.sending: list[Request] = []

    def serve(self) -> None:
        """Serve until all learners have closed and all actors have ended."""
        self.comm.wait_until(lambda: not self.open, self.attend, patient=True)
        self.intake.close(self.status)
        self.comm.wait_until(lambda: all(each.done for each in self.sending))

    def attend(self) -> bool:
        """Receive messages and send the replies that are due; True if there was anything to do."""
        busy = self.intake.attend()
        while senders := self.inbox.arrived():
            for learner in senders:
                self._note(learner, self.inbox.take(learner).view(REQUEST)[0])
            busy = True
        for learner, waiting in self.waiting.items():
            while waiting and is_ready(waiting[0], self.intake):
                self._answer(learner, waiting.popleft())
                busy = True
        return busy

    def _note(self, learner: int, request: np.ndarray) -> None:
        operation = request["operation"]
        if operation == ShardOperation.CLOSE:
            self.open.discard(learner)
            self.status = max(self.status, int(request["status"]))
            while self.waiting[learner]:
                self._answer(learner, self.waiting[learner].popleft()._replace(rows=0))
            return
        if operation == ShardOperation.SAMPLE:
            rows, key = int(request["rows"]), int(request["key"])
            beta, beyond, allowed = (float(request[name]) for name in ("beta", "beyond", "allowed"))
            self.waiting[learner].append(SampleRequest(rows, beta, key, beyond, allowed))
            self.intake.allow(float(request["allowed"]))
        elif operation == ShardOperation.PRIORITIES:
            serials, errors = np.empty(int(request["rows"]), np.int64), np.empty(int(request["rows"]), np.float32)
            for array, tag in ((serials, ShardTag.SERIALS), (errors, ShardTag.ERRORS)):
                self.comm.iwait(array, learner, tag).wait(doze=True)
            self.replay.update(serials % self.replay.capacity, serials, errors)
        else:
            self.save()
        self.inbox.listen(learner)

    def _answer(self, learner: int, request: SampleRequest) -> None:
        tally = self.intake.tally
        if learner == self.first:
            report = np.concatenate([[self.intake.steps], tally.packed()])
        else:  # returns are reported once
            report = np.concatenate([[self.intake.steps], np.zeros(RankCounts.length)])
        sample = draw_sample(request, self.replay, self.random)
        message = np.empty(0, np.uint8) if sample is None else self.form.packed(sample)
        self.sending = [each for each in self.sending if not each.done]
        with self.by_kind("samples" if request.rows else "control"):
            self.sending.append(self.comm.ipush(report, learner, ShardTag.REPORT))
            self.sending.append(self.comm.ipush(message, learner, ShardTag.SAMPLE))
