"""Chunks of actors make of a remote memory what their steps would have made of it where they were taken."""

import numpy as np
import pytest
from plain_replay import Walk, assert_same

from hpcdl.rl.chunk import Chunk, ChunkRecorder
from hpcdl.rl.replay import Replay


@pytest.mark.parametrize(
    ("frame", "dtype", "stack", "steps", "ending"),
    [((3,), "f4", 1, 1, 0.1), ((3,), "f4", 1, 7, 1.0), ((1, 5, 3), "u1", 4, 7, 0.1), ((1, 5, 3), "u1", 4, 1, 0.0)],
)
def test_remote_is_local(frame, dtype, stack, steps, ending):
    """Two actors of three and one stream; the memory overwrites what they have sent."""
    shape, actors = (frame[0] * stack, *frame[1:]), [3, 1]
    about = {"stack": stack, "n_step": 3, "gamma": 0.9}
    remote, local = (Replay(120, shape, dtype, streams=4, prioritized=True, **about) for _ in range(2))
    walks = [Walk(np.random.default_rng(n), n, frame, stack, dtype, ending) for n in actors]
    recorders = [ChunkRecorder(steps, shape, dtype, streams=n, **about) for n in actors]
    random = np.random.default_rng(0)
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
            assert_same(remote, local.state())
    assert_same(remote, local.state())
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


def test_priorities_that_are_not_as_many():
    replay = Replay(50, (3,), "f4", n_step=1)
    with pytest.raises(ValueError, match="2 priorities for 1 transition"):
        frames, three = np.zeros((2, 3), "f4"), np.zeros(2)
        replay.add_frames((frames, frames[:0], three, three, three), 0, 1, np.ones(2))
    with pytest.raises(ValueError, match="one number for each completed transition"):
        ChunkRecorder(5, (3,), "f4").take(np.ones(1))
