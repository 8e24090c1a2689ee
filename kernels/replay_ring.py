"""The ring of a replay memory: each frame stored once, and beside it the step that was taken from it. CPU only.

    slot        0      1      2      3      4      5  ...        serial: the number of a frame since the beginning;
    frame       a0     b0     a1     b1     a2    (a3)           its slot is serial modulo the capacity
    back        0      0      2      2      2      2             frames ago: the one before in its episode; 0: none
    ahead       4      -      .      .      .      -             frames on: the observation n steps later

Streams (a, b: one for each environment) share the ring, in the order in which their frames come. An observation is a
frame, or a stack of the last few of its episode, found along `back`; before the first, the first is repeated. A step
becomes a transition, which can be sampled, when its return is complete: n steps later, or at its episode's end:

    it goes on          r_t + ... + gamma^(n-1) r_{t+n-1}, discount = gamma^n, ahead to the frame of step t + n
    it was cut          m <= n rewards, discount = gamma^m, ahead to the true last frame, which takes a slot of its own
    it has terminated   m <= n rewards, discount = 0; what comes after counts nothing: the step's own frame stands in

What overwrites a frame first takes the transitions out whose observation has it: its own, and those of the next few
frames (`after`). What comes after a step is always younger than the step, so it is still there. A step whose earlier
frames went before its return was complete never becomes a transition. So whatever can be sampled is whole.
"""

from functools import cache
from typing import Any

import numba
import numpy as np

from hpcdl.kernels.bind import exact, on_cpu, prepare
from hpcdl.kernels.gather import prefetch
from hpcdl.kernels.td import step_back

# What lies beside a frame: half a cache line, so that a transition is read at once.
STEP = np.dtype(
    {
        "names": ["action", "reward", "returns", "discount", "back", "after", "ahead"],
        "formats": ["<i4", "<f4", "<f4", "<f4", "<i4", "<i4", "<i4"],
        "itemsize": 32,
    }
)
WRITTEN, SIZE, TOUCHED, COMPLETED = range(4)  # counts: frames, transitions; of the last call the entries of its lists
TERMINATED, TRUNCATED = 1, 2  # flags of a step
AHEAD = 6


@exact
def back_by(slot, gap, capacity):
    """The slot so many frames before."""
    return slot - gap if slot >= gap else slot - gap + capacity


@exact
def on_by(slot, gap, capacity):
    """The slot so many frames later."""
    return slot + gap if slot + gap < capacity else slot + gap - capacity


@exact
def touch(counts, slots, values, slot, value):
    """List a slot whose priority changes; later entries count."""
    slots[counts[TOUCHED]] = slot
    values[counts[TOUCHED]] = value
    counts[TOUCHED] += 1


@exact
def forget(steps, counts, slots, values, slot, stack):
    """Take out the transitions whose observation has the frame of this slot."""
    capacity, at = len(steps), slot
    for _ in range(stack):
        if steps[at].ahead >= 0:
            steps[at].ahead = -1
            counts[SIZE] -= 1
            touch(counts, slots, values, at, 0.0)
        if steps[at].after == 0:
            break
        at = on_by(at, steps[at].after, capacity)


@exact
def write(frames, steps, counts, slots, values, source, row, previous, stack):
    """Store a frame, which follows the one with the serial `previous`, or none (-1); returns its serial."""
    capacity, serial, width = len(steps), counts[WRITTEN], frames.shape[1]
    slot = serial % capacity
    if serial >= capacity:
        forget(steps, counts, slots, values, slot, stack)
    for b in range(width):
        frames[np.uintp(slot), np.uintp(b)] = source[np.uintp(row), np.uintp(b)]
    step, gap = steps[slot], min(serial - previous, capacity)
    step.after, step.ahead, step.back, step.action = 0, -1, 0, 0
    step.reward = step.returns = step.discount = 0.0
    if previous >= 0:
        step.back = gap  # the capacity: it is not there any more
        if gap < capacity:
            steps[previous % capacity].after = gap
    counts[WRITTEN] = serial + 1
    return serial


