"""The replay memory against one of lists; how it draws; its bounds; what a checkpoint of it holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_replay import PlainReplay, Walk, assert_same

from hpcdl import memory
from hpcdl.errors import TrainingError, UsageError
from hpcdl.rl.replay import Replay


def made(capacity=200, shape=(3,), dtype="f4", **more):
    return Replay(capacity, shape, dtype, **more)


def filled(steps=100, capacity=200, streams=2, seed=0, ending=0.1, **more):
    """A memory of random episodes, and what made them."""
    replay = made(capacity, streams=streams, **more)
    walk = Walk(np.random.default_rng(seed), streams, (3,), 1, "f4", ending)
    for _ in range(steps):
        replay.add(*walk.step(0, streams))
    return replay, walk


def check(replay, plain):
    """All that can be drawn is what the lists have, and no more."""
    wanted = plain.there()
    slots = np.flatnonzero(replay.steps["ahead"] >= 0)
    assert replay.size == len(slots) == len(wanted) and replay.written == plain.written
    found = replay.gather(slots)
    assert sorted(found.serial) == sorted(wanted)
    np.testing.assert_array_equal(found.serial % replay.capacity, slots)
    for row, serial in enumerate(found.serial):
        each = wanted[serial]
        np.testing.assert_array_equal(found.observations[row], each.observation)
        assert found.actions[row] == each.action
        assert found.returns[row] == pytest.approx(each.returns, rel=1e-5, abs=1e-5)
        assert found.discounts[row] == pytest.approx(each.discount, rel=1e-6)
        after = each.observation if each.after is None else each.after
        np.testing.assert_array_equal(found.next_observations[row], after)
    if replay.tree is not None:
        np.testing.assert_array_equal(np.flatnonzero(replay.tree.leaves), slots)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_is_a_memory_of_lists(data):
    """Random episodes that end and are cut, streams at different speeds, stacks, and a ring that goes round."""
    streams, stack, n = (data.draw(st.integers(1, most)) for most in (4, 4, 5))
    image = data.draw(st.booleans())
    frame, dtype = ((2, 3, 2), "u1") if image else ((3,), "f4")
    shape = (frame[0] * stack, *frame[1:])
    least = streams * (n + stack + 1)
    capacity = least + data.draw(st.integers(0, 60))
    ending = data.draw(st.sampled_from([0.02, 0.15, 0.7]))
    how = {"streams": streams, "stack": stack, "n_step": n, "gamma": 0.9, "prioritized": data.draw(st.booleans())}
    replay = Replay(capacity, shape, dtype, **how)
    plain = PlainReplay(capacity, streams, stack, n, 0.9)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    walk = Walk(random, streams, frame, stack, dtype, ending)
    for _ in range(data.draw(st.integers(1, 120))):
        first = int(random.integers(streams))
        count = int(random.integers(1, streams - first + 1))
        step = walk.step(first, count)
        before = len(plain.completed)
        for i in range(count):
            plain.add(first + i, *(each[i] for each in step))
        serials = replay.add(*step, first=first)
        assert serials.tolist() == plain.completed[before:]
    check(replay, plain)
    replay.cut()
    plain.cut()
    walk.now = [walk.begun() for _ in range(streams)]
    for _ in range(2 * n):
        step = walk.step(0, streams)
        for i in range(streams):
            plain.add(i, *(each[i] for each in step))
        replay.add(*step)
    check(replay, plain)


@pytest.mark.parametrize(("before", "stack"), [(1, 3), (5, 1), (5, 3)])
def test_a_stream_that_waits_until_its_frames_are_gone(before, stack):
    """Its steps never become transitions whose frames or rewards are another's."""
    for waits in range(33, 44):
        replay = Replay(40, (stack, 3), "f4", streams=2, stack=stack, n_step=3, prioritized=True)
        plain = PlainReplay(40, 2, stack, 3, 0.99)
        walk = Walk(np.random.default_rng(1), 2, (1, 3), stack, "f4", 0.0)
        for turn in [*[0] * before, *[1] * waits, *[0] * 5]:
            step = walk.step(turn, 1)
            plain.add(turn, *(each[0] for each in step))
            replay.add(*step, first=turn)
        assert plain.completed.count(-1) >= (waits == 43) * min(before, 3)
        check(replay, plain)


