"""Steps on their way from actors to a replay memory, a chunk at a time, and never more than the memory asks for.

    actor    feeder                                             memory   intake
        wait for leave                <-----  leave, or "over"  -----    when it may grow: once it has taken a chunk in
        header, chunk                 ------------------------------>    replay <- chunk

An actor has leave for CREDITS chunks at first, so that one travels while the next is made. Each chunk that is taken in
gives leave for another one, but not while the memory has all the steps that it is allowed (`allow`): so what is in
flight is bounded, whichever side is slow, and whoever waits is seen to wait.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox
from hpcdl.comm.requests import Request
from hpcdl.rl.chunk import Chunk
from hpcdl.rl.replay import Replay
from hpcdl.rl.tally import ByKind, RankCounts

CREDITS = 2
HEADER = 3  # numbers before those of the tally: bytes of the chunk, its rows, whether the actor has ended
LEAVE, OVER, FAILED = 0, 1, 2  # FAILED: over, for the run cannot go on


class StreamTag(IntEnum):
    """Whose message it is; those of a parameter store are smaller."""

    HEADER, CHUNK, LEAVE = 21, 22, 23


class Feeder:
    """The actor's side. to: the rank that remembers. over, failed: whether all is over, and as the run cannot go on."""

    def __init__(self, comm: Communicator, to: int, tally: RankCounts, by_kind: ByKind):
        self.comm, self.to, self.tally, self.by_kind = comm, to, tally, by_kind
        self.credits, self.over, self.failed = CREDITS, False, False
        self.said = np.empty(2, np.int64)
        self.coming = comm.iwait(self.said, to, StreamTag.LEAVE)
        self.sending: list[Request] = []

    def heard(self) -> bool:
        """Whether there is something to do for the actor: it may send, or is to end."""
        while not self.over and self.coming.done:
            self.credits += int(self.said[0])
            self.over, self.failed = self.said[1] != LEAVE, self.said[1] == FAILED
            if not self.over:
                self.coming = self.comm.iwait(self.said, self.to, StreamTag.LEAVE)
        return self.over or self.credits > 0

    def send(self, chunk: Chunk, meanwhile: Callable[[], bool] | None = None) -> None:
        """Send a chunk as soon as there is leave to; nothing where all is over. meanwhile: what is done in waiting."""
        self.comm.wait_until(self.heard, meanwhile, patient=True)
        if self.over:
            return
        self.credits -= 1
        self._send(chunk.packed(), len(chunk.flags))

    def close(self) -> None:
        """The last message: this actor sends no more."""
        self._send(None, 0)
        self.comm.wait_until(lambda: all(request.done for request in self.sending))

    def _send(self, message: np.ndarray | None, rows: int) -> None:
        nothing = message is None
        header = np.array([0 if message is None else message.nbytes, rows, nothing, *self.tally.packed()], np.float64)
        self.sending = [request for request in self.sending if not request.done]
        with self.by_kind("control" if nothing else "transitions"):
            self.sending.append(self.comm.ipush(header, self.to, StreamTag.HEADER))
            if message is not None:
                self.sending.append(self.comm.ipush(message, self.to, StreamTag.CHUNK))


class Intake:
    """The memory's side. actors: their ranks, whose copies of the environment, `envs` each, are streams of the replay.

    steps: that have come. allowed: beyond so many no leave is given; infinite at first.
    """

    def __init__(
        self, comm: Communicator, actors: Sequence[int], envs: int, replay: Replay, tally: RankCounts, by_kind: ByKind
    ):
        self.comm, self.replay, self.tally, self.by_kind = comm, replay, tally, by_kind
        self.first = {actor: i * envs for i, actor in enumerate(actors)}
        self.inbox = Inbox(comm, StreamTag.HEADER, actors, HEADER + RankCounts.length, "f8")
        self.owed = dict.fromkeys(actors, 0)
        self.left = set(actors)
        self.steps, self.allowed, self.closed = 0, float("inf"), False

    def attend(self, *_: Any) -> bool:
        """Take in what has come, and give leave where that is due; whether anything had come."""
        busy = False
        while come := self.inbox.arrived():
            for actor in come:
                self._take(actor)
            busy = True
        self._give()
        return busy

    def look(self) -> None:
        """Likewise, where nobody waits."""
        self.inbox.look()
        self.attend()

    def allow(self, steps: float) -> None:
        """From now on so many steps may come in all."""
        self.allowed = steps
        self._give()

    def _take(self, actor: int) -> None:
        bytes, rows, last, *told = self.inbox.take(actor)
        self.tally.take(actor, np.array(told))
        if last:
            self.left.discard(actor)
            return
        message = np.empty(int(bytes), np.uint8)
        self.comm.iwait(message, actor, StreamTag.CHUNK).wait(doze=True)
        if not self.closed:
            Chunk.unpacked(message, self.replay.frame, self.replay.dtype).add_to(self.replay, self.first[actor])
            self.steps += int(rows)
            self.owed[actor] += 1
        self.inbox.listen(actor)

    def _give(self) -> None:
        if self.closed or self.steps >= self.allowed:
            return
        for actor, owed in self.owed.items():
            if owed:
                self._say(actor, owed, LEAVE)
                self.owed[actor] = 0

    def _say(self, actor: int, credits: int, what: int) -> None:
        with self.by_kind("control"):
            self.comm.ipush(np.array([credits, what]), actor, StreamTag.LEAVE)

    def close(self, status: int = 0) -> None:
        """All is over, with this status: tell the actors, and wait until each has sent its last."""
        self.closed = True
        for actor in self.left:
            self._say(actor, 0, FAILED if status else OVER)
        self.comm.wait_until(lambda: not self.left, self.attend, patient=True)