@exact
def whole(steps, counts, serial, stack):
    """Whether the frames of this observation are all there."""
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
def given(priorities, counts, priority):
    """The priority of what becomes complete now; where they are too few the caller sees it afterwards."""
    return priorities[min(counts[COMPLETED], len(priorities) - 1)] if len(priorities) else priority


@exact
def complete(steps, counts, slots, values, completed, serial, ahead, total, discount, stack, priority):
    """A step becomes a transition, where its frames are there; -1 is listed as completed where not."""
    number = counts[COMPLETED]
    counts[COMPLETED] = number + 1
    completed[number] = -1
    if serial >= counts[WRITTEN] - len(steps) and whole(steps, counts, serial, stack):
        slot = serial % len(steps)
        step = steps[slot]
        step.returns, step.discount, step.ahead = total, discount, ahead
        counts[SIZE] += 1
        touch(counts, slots, values, slot, priority)
        completed[number] = serial


@on_cpu
def add(
    frames, steps, counts, last, ages, source, finals, actions, rewards, flags, first, streams, stack, n,
    gamma, priorities, priority, slots, values, completed,
):  # fmt: skip
    """Add steps of `streams` streams from the number `first` on, row by row: one of each, then the next of each, ...

    source (rows, bytes): the newest frame of each observation. finals: the true last frames of the
    episodes that were cut, in the order of their rows. actions, rewards, flags (rows,). last, ages: of each stream the
    serial of its last frame, -1 at an episode's beginning, and the steps since then.

    priorities: of the transitions that become complete, in this order; where there are none, `priority`. Into slots and
    values go the slots whose priority changes, and to what; into completed, the serials of those transitions.
    """
    counts[TOUCHED] = counts[COMPLETED] = 0
    capacity, cut = len(steps), 0
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
            value = given(priorities, counts, priority)
            complete(
                steps, counts, slots, values, completed, start if there else -1, serial - start, total, discount,
                stack, value,
            )  # fmt: skip
        steps[serial % capacity].action, steps[serial % capacity].reward = actions[row], rewards[row]
        last[stream], ages[stream] = serial, age + 1
        if flags[row]:
            terminated, end = flags[row] & TERMINATED != 0, serial
            if not terminated:
                end = write(frames, steps, counts, slots, values, finals, cut, serial, stack)
                cut += 1
            start, total, discount, there = serial, 0.0, 1.0, True
            for _ in range(min(age + 1, n)):
                there = there and start >= counts[WRITTEN] - capacity
                gap = np.int64(0)
                if there:
                    step = steps[start % capacity]
                    total, discount = step_back(total, discount, np.float64(step.reward), gamma)
                    gap = np.int64(step.back)
                value = given(priorities, counts, priority)
                complete(
                    steps, counts, slots, values, completed, start if there else -1, 0 if terminated else end - start,
                    total, 0.0 if terminated else discount, stack, value,
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
            slot = back_by(slot, np.int64(steps[slot].back), len(steps))


@on_cpu
def gather(frames, steps, counts, index, stack, serial, x, actions, returns, discounts, y):
    """The transitions in the slots `index` (n,): serials, observations x and y (n, bytes), and what lies between."""
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


@cache
def loops() -> tuple[Any, Any]:
    """`add` and `gather`, compiled."""
    t = numba.types
    steps, whole, number, frames = numba.from_dtype(STEP)[::1], t.int64, t.float64, t.uint8[:, ::1]
    flags, singles = t.uint8[::1], t.float32[::1]
    wholes, numbers = whole[::1], number[::1]
    adding = prepare(
        add, frames, steps, wholes, wholes, wholes, frames, frames, wholes, singles, flags, whole, whole, whole, whole,
        number, numbers, number, wholes, numbers, wholes,
    )  # fmt: skip
    return adding, prepare(
        gather, frames, steps, wholes, wholes, whole, wholes, frames, wholes, singles, singles, frames
    )
