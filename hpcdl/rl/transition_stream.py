"""Stream of steps from actors to a replay memory, in chunks, with credit-based flow control.

    actor    ChunkSender                                        memory   ChunkReceiver
        wait for a credit             <-----  credit, or "over"  ---     for each chunk added, if it may grow
        header, chunk                 ------------------------------>    replay <- chunk

An actor begins with CREDITS credits, so that one chunk travels while the next is made. The memory gives a credit for
each chunk added, but none while it has all the steps that it is allowed (`allow`). So messages in flight are bounded,
whichever side is slow, and the waiting side is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.framing import Frame, Inbox
from hpcdl.comm.requests import Request
from hpcdl.rl.chunk import Chunk
from hpcdl.rl.replay import Replay
from hpcdl.rl.tally import RankCounts

CREDITS = 2
LEAVE, OVER, FAILED = 0, 1, 2  # credit; end of the run; end with an error

# Parameter stores use smaller tags. ended: 1 if the actor sends no more; what: LEAVE, OVER or FAILED.
CHUNK = Frame(21, ["length", "rows", "ended", ("tally", RankCounts.length)])
CREDIT = Frame(23, ["credits", "what"], number=np.int64)


class ChunkSender:
    """The actor's side. to: rank of the memory. over: True at the run's end; failed: True if the run has failed."""

    def __init__(self, comm: Communicator, to: int, tally: RankCounts):
        self.comm, self.to, self.tally, self.by_kind = comm, to, tally, tally.by_kind
        self.credits, self.over, self.failed = CREDITS, False, False
        self.credit = CREDIT.header()
        self.coming = CREDIT.expect(comm, to, self.credit)[0]
        self.sending: list[Request] = []

    def may_act(self) -> bool:
        """True if the actor may send, or has to end."""
        while not self.over and self.coming.done:
            self.credits += int(self.credit["credits"])
            self.over, self.failed = bool(self.credit["what"] != LEAVE), bool(self.credit["what"] == FAILED)
            if not self.over:
                self.coming = CREDIT.expect(self.comm, self.to, self.credit)[0]
        return self.over or self.credits > 0

    def send(self, chunk: Chunk) -> None:
        """Send a chunk as soon as there is a credit; drop it if the run is over."""
        self.comm.wait_until(self.may_act, patient=True)
        if self.over:
            return
        self.credits -= 1
        self._send(len(chunk.flags), chunk.packed())

    def close(self) -> None:
        """Send the last message: this actor sends no more."""
        self._send(0)
        self.comm.wait_until(lambda: all(request.done for request in self.sending))

    def _send(self, rows: int, *message: np.ndarray) -> None:
        length = sum(each.nbytes for each in message)
        header = CHUNK.header(length=length, rows=rows, ended=not message, tally=self.tally.packed())
        self.sending = [request for request in self.sending if not request.done]
        with self.by_kind("transitions" if message else "control"):
            self.sending += CHUNK.send(self.comm, self.to, header, *message)


class ChunkReceiver:
    """The memory's side. actors: ranks, each with `envs` environment copies, which are streams of the replay memory.
    steps: environment steps received. allowed: from so many steps on no credits are given; infinite at first."""

    def __init__(self, comm: Communicator, actors: Sequence[int], envs: int, replay: Replay, tally: RankCounts):
        self.comm, self.replay, self.tally, self.by_kind = comm, replay, tally, tally.by_kind
        self.first = {actor: i * envs for i, actor in enumerate(actors)}
        self.inbox = Inbox(comm, CHUNK, actors)
        self.owed = dict.fromkeys(actors, 0)
        self.left = set(actors)
        self.steps, self.allowed, self.closed = 0, float("inf"), False

    def attend(self, *_: Any) -> bool:
        """Receive all messages that have arrived, give credits that are due; return True if a message had arrived."""
        busy = False
        while senders := self.inbox.arrived():
            for actor in senders:
                self._take(actor)
            busy = True
        self._give()
        return busy

    def allow(self, steps: float) -> None:
        """Give credits until `steps` steps, counted from the beginning, have been received."""
        self.allowed = steps
        self._give()

    def _take(self, actor: int) -> None:
        header = self.inbox.take(actor)
        self.tally.take(actor, header["tally"])
        if header["ended"]:
            self.left.discard(actor)
            return
        message = np.empty(int(header["length"]), np.uint8)
        CHUNK.fill(self.comm, actor, message)
        if not self.closed:
            Chunk.unpacked(message, self.replay.frame, self.replay.dtype).add_to(self.replay, self.first[actor])
            self.steps += int(header["rows"])
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
            CREDIT.send(self.comm, actor, CREDIT.header(credits=credits, what=what))

    def close(self, status: int = 0) -> None:
        """End the stream: tell the actors (status not 0: the run has failed), and wait for the last message of each."""
        self.closed = True
        for actor in self.left:
            self._say(actor, 0, FAILED if status else OVER)
        self.comm.wait_until(lambda: not self.left, self.attend, patient=True)
