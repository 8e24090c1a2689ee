"""Replay memories on ranks of their own, each with a shard of all transitions; learners prefetch samples.

    learner                                                   memory, for its shard
        request: rows, for which step      ------------>        when so many environment steps have arrived:
        learn from the sample before                            draw
        take: a sample                     <------------        sample
        |TD errors|                        ------------>        its priorities

A learner requests AHEAD samples in advance, so drawing and sending overlap with computing; a draw lacks the priorities
from the AHEAD samples before it. All shards are drawn from equally often, each by its priorities. For shards of equal
size and equal sum of priorities this is the distribution of a single memory. (Horgan et al., ICLR 2018: apex.py)"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from hpcdl.comm import Communicator
from hpcdl.comm.framing import Frame, Inbox
from hpcdl.comm.requests import Request
from hpcdl.random import Random
from hpcdl.rl.chunk import Kinds, empty_message, packed, sendable_errors, unpacked
from hpcdl.rl.replay import Replay, Sample
from hpcdl.rl.tally import RankCounts
from hpcdl.rl.transition_stream import ChunkReceiver

AHEAD = 2  # samples requested in advance

# Transition streams use smaller tags. Payloads of a request: serials and |TD errors|; of a report: the sample.
REQUEST = Frame(31, ("operation", "rows", "beta", "key", "beyond", "allowed", "status"))
REPORT = Frame(34, ["steps", ("tally", RankCounts.length)])
# Operations of a request: a sample (0 rows: only a report), new priorities, saving the memory, the end.
SAMPLE, PRIORITIES, KEEP, CLOSE = range(4)


class SampleRequest(NamedTuple):
    """A request for `rows` rows, drawn with random key `key` after `beyond` steps. allowed: steps that may come in."""

    rows: int
    beta: float
    key: int
    beyond: float
    allowed: float


def sample_kinds(rows: int, shape: tuple[int, ...], dtype: DTypeLike) -> Kinds:
    """Return shape and type of each array of a sample of `rows` rows, by name, in the vector's order (chunk.py)."""
    scalars = {"index": "i8", "serial": "i8", "actions": "i8", "returns": "f4", "discounts": "f4", "weights": "f4"}
    return {each: ((rows,), scalars[each]) if each in scalars else ((rows, *shape), dtype) for each in Sample._fields}


class RemoteShard:
    """Another rank's memory, for a learner. kinds: `sample_kinds` of rows. told: True to tally the memory's reports."""

    def __init__(self, comm: Communicator, rank: int, kinds: Callable[[int], Kinds], tally: RankCounts, told: bool):
        self.comm, self.rank, self.kinds, self.told = comm, rank, kinds, told
        self.tally, self.by_kind = tally, tally.by_kind
        self.expected: deque[tuple[SampleRequest, np.ndarray, np.ndarray, list[Request]]] = deque()
        self.sending: list[Request] = []

    def ask(self, request: SampleRequest) -> None:
        """Request a sample, which `take` returns once it has arrived."""
        report, message = REPORT.header(), empty_message(self.kinds(request.rows))
        self.expected.append((request, report, message, REPORT.expect(self.comm, self.rank, report, message)))
        self._say(SAMPLE, **request._asdict())

    @property
    def ready(self) -> bool:
        """True if the oldest requested sample has arrived."""
        return all(request.done for request in self.expected[0][3])

    def take(self) -> Sample | None:
        """Return the oldest requested sample; None if that request was for a report only."""
        request, report, message, _ = self.expected.popleft()
        self._report(report)
        return Sample(**unpacked(message, self.kinds(request.rows))) if request.rows else None

    def update(self, sample: Sample, errors: np.ndarray) -> None:
        """Send |TD errors| as the new priorities of the sample's rows."""
        self._say(PRIORITIES, rows=len(errors))
        payloads = np.ascontiguousarray(sample.serial), sendable_errors(errors)
        with self.by_kind("priorities"):
            self.sending += REQUEST.send_payloads(self.comm, self.rank, *payloads)

    def keep(self) -> None:
        self._say(KEEP)

    def close(self, status: int) -> None:
        """Send the end of the run, with `status`, and wait until the memory has answered all requests."""
        self._say(CLOSE, status=status)
        self.comm.wait_until(lambda: all(each.done for *_, parts in self.expected for each in parts), patient=True)
        self.comm.wait_until(lambda: all(each.done for each in self.sending))
        if self.expected:
            self._report(self.expected[-1][1])

    def _report(self, report: np.ndarray) -> None:
        if self.told:
            self.tally.take(self.rank, report["tally"])

    def _say(self, operation: int, **more: float) -> None:
        self.sending = [each for each in self.sending if not each.done]
        with self.by_kind("control"):
            self.sending += REQUEST.send(self.comm, self.rank, REQUEST.header(operation=operation, **more))


