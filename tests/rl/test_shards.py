"""Shards of the replay memory: what is drawn, when, and what becomes of priorities, as in one's own memory."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from plain_replay import Walk, assert_same

from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.random import Random
from hpcdl.rl.chunk import ChunkRecorder, empty_message, packed, sendable_errors, unpacked
from hpcdl.rl.replay import Replay, Sample
from hpcdl.rl.shards import LocalShard, RemoteShard, SampleRequest, ShardServer, sample_kinds
from hpcdl.rl.tally import BytesByKind, RankCounts
from hpcdl.rl.transition_stream import CREDITS, ChunkReceiver, ChunkSender

STREAMS, STEPS, SHAPE = 2, 5, (3,)
ROWS = STREAMS * STEPS  # of a chunk
ABOUT = {"streams": STREAMS, "n_step": 3, "gamma": 0.9}
BETA, NEVER, ANY = 0.5, 1e9, float("inf")
MORE = 99  # the tag of a word from rank 0 to the actor
RANDOM = Random(7)
TOGETHER = pytest.mark.mpi(min_size=3)


def walked(chunks):
    """The steps of so many chunks, as Replay.add takes them; the same ones each time."""
    walk = Walk(np.random.default_rng(0), STREAMS, SHAPE, 1, "f4")
    return [walk.step(0, STREAMS) for _ in range(chunks * STEPS)]


def memory(capacity):
    return Replay(capacity, SHAPE, "f4", prioritized=True, **ABOUT)


def wanted(rows, key, chunks, allowed=ANY):
    return SampleRequest(rows, BETA, key, chunks * ROWS, allowed)


def come(shard):
    """The sample that was asked for first, and how many steps the memory had by then."""
    shard.comm.wait_until(lambda: shard.ready)
    steps = shard.expected[0][1]["steps"]
    return shard.take(), int(steps)


def same(one, other):
    for name, a, b in zip(Sample._fields, one, other, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name


def play(bare, learn, chunks, at_once, capacity=200):
    """The last rank acts, the one before it remembers; the others call learn(shard, told, learners), and close.
    The actor sends `chunks` chunks, those after the first `at_once` one by one, as rank 0 says so (`more`). Returns on
    each rank what the memory holds in the end, how often it was saved, and the status that it has ended with."""
    comm, acts = Communicator(bare), bare.size - 1
    by_kind, learners = BytesByKind(comm.traffic), bare.Split(int(bare.rank >= bare.size - 2), bare.rank)
    held = None
    if bare.rank == acts:
        feeder = ChunkSender(comm, acts - 1, RankCounts(by_kind))
        recorder = ChunkRecorder(STEPS, SHAPE, "f4", **ABOUT)
        for i, step in enumerate(walked(chunks)):
            recorder.add(*step)
            if recorder.full:
                if i // STEPS >= at_once:
                    comm.iwait(None, 0, MORE).wait()
                feeder.send(recorder.take(None))
        comm.wait_until(lambda: feeder.may_act() and feeder.over)
        feeder.close()
    elif bare.rank == acts - 1:
        saved, intake = [], ChunkReceiver(comm, [acts], STREAMS, memory(capacity), RankCounts(by_kind))
        server = ShardServer(comm, intake, list(range(acts - 1)), RANDOM, lambda: saved.append(intake.steps))
        server.serve()
        held = intake.replay.state(), saved, server.status
    else:
        told = []
        tally = SimpleNamespace(by_kind=by_kind, take=lambda rank, message: told.append(rank))
        shard = RemoteShard(comm, acts - 1, partial(sample_kinds, shape=SHAPE, dtype="f4"), tally, told=True)
        learn(shard, told, learners)
        assert set(told) <= {acts - 1}
    held = bare.bcast(held, acts - 1)
    for request in list(activity.in_flight):
        request.test()
    bare.Barrier()
    assert not activity.in_flight and not bare.Iprobe()
    assert sum(by_kind.sent.values()) == comm.traffic.bytes
    learners.Free()
    comm.free()
    return held


def more(shard, chunks=1):
    for _ in range(chunks):
        shard.comm.inotify(shard.rank + 1, MORE)


def own(chunks, capacity=200):
    found = memory(capacity)
    for step in walked(chunks):
        found.add(*step)
    return found


def drawn(replay, rows, key):
    return replay.sample(rows, BETA, RANDOM("sample", key))


@TOGETHER
@pytest.mark.least(3)
def test_samples_are_those_of_ones_own_memory_and_come_once_the_steps_have(bare):
    """Two are asked for at once: the second waits for the last chunk; all learners get what their keys draw."""

    def learn(shard, told, learners):
        rank, replay = learners.rank, own(4)
        shard.ask(wanted(7, 10 + rank, 4))
        shard.ask(wanted(9, 20 + rank, 5))
        found, steps = come(shard)
        assert steps == 4 * ROWS and not shard.ready
        same(found, drawn(replay, 7, 10 + rank))
        learners.Barrier()
        if rank == 0:
            more(shard)
        found, steps = come(shard)
        assert steps == 5 * ROWS
        for step in walked(5)[4 * STEPS :]:
            replay.add(*step)
        same(found, drawn(replay, 9, 20 + rank))
        local = LocalShard(ChunkReceiver(shard.comm, [], STREAMS, replay, RankCounts()), True, RANDOM, None)
        local.ask(wanted(9, 20 + rank, 0))
        assert local.ready
        same(found, local.take())
        shard.close(0)
        assert len(told) == 2

    state, saved, status = play(bare, learn, 5, 4)
    assert_same(own(5), state)
    assert saved == [] and status == 0


@TOGETHER
@pytest.mark.least(3)
def test_errors_become_priorities_of_what_is_still_there(bare):
    """One learner after the other; then the memory overwrites what was drawn, and its errors are passed over."""
    small = 60

    def learn(shard, told, learners):
        replay = own(3, small)
        for turn in range(learners.size):  # a sample that comes afterwards shows that the errors have
            if turn == learners.rank:
                shard.ask(wanted(8, turn, 3))
                found, _ = come(shard)
                errors = np.linspace(0.1, 30, 8)
                shard.update(found, errors)
                shard.ask(wanted(0, 0, 0))
                assert come(shard)[0] is None
            learners.Barrier()
            mine = drawn(replay, 8, turn)
            assert replay.update(mine.index, mine.serial, np.linspace(0.1, 30, 8).astype("f4")) == 8
        shard.ask(wanted(20, 50, 3))
        old, _ = come(shard)
        same(old, drawn(replay, 20, 50))
        learners.Barrier()
        if learners.rank == 0:
            more(shard, 9)
        for step in walked(12)[3 * STEPS :]:
            replay.add(*step)
        shard.ask(wanted(20, 60, 12))
        new, _ = come(shard)
        same(new, drawn(replay, 20, 60))
        shard.update(old, np.full(20, 1e3))
        assert replay.update(old.index, old.serial, np.full(20, 1e3)) == 0
        shard.ask(wanted(20, 70, 12))
        same(come(shard)[0], drawn(replay, 20, 70))
        if learners.rank == 0:
            shard.keep()
        shard.close(0)

    state, saved, status = play(bare, learn, 12, 3, small)
    assert saved == [12 * ROWS] and status == 0
    assert state["priorities"].max() < 20**0.6 + 30**0.6


@TOGETHER
@pytest.mark.least(3)
def test_what_is_asked_for_is_answered_at_the_end(bare):
    """With nothing in it, where it would never come; the largest of the learners' statuses is that of the memory."""

    def learn(shard, told, learners):
        for key in range(3):
            shard.ask(wanted(4, key, NEVER))
        assert not shard.ready
        shard.close(1 if learners.rank == 0 else 2)
        assert all(request.done for *_, requests in shard.expected for request in requests)
        assert [requests[1].result.size for *_, requests in shard.expected] == [0, 0, 0]
        assert len(told) == 1

    assert play(bare, learn, 2, 2)[1:] == ([], 1 if bare.size == 3 else 2)