def test_what_lost_a_frame_of_its_stack_is_not_updated():
    """It is still in its slot, with its serial, but its observation is not whole any more."""
    replay = Replay(40, (3, 2), "f4", stack=3, prioritized=True)
    walk = Walk(np.random.default_rng(1), 1, (1, 2), 3, "f4", 0.0)
    for _ in range(60):
        replay.add(*walk.step(0, 1))
    slots = np.flatnonzero(replay.steps["ahead"] >= 0)
    sample = replay.gather(slots)
    for _ in range(2):
        replay.add(*walk.step(0, 1))
    assert replay.update(sample.index, sample.serial, np.ones(len(slots))) == len(slots) - 2
    np.testing.assert_array_equal(np.flatnonzero(replay.tree.leaves), np.flatnonzero(replay.steps["ahead"] >= 0))


@pytest.mark.parametrize("prioritized", [False, True])
def test_frequencies_of_draws(prioritized):
    """Chi-square at a fixed seed, with some transitions overwritten and slots that hold none."""
    replay, _ = filled(300, 64, prioritized=prioritized)
    slots = np.flatnonzero(replay.steps["ahead"] >= 0)
    assert 30 < len(slots) < 64
    chances = np.ones(len(slots))
    if prioritized:
        errors = np.random.default_rng(1).random(len(slots)) ** 2
        assert replay.update(slots, replay.gather(slots).serial, errors) == len(slots)
        chances = (errors + 1e-6) ** 0.6
    chances /= chances.sum()
    random, counts, draws = np.random.default_rng(2), np.zeros(64), 0
    weights = {}
    for _ in range(2000):
        sample = replay.sample(8, 0.4, random)
        np.add.at(counts, sample.index, 1)
        draws += 8
        weights |= zip(sample.index.tolist(), sample.weights / sample.weights.min(), strict=True)
    assert counts.sum() == counts[slots].sum() == draws
    square = ((counts[slots] - draws * chances) ** 2 / (draws * chances)).sum()
    freedom = len(slots) - 1
    # Drawn in parts of equal length, the numbers vary less than those of independent draws.
    assert square < freedom + 4 * np.sqrt(2 * freedom)
    if not prioritized:
        assert square > freedom - 4 * np.sqrt(2 * freedom) and set(weights.values()) == {1.0}


def test_weights_make_up_for_what_priorities_favour():
    """w = (N P)^-beta: with beta 1, a weighted mean of what is drawn is the plain mean of all."""
    replay, _ = filled(prioritized=True)
    slots = np.flatnonzero(replay.steps["ahead"] >= 0)
    everything = replay.gather(slots)
    sizes = np.abs(everything.returns)
    replay.update(slots, everything.serial, sizes)
    random, sums = np.random.default_rng(1), np.zeros(2)
    for _ in range(300):
        sample = replay.sample(64, 1.0, random)
        chances = replay.tree.leaves[sample.index] / replay.tree.total
        weights = 1 / (replay.size * chances)
        np.testing.assert_allclose(sample.weights, weights, rtol=1e-6)
        drawn = np.abs(sample.returns)
        sums += (weights * drawn).sum(), weights.sum()
    assert sums[0] / sums[1] == pytest.approx(sizes.mean(), abs=0.03) and drawn.mean() > sizes.mean() + 0.1
    assert (replay.sample(64, 0.0, random).weights == 1).all()


def test_what_was_overwritten_is_not_updated():
    replay, walk = filled(80, 100, prioritized=True)
    sample = replay.sample(64, 0.5, np.random.default_rng(0))
    for _ in range(25):
        replay.add(*walk.step(0, 2))
    gone = sample.serial < replay.written - 100
    before = replay.tree.leaves.copy()
    assert 0 < gone.sum() < 64
    assert replay.update(sample.index, sample.serial, np.full(64, 1e3)) == (~gone).sum()
    changed = np.flatnonzero(replay.tree.leaves != before)
    np.testing.assert_array_equal(changed, np.unique(sample.index[~gone]))
    np.testing.assert_array_equal(np.flatnonzero(replay.tree.leaves), np.flatnonzero(replay.steps["ahead"] >= 0))
    # Nor what is no draw of this memory at all.
    assert replay.update(np.array([5, 5, -3]), np.array([replay.written + 5, 4, 1]), np.ones(3)) == 0


def test_a_new_transition_has_the_largest_priority_so_far():
    replay, walk = filled(50, prioritized=True, ending=0.0)
    sample = replay.sample(8, 0.5, np.random.default_rng(0))
    replay.update(sample.index, sample.serial, np.full(8, 7.0))
    replay.update(sample.index, sample.serial, np.full(8, 0.5))
    new = replay.add(*walk.step(0, 2))
    np.testing.assert_allclose(replay.tree.leaves[new % 200], (7 + 1e-6) ** 0.6)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "stack"), [((4,), "f4", 1), ((4, 8, 8), "u1", 4), ((6, 4), "u1", 2)])