class LocalShard:
    """A memory on the learner's own rank; samples are drawn when they are taken. keep(): writes the memory."""

    def __init__(self, intake: ChunkReceiver, prioritized: bool, random: Random, keep: Callable[[], None]):
        self.intake, self.prioritized, self.random, self.keep = intake, prioritized, random, keep
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

    def close(self, status: int) -> None:
        self.intake.close(status)


def is_ready(request: SampleRequest, intake: ChunkReceiver) -> bool:
    """True if the requested number of steps has arrived and, if rows are requested, the memory is not empty."""
    return intake.steps >= request.beyond and (request.rows == 0 or intake.replay.size > 0)


def draw_sample(request: SampleRequest, replay: Replay, random: Random) -> Sample | None:
    """Return the requested sample; None if no rows are requested."""
    return replay.sample(request.rows, request.beta, random("sample", request.key)) if request.rows else None


class ShardServer:
    """Serves the ranks `learners` from the shard that `intake` fills, until all learners have closed.
    save(): writes the memory. status: the largest status that a learner has closed with."""

    def __init__(self, comm: Communicator, intake: ChunkReceiver, learners: list[int], random: Random, save: Callable):
        self.comm, self.intake, self.random, self.save = comm, intake, random, save
        self.replay, self.by_kind, self.first = intake.replay, intake.by_kind, learners[0]
        self.kinds = partial(sample_kinds, shape=self.replay.shape, dtype=self.replay.dtype)
        self.inbox = Inbox(comm, REQUEST, learners)
        self.waiting: dict[int, deque[SampleRequest]] = {learner: deque() for learner in learners}
        self.open, self.status = set(learners), 0
        self.sending: list[Request] = []

    def serve(self) -> None:
        """Serve until all learners have closed and all actors have ended."""
        self.comm.wait_until(lambda: not self.open, self.attend, patient=True)
        self.intake.close(self.status)
        self.comm.wait_until(lambda: all(each.done for each in self.sending))

    def attend(self) -> bool:
        """Receive messages and send the replies that are due; return True if there was anything to do."""
        busy = self.intake.attend()
        while senders := self.inbox.arrived():
            for learner in senders:
                self._note(learner, self.inbox.take(learner))
            busy = True
        for learner, waiting in self.waiting.items():
            while waiting and is_ready(waiting[0], self.intake):
                self._answer(learner, waiting.popleft())
                busy = True
        return busy

    def _note(self, learner: int, request: np.ndarray) -> None:
        operation = request["operation"]
        if operation == CLOSE:
            self.open.discard(learner)
            self.status = max(self.status, int(request["status"]))
            while self.waiting[learner]:
                self._answer(learner, self.waiting[learner].popleft()._replace(rows=0))
            return
        if operation == SAMPLE:
            rows, key = int(request["rows"]), int(request["key"])
            beta, beyond, allowed = (float(request[name]) for name in ("beta", "beyond", "allowed"))
            self.waiting[learner].append(SampleRequest(rows, beta, key, beyond, allowed))
            self.intake.allow(float(request["allowed"]))
        elif operation == PRIORITIES:
            serials, errors = np.empty(int(request["rows"]), np.int64), np.empty(int(request["rows"]), np.float32)
            REQUEST.fill(self.comm, learner, serials, errors)
            self.replay.update(serials % self.replay.capacity, serials, errors)
        else:
            self.save()
        self.inbox.listen(learner)

    def _answer(self, learner: int, request: SampleRequest) -> None:
        report = REPORT.header(steps=self.intake.steps)
        if learner == self.first:  # returns are reported once
            report["tally"] = self.intake.tally.packed()
        sample = draw_sample(request, self.replay, self.random)
        message = np.empty(0, np.uint8)
        if sample is not None:
            message = packed(sample._asdict(), self.kinds(request.rows))
        self.sending = [each for each in self.sending if not each.done]
        with self.by_kind("samples" if request.rows else "control"):
            self.sending += REPORT.send(self.comm, learner, report, message)