@TOGETHER
@pytest.mark.least(3)
def test_no_more_comes_than_is_allowed(bare):
    """Beyond that only the chunks for which the actor had leave before; they come, and no others until it may."""

    def learn(shard, told, learners):
        if learners.rank == 0:
            shard.ask(wanted(0, 0, 0, allowed=1.0))
            assert come(shard) == (None, 0)
            more(shard, 6)
            shard.ask(wanted(0, 0, CREDITS, allowed=1.0))
            assert come(shard) == (None, CREDITS * ROWS)
            for _ in range(20):
                shard.ask(wanted(0, 0, 0, allowed=1.0))
                assert come(shard)[1] == CREDITS * ROWS
            shard.ask(wanted(0, 0, 4, allowed=3 * ROWS))
            assert come(shard)[1] == 4 * ROWS
            shard.ask(wanted(0, 0, 6, allowed=ANY))
            assert come(shard)[1] == 6 * ROWS
        learners.Barrier()
        shard.close(0)

    play(bare, learn, 6, 0)


def test_an_error_that_is_no_number_has_the_largest_priority(alone):
    """The memory does not fail of it: that the run cannot go on is for its learners to say."""
    replay, largest = own(2), np.finfo("f4").max
    index = replay.gather(np.flatnonzero(replay.steps["ahead"] >= 0)[:4])
    errors = sendable_errors(np.array([np.nan, np.inf, 1e300, 0.25]))
    assert errors.dtype == np.float32 and errors.tolist() == [largest, largest, largest, 0.25]
    assert replay.update(index.index, index.serial, errors) == 4 and np.isfinite(replay.tree.total)
    assert replay.sample(50, 0.5, RANDOM("sample", 1)).index.max() >= 0


@pytest.mark.parametrize(("shape", "dtype"), [((3,), "f4"), ((4, 5, 3), "u1"), ((), "f4")])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_sample_travels_as_it_is(alone, shape, dtype, rows):
    random, kinds = np.random.default_rng(0), sample_kinds(rows, shape, dtype)
    empty = Sample(**unpacked(empty_message(kinds), kinds))
    sample = Sample(*(random.integers(0, 200, each.shape).astype(each.dtype) for each in empty))
    message = packed(sample._asdict(), kinds)
    assert message.dtype == np.uint8 and message.nbytes % 8 == 0
    same(Sample(**unpacked(message.copy(), kinds)), sample)
    assert sample.observations.shape == (rows, *shape) and sample.observations.dtype == dtype
