"""Replay memory: the last transitions of one or several streams, drawn uniformly or by priority.

    replay = Replay(100_000, environments.shape, environments.dtype, streams=8, n_step=3, prioritized=True)
    replay.add(observations, actions, *stepped[1:])             a step of each environment
    sample = replay.sample(32, beta=0.4, random=Random(seed)("replay", update))
    replay.update(sample.index, sample.serial, errors)          |TD errors|, which become (error + epsilon)^alpha

A ring of `capacity` frames in typed arrays (kernels/replay_ring.py): an observation's frame is stored once, also where
it is the next observation of another transition and a part of four stacked ones. A frame needs its own bytes and 32,
and 64/7 more with priorities; nothing else grows. The true last frame of an episode that was cut takes a place, too.

Uniform draws are made with replacement. By priority, the sum of all is cut into as many parts of equal length as are
drawn, and one is drawn from each part; a new transition has the largest priority so far, unless one comes with it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from hpcdl import memory
from hpcdl.errors import TrainingError, UsageError, refuse_beyond
from hpcdl.kernels import replay_ring, sum_tree, td
from hpcdl.kernels.replay_ring import COMPLETED, SIZE, STEP, TERMINATED, TOUCHED, TRUNCATED, WRITTEN

NONE = np.empty(0)


class Sample(NamedTuple):
    """Transitions that were drawn, in rows.

    index, serial int64 (rows,): where they lie, and which they are, for `update`. observations, next_observations
    (rows, *shape). actions int64, returns and discounts float32 (rows,): gamma^m for m steps, 0 where the episode has
    terminated; the next observation then counts nothing, and is the observation itself. weights float32 (rows,).
    """

    index: np.ndarray  # type: ignore[assignment]  # a tuple's method has this name
    serial: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    discounts: np.ndarray
    next_observations: np.ndarray
    weights: np.ndarray


def frame_bytes(shape: tuple[int, ...], dtype: DTypeLike, stack: int) -> int:
    """The bytes of a frame, of which `stack` make an observation."""
    return int(np.prod(shape)) // stack * np.dtype(dtype).itemsize


def bytes_needed(
    capacity: int,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    streams: int = 1,
    stack: int = 1,
    prioritized: bool = False,
) -> int:
    """The bytes that such a replay memory takes, as it is made and for good."""
    tree = sum_tree.bytes_needed(capacity) if prioritized else 0
    return capacity * (frame_bytes(shape, dtype, stack) + STEP.itemsize) + tree + 16 * streams + 32


def ends(terminated: np.ndarray, truncated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which steps have ended an episode that was cut off, and the flags of all: TERMINATED, TRUNCATED or 0; (rows,)."""
    cut = truncated & ~terminated
    return cut, np.where(terminated, TERMINATED, np.where(cut, TRUNCATED, 0))