def test_memory_is_as_it_is_said(shape, dtype, stack, prioritized, monkeypatch):
    about = {"streams": 3, "stack": stack, "prioritized": prioritized}
    needed = made(1000, shape, dtype, **about).bytes
    monkeypatch.setattr(memory, "available", lambda: needed)
    replay = made(1000, shape, dtype, **about)
    arrays = [replay.frames, replay.steps, replay.counts, replay.last, replay.ages]
    arrays += [replay.tree.tree] if prioritized else []
    assert sum(each.nbytes for each in arrays) == needed == replay.bytes
    assert replay.frames.nbytes == 1000 * np.prod(shape) // stack * np.dtype(dtype).itemsize  # each frame once
    monkeypatch.setattr(memory, "available", lambda: needed - 1)
    with pytest.raises(UsageError, match=f"--replay 1000 needs at least {needed:,} bytes of memory, and"):
        made(1000, shape, dtype, **about)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"capacity": 9}, "--replay 9 should be from 10"),
        ({"capacity": 2**31}, "to 2147483647"),
        ({"alpha": -1.0}, "--alpha must be from 0 to 1"),
    ],
)
def test_bad_settings(more, words):
    with pytest.raises(UsageError, match=words):
        made(**{"streams": 2, **more})


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_an_error_that_is_no_number(wrong):
    replay, _ = filled(prioritized=True)
    sample = replay.sample(4, 0.5, np.random.default_rng(0))
    with pytest.raises(TrainingError, match="a TD error is NaN or infinite"):
        replay.update(sample.index, sample.serial, np.array([1, wrong, 1, 1]))


def test_it_holds_enough_or_is_full():
    """With the three steps that wait for their returns; a memory that is full holds what it can."""
    replay, walk = filled(19, 60, streams=1, ending=0.0)
    assert replay.size == 16 and replay.holds(16) and not replay.holds(17)
    for _ in range(41):
        assert not replay.holds(58)
        replay.add(*walk.step(0, 1))
    assert replay.size == 57 and replay.holds(10**6)
    with pytest.raises(ValueError, match="no complete transition"):
        made().sample(3, 0.5, np.random.default_rng(0))


@pytest.mark.parametrize(("prioritized", "steps"), [(False, 30), (True, 300)])  # the ring is full, or not
def test_goes_on_from_its_state(prioritized, steps):
    """To the bit: what is drawn, updated and added afterwards."""
    replay, walk = filled(steps, 150, prioritized=prioritized)
    if prioritized:
        sample = replay.sample(32, 0.5, np.random.default_rng(0))
        replay.update(sample.index, sample.serial, np.random.default_rng(1).random(32))
    state = {name: array.copy() for name, array in replay.state().items()}
    assert len(state["frames"]) == min(150, replay.written)
    other = made(150, streams=2, prioritized=prioritized)
    for _ in range(40):  # what was there goes
        other.add(*Walk(np.random.default_rng(9), 2, (3,), 1, "f4").step(0, 2))
    other.load(state)
    for turn in range(40):
        step = walk.step(0, 2)
        replay.add(*step)
        other.add(*step)
        first, second = (each.sample(16, 0.5, np.random.default_rng(turn)) for each in (replay, other))
        for one, two in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, two)
        for each in (replay, other):
            each.update(first.index, first.serial, np.arange(16.0))
    assert_same(replay, other.state())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("geometry"), "another capacity"),
        (lambda state: state.update(gamma=np.array([0.5])), "--gamma"),
        (lambda state: state.pop("reward"), "damaged: it has no reward"),
        (lambda state: state.update(frames=state["frames"][:-1]), "damaged: its counts"),
    ],
)
def test_a_state_of_another_memory(change, words):
    replay, _ = filled()
    state = dict(replay.state())
    change(state)
    with pytest.raises(UsageError, match=words):
        made(200, streams=2).load(state)


def test_priorities_may_begin_where_there_were_none():
    replay, _ = filled()
    other = made(200, streams=2, prioritized=True)
    other.load(replay.state())
    np.testing.assert_array_equal(np.flatnonzero(other.tree.leaves), np.flatnonzero(replay.steps["ahead"] >= 0))
    assert other.sample(4, 0.5, np.random.default_rng(0)).weights.tolist() == [1, 1, 1, 1]
