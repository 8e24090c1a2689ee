"""Ring buffer of a replay memory: each frame is stored once, with the step that was taken from it. CPU only.

    slot        0      1      2      3      4      5  ...        serial: the number of a frame since the beginning;
    frame       a0     b0     a1     b1     a2    (a3)           its slot is serial modulo the capacity
    back        0      0      2      2      2      1             distance to the previous frame of the episode; 0: none
    ahead       4      -      3      -      1      -             distance to the observation n = 2 steps later; -: none

Streams (a, b: one for each environment; a is truncated at a3) share the ring, in the order of their frames. An
observation is a frame, or a stack of its episode's last frames, found along `back`, the first one repeated if needed. A
step becomes a transition, which can be sampled, when its return is complete, n steps later or at its episode's end:

    the episode
    goes on             r_t + ... + gamma^(n-1) r_{t+n-1}, discount = gamma^n, ahead to the frame of step t + n
    was truncated       m <= n rewards, discount = gamma^m, ahead to the true last frame, which takes a slot of its own
    has terminated      m <= n rewards, discount = 0; the next observation has no effect: ahead to the step's own frame

All frames of a transition are in the ring: before a frame is overwritten, the transitions whose observations contain it
(its own, and those of the next frames, along `after`) are removed; a step whose frames are overwritten before its
return is complete never becomes a transition; the frames after a step are overwritten later than its own."""

import numba
import numpy as np

from hpcdl.kernels.bind import exact, on_cpu, prepare
from hpcdl.kernels.gather import prefetch
from hpcdl.kernels.td import step_back

# The record of a step: 32 bytes, so that it lies in one cache line.
STEP = np.dtype(
    {
        "names": ["action", "reward", "returns", "discount", "back", "after", "ahead"],
        "formats": ["<i4", "<f4", "<f4", "<f4", "<i4", "<i4", "<i4"],
        "itemsize": 32,
    }
)
# Positions in `counts`: frames, transitions; the lengths of the last call's two lists.
WRITTEN, SIZE, TOUCHED, COMPLETED = range(4)
TERMINATED, TRUNCATED = 1, 2  # flags of a step
AHEAD = 6  # transitions between a prefetch and its use


@exact
def on_by(slot, gap, capacity):
    """Return the slot `gap` frames later."""
    return slot + gap if slot + gap < capacity else slot + gap - capacity


@exact
def set_priority(counts, slots, values, slot, value):
    """List a slot with its new priority in `slots` and `values`; of a slot's entries the last counts."""
    slots[counts[TOUCHED]] = slot
    values[counts[TOUCHED]] = value
    counts[TOUCHED] += 1


@exact
def remove_transitions(steps, counts, slots, values, slot, stack):
    """Remove the transitions whose observations contain the frame of this slot."""
    capacity, at = len(steps), slot
    for _ in range(stack):
        if steps[at].ahead >= 0:
            steps[at].ahead = -1
            counts[SIZE] -= 1
            set_priority(counts, slots, values, at, 0.0)
        if steps[at].after == 0:
            break
        at = on_by(at, steps[at].after, capacity)


@exact
def write(frames, steps, counts, slots, values, source, row, previous, stack):
    """Store a frame and return its serial; previous: serial of the previous frame of its episode, or -1."""
    capacity, serial, width = len(steps), counts[WRITTEN], frames.shape[1]
    slot = serial % capacity
    if serial >= capacity:
        remove_transitions(steps, counts, slots, values, slot, stack)
    for b in range(width):
        frames[np.uintp(slot), np.uintp(b)] = source[np.uintp(row), np.uintp(b)]
    step, gap = steps[slot], min(serial - previous, capacity)
    step.after, step.ahead, step.back, step.action = 0, -1, 0, 0
    step.reward = step.returns = step.discount = 0.0
    if previous >= 0:
        step.back = gap  # the capacity if the previous frame is overwritten
        if gap < capacity:
            steps[previous % capacity].after = gap
    counts[WRITTEN] = serial + 1
    return serial


@exact
def frames_are_there(steps, counts, serial, stack):
    """True if no frame is overwritten of the observation whose newest frame has this serial."""
    capacity = len(steps)
    for _ in range(stack - 1):
        gap = steps[serial % capacity].back
        if gap == 0:
            break
        serial -= gap
        if serial < counts[WRITTEN] - capacity:
            return False
    return True


@exact
def complete(steps, counts, slots, values, completed, serial, ahead, total, discount, stack, priorities, priority):
    """Make a step a transition if its frames are in the ring, and list its serial in `completed`; else list -1."""
    number = counts[COMPLETED]
    if len(priorities):  # the caller checks later that there were enough
        priority = priorities[min(number, len(priorities) - 1)]
    counts[COMPLETED] = number + 1
    completed[number] = -1
    if serial >= counts[WRITTEN] - len(steps) and frames_are_there(steps, counts, serial, stack):
        slot = serial % len(steps)
        step = steps[slot]
        step.returns, step.discount, step.ahead = total, discount, ahead
        counts[SIZE] += 1
        set_priority(counts, slots, values, slot, priority)
        completed[number] = serial