class Replay:
    """Transitions of so many streams, each of which is one environment's steps in their order.

    capacity: frames. shape, dtype: of an observation; with stack > 1 its first axis holds so many frames, the oldest
    first. n_step, gamma: of the returns. alpha, epsilon: an error e has the priority (e + epsilon)^alpha.

    Raises UsageError where the capacity is too small for the steps that wait for their returns, or beyond what this
    machine has.
    """

    def __init__(
        self,
        capacity: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        streams: int = 1,
        stack: int = 1,
        n_step: int = 3,
        gamma: float = 0.99,
        prioritized: bool = False,
        alpha: float = 0.6,
        epsilon: float = 1e-6,
    ):
        self.capacity, self.shape, self.dtype = int(capacity), tuple(shape), np.dtype(dtype)
        self.streams, self.stack, self.n_step, self.gamma = streams, stack, n_step, float(gamma)
        self.alpha, self.epsilon, self.highest = alpha, epsilon, 1.0
        if n_step < 1:
            raise UsageError(f"--n-step must be 1 or more, not {n_step}")
        if not 0 <= gamma <= 1:
            raise UsageError(f"--gamma must be from 0 to 1, not {gamma}")
        if not 0 <= alpha <= 1:
            raise UsageError(f"--alpha must be from 0 to 1, not {alpha}")
        if epsilon <= 0:
            raise ValueError("epsilon must be above 0: what has the priority 0 is never drawn again")
        if stack > 1 and (not self.shape or self.shape[0] % stack):
            raise ValueError(f"observations of the shape {self.shape} are no stack of {stack} frames")
        least = streams * (n_step + stack + 1)
        if not least <= self.capacity < 2**31:
            raise UsageError(
                f"--replay {self.capacity} should be from {least} to {2**31 - 1}: each of {streams} environments has "
                f"{n_step + stack + 1} steps there that are not complete"
            )
        self.frame = (self.shape[0] // stack, *self.shape[1:]) if stack > 1 else self.shape
        self.bytes = bytes_needed(capacity, shape, dtype, streams=streams, stack=stack, prioritized=prioritized)
        refuse_beyond(f"--replay {self.capacity}", self.bytes, memory.available())
        self.frames = np.zeros((self.capacity, frame_bytes(shape, dtype, stack)), np.uint8)
        self.steps = np.zeros(self.capacity, STEP)
        self.steps["ahead"] = -1
        self.counts = np.zeros(4, np.int64)
        self.last, self.ages = np.full(streams, -1, np.int64), np.zeros(streams, np.int64)
        self.tree = sum_tree.SumTree(self.capacity) if prioritized else None
        self._add, self._gather = replay_ring.loops()
        td.ready(np.float32)

    @property
    def size(self) -> int:
        """The transitions that can be drawn."""
        return int(self.counts[SIZE])

    @property
    def written(self) -> int:
        """The frames that have been added so far, also those that are overwritten."""
        return int(self.counts[WRITTEN])

    def add(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        final: np.ndarray,
        first: int = 0,
    ) -> np.ndarray:
        """Add one step of each of the streams first, first + 1, ...; returns the serials of what is complete by it.

        observations (rows, *shape): those in which the actions (rows,) were taken. final (rows, *shape): of an episode
        that has ended by this step, its true last observation; else anything.
        """
        cut, flags = ends(terminated, truncated)
        newest = self.frame_rows(observations), self.frame_rows(final[cut])
        return self.add_frames(*newest, actions, rewards, flags, first, len(actions))

    def frame_rows(self, observations: np.ndarray) -> np.ndarray:
        """The newest frames of observations (rows, *shape), as an array (rows, *frame)."""
        given = np.asarray(observations, self.dtype).reshape(len(observations), self.stack, *self.frame)
        return given[:, -1]

    def add_frames(
        self,
        frames: np.ndarray,
        finals: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        flags: np.ndarray,
        first: int,
        streams: int,
        priorities: np.ndarray = NONE,
    ) -> np.ndarray:
        """Add rows of single frames: a step of each of `streams` streams from `first` on, then the next of each, ...

        frames (rows, *frame); finals (cut, *frame): the last ones of episodes that were cut, in the order of their
        rows. flags (rows,): TERMINATED, TRUNCATED or 0. priorities: |TD errors| of the transitions that become
        complete. Returns their serials int64, in order: the first of a row is that of n steps ago, then, at an
        episode's end, those of this step, of the one before, ... -1: its frames are overwritten already.
        """
        rows, width = len(actions), self.frames.shape[1]
        if not 0 <= first <= first + streams <= self.streams:
            raise ValueError(f"streams {first} to {first + streams - 1} of {self.streams}")
        source, last = (
            np.ascontiguousarray(each, self.dtype).reshape(-1).view(np.uint8).reshape(-1, width)
            for each in (frames, finals)
        )
        flags = np.ascontiguousarray(flags, np.uint8)
        if len(source) != rows or len(flags) != rows or len(rewards) != rows or len(last) != (flags == TRUNCATED).sum():
            raise ValueError("frames, actions, rewards and flags are not as many as each other")
        most = rows * (2 * self.stack + self.n_step + 3)
        slots, values, completed = np.empty(most, np.int64), np.empty(most), np.empty(most, np.int64)
        if len(priorities):
            priorities = self.priorities_of(priorities)
            self.highest = max(self.highest, float(priorities.max()))
        self._add(
            self.frames, self.steps, self.counts, self.last, self.ages, source, last,
            np.ascontiguousarray(actions, np.int64), np.ascontiguousarray(rewards, np.float32), flags, first, streams,
            self.stack, self.n_step, self.gamma, priorities, self.highest, slots, values, completed,
        )  # fmt: skip
        touched, complete = self.counts[TOUCHED], self.counts[COMPLETED]
        if self.tree is not None:
            self.tree.assign(slots[:touched], values[:touched])
        if len(priorities) not in (0, complete):
            raise ValueError(f"{len(priorities)} priorities of {complete} transitions that became complete")
        return completed[:complete]

    def cut(self, first: int = 0, streams: int | None = None) -> None:
        """Begin new episodes of these streams: their last steps, which lack what came after, are never drawn."""
        stop = self.streams if streams is None else first + streams
        self.last[first:stop], self.ages[first:stop] = -1, 0

    def sample(self, batch: int, beta: float, random: np.random.Generator) -> Sample:
        """Draw so many transitions; beta: how much the weights make up for what priorities favour, 0 to 1."""
        if not self.size:
            raise ValueError("there is nothing in the replay memory")
        if self.tree is None:
            return self.gather(self.draw_uniformly(batch, random))
        total = self.tree.total
        index = self.tree.draw((np.arange(batch) + random.random(batch)) * (total / batch))
        return self.gather(index, td.importance_weights(self.tree.leaves[index], total, self.size, beta))

    def draw_uniformly(self, batch: int, random: np.random.Generator) -> np.ndarray:
        """Slots of transitions, each as likely: slots that hold none are drawn anew."""
        filled, ahead = min(self.written, self.capacity), self.steps["ahead"]
        index = random.integers(filled, size=batch)
        while len(wrong := np.flatnonzero(ahead[index] < 0)):
            index[wrong] = random.integers(filled, size=len(wrong))
        return index

    def gather(self, index: np.ndarray, weights: np.ndarray | None = None) -> Sample:
        """The transitions in these slots int64 (rows,), which must hold some; a serial's slot is serial % capacity."""
        rows, width = len(index), self.stack * self.frames.shape[1]
        serial, actions = np.empty(rows, np.int64), np.empty(rows, np.int64)
        returns, discounts = np.empty(rows, np.float32), np.empty(rows, np.float32)
        x, y = np.empty((rows, width), np.uint8), np.empty((rows, width), np.uint8)
        self._gather(self.frames, self.steps, self.counts, index, self.stack, serial, x, actions, returns, discounts, y)
        first, second = (each.reshape(-1).view(self.dtype).reshape(rows, *self.shape) for each in (x, y))
        w = np.ones(rows, np.float32) if weights is None else weights.astype(np.float32)
        return Sample(index, serial, first, actions, returns, discounts, second, w)

    def update(self, index: np.ndarray, serial: np.ndarray, errors: np.ndarray) -> int:
        """The |TD errors| (rows,) of transitions that were drawn become their priorities; returns of how many.

        Those that were overwritten meanwhile are passed over. Raises TrainingError where an error is NaN or infinite.
        """
        if self.tree is None:
            return 0
        priorities = self.priorities_of(errors)
        there = (serial >= max(0, self.written - self.capacity)) & (serial < self.written)
        there &= serial % self.capacity == index
        slots = index[there]
        valid = self.steps["ahead"][slots] >= 0
        slots, priorities = slots[valid], priorities[there][valid]
        if len(slots):
            self.tree.assign(slots, priorities)
            self.highest = max(self.highest, float(priorities.max()))
        return len(slots)

    def priorities_of(self, errors: np.ndarray) -> np.ndarray:
        """(|e| + epsilon)^alpha, float64. Raises TrainingError where that is no number."""
        found = (np.abs(np.asarray(errors, np.float64)) + self.epsilon) ** self.alpha
        if not np.isfinite(found).all():
            raise TrainingError("a TD error is NaN or infinite: a smaller --lr may help")
        return found

    def state(self) -> dict[str, np.ndarray]:
        """All that is in it, for a checkpoint: views, of which nothing is copied."""
        filled = min(self.written, self.capacity)
        about = [self.capacity, self.frames.shape[1], self.stack, self.n_step, self.streams]
        found = {
            "geometry": np.array(about),
            "gamma": np.array([self.gamma]),
            "counts": self.counts[:2],
            "frames": self.frames[:filled],
            "last": self.last,
            "ages": self.ages,
            "highest": np.array([self.highest]),
        }
        found |= {name: self.steps[name][:filled] for name in STEP.names or ()}
        return found if self.tree is None else found | {"priorities": self.tree.leaves[:filled]}

    def load(self, state: dict[str, Any]) -> None:
        """What `state` gave becomes all that is in it. Raises UsageError where that is of another memory.

        Environments that do not go on where they were need `cut` as well.
        """
        mine = self.state()
        wanted = {name: mine[name] for name in ("geometry", "gamma")}
        if not all(name in state and np.array_equal(np.asarray(state[name]), wanted[name]) for name in wanted):
            raise UsageError(
                "the checkpoint's replay memory is of another capacity, observation, --n-step, --gamma or number of "
                "environments: take the same, or leave it out"
            )
        if missing := set(mine) - {"priorities"} - set(state):
            raise UsageError(f"the checkpoint's replay memory is damaged: {', '.join(sorted(missing))} is not there")
        filled = len(state["frames"])
        self.counts[:2] = state["counts"]
        if filled != min(self.written, self.capacity):
            raise UsageError("the checkpoint's replay memory is damaged: its frames are not as many as it says")
        self.frames[:filled], self.last[:], self.ages[:] = state["frames"], state["last"], state["ages"]
        self.steps[:], self.steps["ahead"] = 0, -1
        for name in STEP.names or ():
            self.steps[name][:filled] = state[name]
        self.highest = float(np.asarray(state["highest"])[0])
        if self.tree is not None:
            there = self.steps["ahead"][:filled] >= 0
            leaves = np.zeros(self.capacity)
            leaves[:filled] = np.where(there, state.get("priorities", np.full(filled, self.highest)), 0.0)
            self.tree.assign(np.arange(self.capacity), leaves)
