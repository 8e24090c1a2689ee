"""Chunks on their way: in order, so that the memory is what local steps would have made of it; never too many."""

import numpy as np
import pytest
from plain_replay import Walk, assert_same

from hpcdl.comm import Communicator
from hpcdl.rl.chunk import ChunkRecorder
from hpcdl.rl.replay import Replay
from hpcdl.rl.tally import BytesByKind, RankCounts
from hpcdl.rl.transition_stream import CREDITS, ChunkReceiver, ChunkSender

pytestmark = pytest.mark.mpi(min_size=2)

STREAMS, STEPS, CAPACITY = 2, 4, 150
ROWS = STREAMS * STEPS
ABOUT = {"n_step": 3, "gamma": 0.9}


class Noting(ChunkReceiver):
    """Notes whose chunks have come, in their order."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.order = []

    def _take(self, actor):
        before = self.steps
        super()._take(actor)
        assert self.steps - before in (0, ROWS)
        self.order += [actor] if self.steps > before else []


class Steps:
    """What the actor on a rank sees: a chunk, and then the next."""

    def __init__(self, rank, frame):
        self.walk = Walk(np.random.default_rng(rank), STREAMS, frame, 1, "f4")
        self.recorder = ChunkRecorder(STEPS, frame, "f4", streams=STREAMS, **ABOUT)

    def taken(self):
        """Of one chunk, step by step."""
        return [self.walk.step(0, STREAMS) for _ in range(STEPS)]

    def chunk(self):
        for step in self.taken():
            self.recorder.add(*step)
        return self.recorder.take(None)


def act(comm, frame):
    """Send until all is over; returns how many chunks, and the bytes by kind."""
    steps, tally = Steps(comm.rank, frame), RankCounts(BytesByKind(comm.traffic))
    feeder, sent = ChunkSender(comm, 0, tally), 0
    while not feeder.over:
        chunk = steps.chunk()
        tally.local[0] += ROWS
        feeder.send(chunk)
        sent += not feeder.over
        assert 0 <= feeder.credits <= CREDITS, "in flight are the credits that are missing"
    tally.local[0] -= ROWS  # what was seen last, and not sent
    feeder.close()
    assert sum(tally.by_kind.sent.values()) == comm.traffic.bytes
    assert {kind for kind, count in tally.by_kind.sent.items() if count} == {"transitions", "control"}
    return sent


def made(comm, frame):
    replay = Replay(CAPACITY, frame, "f4", streams=STREAMS * (comm.size - 1), **ABOUT)
    tally = RankCounts(BytesByKind(comm.traffic))
    return Noting(comm, range(1, comm.size), STREAMS, replay, tally)


def assert_as_local(intake, frame, ranks):
    """What is in the memory is what its steps would have made of it, added where they were taken."""
    local = Replay(CAPACITY, frame, "f4", streams=STREAMS * (ranks - 1), **ABOUT)
    sources = {rank: Steps(rank, frame) for rank in range(1, ranks)}
    for rank in intake.order:
        for step in sources[rank].taken():
            local.add(*step, first=STREAMS * (rank - 1))
    assert_same(intake.replay, local.state())


@pytest.mark.parametrize("frame", [(3,), (50, 100)], ids=["short", "long"])
def test_no_more_comes_than_is_allowed_and_all_is_as_if_it_were_here(frame, bare):
    """The memory asks for a little more each time, as a learner does."""
    comm = Communicator(bare)
    if comm.rank > 0:
        sent = act(comm, frame)
    else:
        intake, most = made(comm, frame), CREDITS * ROWS * (comm.size - 1)
        for needed in range(1, 400, 13):
            intake.allow(needed)
            comm.wait_until(lambda needed=needed: intake.steps >= needed, intake.attend)
            assert intake.steps < needed + most
        intake.allow(np.inf)
        comm.wait_until(lambda: len(set(intake.order)) == comm.size - 1, intake.attend)
        intake.close()
        assert not intake.left and not intake.inbox.pending, "each has sent its last"
        assert_as_local(intake, frame, comm.size)
        assert intake.tally.by_kind.sent["control"] == comm.traffic.bytes
        sent = 0
    # Each chunk that was sent has been taken off the wire, also by a memory that was closed.
    whole = comm.mpi.allreduce(sent)
    if comm.rank == 0:
        assert intake.tally["steps"] == whole * ROWS and intake.steps <= whole * ROWS <= intake.steps + most
    comm.barrier()
    assert not comm.mpi.Iprobe()
    comm.free()


def test_closed_before_anything_has_come(bare):
    """What is in flight is taken, and nothing of it is added."""
    comm = Communicator(bare)
    if comm.rank > 0:
        act(comm, (50, 100))
    else:
        intake = made(comm, (50, 100))
        intake.close()
        assert intake.steps == 0 and intake.replay.written == 0 and not intake.order
    comm.barrier()
    assert not comm.mpi.Iprobe()
    comm.free()