@on_cpu
def add(
    frames, steps, counts, last, ages, source, finals, actions, rewards, flags, first, streams, stack, n,
    gamma, priorities, priority, slots, values, completed,
):  # fmt: skip
    """Add steps of the streams first .. first + streams - 1: row by row, one step of each stream in turn.

    source (rows, bytes): the newest frame of each observation. finals: the true last frames of truncated episodes, in
    the rows' order. last, ages: for each stream the serial of its last frame (-1 at an episode's beginning), the steps
    of the episode. priorities: of the new transitions, in order; if empty, all get `priority`. To write: slots, values
    (the changed priorities) and completed (serials of the new transitions)."""
    counts[TOUCHED] = counts[COMPLETED] = 0
    capacity, truncated = len(steps), 0
    for row in range(len(actions)):
        stream = first + row % streams
        previous, age = last[stream], ages[stream]
        serial = write(frames, steps, counts, slots, values, source, row, previous, stack)
        if age >= n:
            start, total, discount, there = previous, 0.0, 1.0, True
            for k in range(n):
                there = there and start >= counts[WRITTEN] - capacity
                if there:
                    total, discount = step_back(total, discount, np.float64(steps[start % capacity].reward), gamma)
                    if k < n - 1:
                        start -= steps[start % capacity].back
            complete(
                steps, counts, slots, values, completed, start if there else -1, serial - start, total, discount,
                stack, priorities, priority,
            )  # fmt: skip
        steps[serial % capacity].action, steps[serial % capacity].reward = actions[row], rewards[row]
        last[stream], ages[stream] = serial, age + 1
        if flags[row]:
            terminated, end = flags[row] & TERMINATED != 0, serial
            if not terminated:
                end = write(frames, steps, counts, slots, values, finals, truncated, serial, stack)
                truncated += 1
            start, total, discount, there = serial, 0.0, 1.0, True
            for _ in range(min(age + 1, n)):
                there = there and start >= counts[WRITTEN] - capacity
                gap = np.int64(0)
                if there:
                    step = steps[start % capacity]
                    total, discount = step_back(total, discount, np.float64(step.reward), gamma)
                    gap = np.int64(step.back)
                complete(
                    steps, counts, slots, values, completed, start if there else -1, 0 if terminated else end - start,
                    total, 0.0 if terminated else discount, stack, priorities, priority,
                )  # fmt: skip
                start -= gap
            last[stream], ages[stream] = -1, 0


@exact
def copy_stack(frames, steps, slot, stack, out, row):
    """out[row] <- the frames of the observation whose newest one is in this slot, the oldest first."""
    width = frames.shape[1]
    for k in range(stack - 1, -1, -1):
        for b in range(width):
            out[np.uintp(row), np.uintp(k * width + b)] = frames[np.uintp(slot), np.uintp(b)]
        if k > 0:
            slot -= np.int64(steps[slot].back)
            slot += len(steps) if slot < 0 else 0


@on_cpu
def gather(frames, steps, counts, index, stack, serial, x, actions, returns, discounts, y):
    """Copy the transitions of slots `index` (n,) to serial ... y; x, y (n, bytes): observations before and after."""
    capacity, n = len(steps), len(index)
    newest = counts[WRITTEN] - 1
    for i in range(n):
        if i + 2 * AHEAD < n:
            prefetch(np.uintp(steps.ctypes.data) + np.uintp(32) * np.uintp(index[i + 2 * AHEAD]))
        if i + AHEAD < n:
            slot = index[i + AHEAD]
            width = np.uintp(frames.shape[1])
            prefetch(np.uintp(frames.ctypes.data) + width * np.uintp(slot))
            later = on_by(slot, np.int64(steps[slot].ahead), capacity)
            prefetch(np.uintp(frames.ctypes.data) + width * np.uintp(later))
        slot = index[i]
        step = steps[slot]
        serial[i] = newest - (newest - slot) % capacity
        actions[i], returns[i], discounts[i] = step.action, step.returns, step.discount
        copy_stack(frames, steps, slot, stack, x, i)
        copy_stack(frames, steps, on_by(slot, np.int64(step.ahead), capacity), stack, y, i)


def ready() -> None:
    """Compile the loops, before a run's clock starts."""
    t = numba.types
    steps, i8, f8, frames = numba.from_dtype(STEP)[::1], t.int64, t.float64, t.uint8[:, ::1]
    i8s, f8s, f4s, lists = i8[::1], f8[::1], t.float32[::1], (i8[::1], f8[::1], i8[::1])
    drawn = i8s, f4s, t.uint8[::1]
    prepare(add, frames, steps, i8s, i8s, i8s, frames, frames, *drawn, i8, i8, i8, i8, f8, f8s, f8, *lists)
    prepare(gather, frames, steps, i8s, i8s, i8, i8s, frames, i8s, f4s, f4s, frames)
