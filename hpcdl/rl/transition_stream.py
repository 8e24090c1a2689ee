"""Stream of steps from actors to a replay memory, in chunks, with credit-based flow control.

    actor    feeder                                             memory   intake
        wait for a credit             <-----  credit, or "over"  ---     for each chunk added, if it may grow
        header, chunk                 ------------------------------>    replay <- chunk

An actor has CREDITS credits at first, so that one chunk travels while the next is made. Each chunk added to the memory
gives a new credit, but not while the memory has all the steps that it is allowed (`allow`): so messages in flight are
bounded, whichever side is slow, and the waiting side is known.
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
from hpcdl.rl.tally import BytesByKind, RankCounts

CREDITS = 2
HEADER = 3  # numbers before those of the tally: bytes of the chunk, its rows, 1 if the actor has ended
LEAVE, OVER, FAILED = 0, 1, 2  # credit; end of the run; end with an error


class StreamTag(IntEnum):
    """Tags of these messages; parameter stores use smaller ones."""

    HEADER, CHUNK, LEAVE = 21, 22, 23


class ChunkSender:
    """The actor's side. to: rank of the memory. over: True at the end of the run; failed: True if it cannot go on."""

    def __init__(self, comm: Communicator, to: int, tally: RankCounts, by_kind: BytesByKind):
        self.comm, self.to, self.tally, self.by_kind = comm, to, tally, by_kind
        self.credits, self.over, self.failed = CREDITS, False, False
        self.credit_message = np.empty(2, np.int64)
        self.coming = comm.iwait(self.credit_message, to, StreamTag.LEAVE)
        self.sending: list[Request] = []

    def may_act(self) -> bool:
        """True if the actor may send, or has to end."""
        while not self.over and self.coming.done:
            self.credits += int(self.credit_message[0])
            self.over, self.failed = self.credit_message[1] != LEAVE, self.credit_message[1] == FAILED
            if not self.over:
                self.coming = self.comm.iwait(self.credit_message, self.to, StreamTag.LEAVE)
        return self.over or self.credits > 0

    def send(self, chunk: Chunk, meanwhile: Callable[[], bool] | None = None) -> None:
        """Send a chunk as soon as there is a credit; drop it if the run is over. meanwhile: called while waiting."""
        self.comm.wait_until(self.may_act, meanwhile, patient=True)
        if self.over:
            return
        self.credits -= 1
        self._send(chunk.packed(), len(chunk.flags))

    def close(self) -> None:
        """Send the last message: this actor sends no more."""
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


class ChunkReceiver:
    """The memory's side. actors: ranks, each with `envs` environment copies, which are streams of the replay memory.

    steps: number received. allowed: no credits are given at so many steps; infinite at first.
    """

    def __init__(
        self,
        comm: Communicator,
        actors: Sequence[int],
        envs: int,
        replay: Replay,
        tally: RankCounts,
        by_kind: BytesByKind,
    ):
        self.comm, self.replay, self.tally, self.by_kind = comm, replay, tally, by_kind
        self.first = {actor: i * envs for i, actor in enumerate(actors)}
        self.inbox = Inbox(comm, StreamTag.HEADER, actors, HEADER + RankCounts.length, "f8")
        self.owed = dict.fromkeys(actors, 0)
        self.left = set(actors)
        self.steps, self.allowed, self.closed = 0, float("inf"), False

    def attend(self, *_: Any) -> bool:
        """Receive what has arrived, and give credits that are due; True if anything had arrived."""
        busy = False
        while senders := self.inbox.arrived():
            for actor in senders:
                self._take(actor)
            busy = True
        self._give()
        return busy

    def look(self) -> None:
        """Do the same from outside a wait."""
        self.inbox.look()
        self.attend()

    def allow(self, steps: float) -> None:
        """Allow so many steps in all from now on."""
        self.allowed = steps
        self._give()

    def _take(self, actor: int) -> None:
        bytes, rows, last, *counts = self.inbox.take(actor)
        self.tally.take(actor, np.array(counts))
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
        """End the stream with this status: tell the actors, and wait for the last message of each."""
        self.closed = True
        for actor in self.left:
            self._say(actor, 0, FAILED if status else OVER)
        self.comm.wait_until(lambda: not self.left, self.attend, patient=True)
