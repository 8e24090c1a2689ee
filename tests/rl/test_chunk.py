"""Chunks of actors make of a remote memory what their steps would have made of it where they were taken."""

import numpy as np
import pytest
from plain_replay import Walk

from hpcdl.rl.chunk import Chunk, ChunkRecorder, bytes_at_most
from hpcdl.rl.replay import Replay


def same(one, two):
    for name, array in one.state().items():
        assert array.tobytes() == two.state()[name].tobytes(), name


@pytest.mark.parametrize("ending", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("frame", "dtype", "stack"), [((3,), "f4", 1), ((1, 5, 3), "u1", 4)])
@pytest.mark.parametrize("steps", [1, 7])
def test_remote_is_local(frame, dtype, stack, steps, ending):
    """Two actors of three and one stream; the memory overwrites what they have sent."""
    shape, actors = (frame[0] * stack, *frame[1:]), [3, 1]
    about = {"stack": stack, "n_step": 3, "gamma": 0.9}
    remote, local = (Replay(120, shape, dtype, streams=4, prioritized=True, **about) for _ in range(2))
    walks = [Walk(np.random.default_rng(n), n, frame, stack, dtype, ending) for n in actors]
    recorders = [ChunkRecorder(steps, shape, dtype, streams=n, **about) for n in actors]
    random, longest = np.random.default_rng(0), 0
    for turn in range(50 // steps):
        for first, walk, recorder in zip([0, 3], walks, recorders, strict=True):
            taken = []
            while not recorder.full:
                taken.append(walk.step(0, recorder.streams))
                recorder.add(*taken[-1])
            transitions = recorder.transitions()
            errors = random.random(len(transitions.index)).astype("f4")
            message = recorder.take(errors).packed()
            assert message.dtype == np.uint8 and message.ndim == 1
            longest = max(longest, len(message))
            width = int(np.prod(frame)) * np.dtype(dtype).itemsize
            assert len(message) <= bytes_at_most(steps, recorder.streams, 3, width)
            chunk = Chunk.unpacked(message, frame, dtype)
            assert chunk.packed().tobytes() == message.tobytes()
            serials = chunk.add_to(remote, first)
            mine = np.concatenate([local.add(*step, first=first) for step in taken])
            assert serials.tolist() == mine.tolist()
            there = mine >= 0
            local.highest = max([local.highest, *local.priorities_of(errors)])
            local.update(mine[there] % 120, mine[there], errors[there])
            # The transitions that the actor has seen are those that are there.
            if there.all() and (mine >= local.written - 120).all():
                got = remote.gather(mine % 120)
                for name in ("observations", "actions", "returns", "discounts", "next_observations"):
                    assert getattr(got, name).tobytes() == getattr(transitions, name).tobytes(), name
        if turn % 3 == 0:
            same(remote, local)
    same(remote, local)
    assert remote.written > 120 or ending == 0.0


def test_a_chunk_that_is_not_full():
    recorder, replay = ChunkRecorder(5, (3,), "f4"), Replay(50, (3,), "f4", prioritized=True)
    walk = Walk(np.random.default_rng(0), 1, (3,), 1, "f4", 0.0)
    sizes = []
    for length in (2, 0, 5, 1):
        for _ in range(length):
            recorder.add(*walk.step(0, 1))
        chunk = recorder.take(np.zeros(len(recorder.transitions().index)))
        chunk = Chunk.unpacked(chunk.packed(), (3,), np.float32)
        sizes.append((len(chunk.flags), len(chunk.priorities), len(chunk.add_to(replay))))
    assert sizes == [(2, 0, 0), (0, 0, 0), (5, 4, 4), (1, 1, 1)]


def test_an_actor_that_begins_anew():
    """Both forget what waited for its return, so that priorities still belong to their transitions."""
    recorder, replay = ChunkRecorder(4, (3,), "f4"), Replay(50, (3,), "f4", prioritized=True)
    walk = Walk(np.random.default_rng(0), 1, (3,), 1, "f4", 0.0)
    found = []
    for turn in range(3):
        for _ in range(4):
            recorder.add(*walk.step(0, 1))
        found += recorder.take(np.ones(len(recorder.transitions().index))).add_to(replay).tolist()
        if turn == 1:
            recorder.restart()
            replay.cut(0, 1)
    assert found == [0, 1, 2, 3, 4, 8]


def test_priorities_that_are_not_as_many():
    replay = Replay(50, (3,), "f4", n_step=1)
    with pytest.raises(ValueError, match="2 priorities of 1 transition"):
        frames, three = np.zeros((2, 3), "f4"), np.zeros(2)
        replay.add_frames(frames, frames[:0], three, three, three, 0, 1, np.ones(2))
    with pytest.raises(ValueError, match="as many as the transitions"):
        ChunkRecorder(5, (3,), "f4").take(np.ones(1))
