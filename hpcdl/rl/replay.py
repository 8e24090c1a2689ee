"""Replay memory: the last transitions of one or several streams, drawn uniformly or by priority.

    replay = Replay(100_000, environments.shape, environments.dtype, streams=8, n_step=3, prioritized=True)
    replay.add(observations, actions, *stepped[1:])             a step of each environment
    sample = replay.sample(32, beta=0.4, random=Random(seed)("replay", update))
    replay.update(sample.index, sample.serial, errors)          |TD errors| become priorities (error + EPSILON)^alpha

A ring of `capacity` frames in typed arrays (kernels/replay_ring.py): each frame is stored once, though it belongs to
two transitions and to several stacks. A frame takes its bytes and 32 more, with priorities 64/7 more. The true last
frame of a truncated episode takes a slot, too. Uniform draws are with replacement. Prioritized draws are stratified:
the sum of all priorities is cut into equal parts, and one transition is drawn from each. A new transition without a
priority gets the largest priority so far."""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from hpcdl import memory
from hpcdl.errors import TrainingError, UsageError, refuse_beyond
from hpcdl.kernels import replay_ring, sum_tree, td
from hpcdl.kernels.replay_ring import COMPLETED, SIZE, STEP, TERMINATED, TOUCHED, TRUNCATED, WRITTEN

NONE = np.empty(0)
EPSILON = 1e-6  # added to |TD errors|: a transition of priority 0 would never be drawn again
Columns: TypeAlias = tuple[np.ndarray, ...]  # frames, finals, actions, rewards, flags


class Sample(NamedTuple):
    """Transitions drawn from the memory, in rows. index, serial int64 (rows,): slots and identities, for `update`.
    observations, next_observations (rows, *shape). actions int64; returns, discounts, weights float32 (rows,).
    discounts: gamma^m for returns of m steps; 0: the episode terminated, next_observations repeat observations."""

    index: np.ndarray  # type: ignore[assignment]  # a tuple's method has this name
    serial: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    discounts: np.ndarray
    next_observations: np.ndarray
    weights: np.ndarray


class Replay:
    """Transitions of `streams` streams; a stream is one environment's steps in order.

    capacity: frames. shape, dtype: of an observation; with stack > 1 its first axis holds that many frames, the oldest
    first. n_step, gamma: of the returns. alpha: an error e has the priority (|e| + EPSILON)^alpha. bytes: of all
    arrays. UsageError if the capacity is too small for incomplete transitions, or too large for this machine's
    memory."""

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
    ):
        self.capacity, self.shape, self.dtype = int(capacity), tuple(shape), np.dtype(dtype)
        self.streams, self.stack, self.n_step, self.gamma = streams, stack, n_step, float(gamma)
        self.alpha, self.highest = alpha, 1.0
        if not 0 <= alpha <= 1:
            raise UsageError(f"--alpha must be from 0 to 1, not {alpha}")
        least = streams * (n_step + stack + 1)
        if not least <= self.capacity < 2**31:
            raise UsageError(
                f"--replay {self.capacity} should be from {least} to {2**31 - 1}: each of {streams} environments has "
                f"{n_step + stack + 1} steps there whose transitions are not complete"
            )
        self.frame = (self.shape[0] // stack, *self.shape[1:]) if stack > 1 else self.shape
        width = math.prod(self.frame) * self.dtype.itemsize
        tree = sum_tree.bytes_needed(self.capacity) if prioritized else 0
        self.bytes = self.capacity * (width + STEP.itemsize) + tree + 16 * streams + 32
        refuse_beyond(f"--replay {self.capacity}", self.bytes, memory.available())
        self.frames = np.zeros((self.capacity, width), np.uint8)
        self.steps = np.zeros(self.capacity, STEP)
        self.steps["ahead"] = -1
        self.counts = np.zeros(4, np.int64)
        self.last, self.ages = np.full(streams, -1, np.int64), np.zeros(streams, np.int64)
        self.tree = sum_tree.SumTree(self.capacity) if prioritized else None
        replay_ring.ready()
        td.ready(np.float32)

    @property
    def size(self) -> int:
        """The number of transitions that can be drawn."""
        return int(self.counts[SIZE])

    @property
    def written(self) -> int:
        """The number of frames added so far, overwritten ones included."""
        return int(self.counts[WRITTEN])

    def holds(self, enough: int) -> bool:
        """True if `enough` transitions can be drawn, or the memory is full."""
        return self.size >= enough or self.written >= self.capacity

    def add(self, observations: np.ndarray, actions: np.ndarray, *stepped: np.ndarray, first: int = 0) -> np.ndarray:
        """Add one step to each of len(actions) streams from `first` on; return the serials of transitions now complete.
        observations (rows, *shape): the actions (rows,) were taken in these. stepped: rewards, terminated,
        truncated and final (environments.py: StepResult)."""
        return self.add_frames(self.columns(observations, actions, *stepped), first, len(actions))

    def columns(self, observations: np.ndarray, actions: np.ndarray, *stepped: np.ndarray) -> Columns:
        """Return the arguments of `add` in the form of `add_frames`."""
        rewards, terminated, truncated, final = stepped
        cut = truncated & ~terminated
        flags = np.where(terminated, TERMINATED, np.where(cut, TRUNCATED, 0))
        return self.frame_rows(observations), self.frame_rows(final[cut]), actions, rewards, flags

    def frame_rows(self, observations: np.ndarray) -> np.ndarray:
        """Return the newest frames (rows, *frame) of observations (rows, *shape)."""
        stacked = np.asarray(observations, self.dtype).reshape(len(observations), self.stack, *self.frame)
        return stacked[:, -1]

    def add_frames(self, columns: Columns, first: int, streams: int, priorities: np.ndarray = NONE) -> np.ndarray:
        """Add rows of single frames: a step of each of `streams` streams from `first` on, then their next steps, etc.
        frames (rows, *frame); finals (cut, *frame): last frames of truncated episodes, in row order. flags (rows,):
        TERMINATED, TRUNCATED or 0. priorities: |TD errors| of the transitions that become complete. Returns the int64
        serials of these transitions, in this order: for each row, the transition of n steps ago; at an episode's end,
        also the transitions of its last n steps, the newest first. -1: overwritten."""
        frames, finals, actions, rewards, flags = columns
        rows, width = len(actions), self.frames.shape[1]
        if not 0 <= first <= first + streams <= self.streams:
            raise ValueError(f"streams {first} to {first + streams - 1} are not within the {self.streams} there")
        source, last = (
            np.ascontiguousarray(each, self.dtype).reshape(-1).view(np.uint8).reshape(-1, width)
            for each in (frames, finals)
        )
        flags = np.ascontiguousarray(flags, np.uint8)
        if len(source) != rows or len(flags) != rows or len(rewards) != rows or len(last) != (flags == TRUNCATED).sum():
            raise ValueError("frames, actions, rewards and flags differ in number, or finals from the truncated steps")
        most = rows * (2 * self.stack + self.n_step + 3)
        slots, values, completed = np.empty(most, np.int64), np.empty(most), np.empty(most, np.int64)
        if len(priorities):
            priorities = self.priorities_of(priorities)
            self.highest = max(self.highest, float(priorities.max()))
        replay_ring.add(
            self.frames, self.steps, self.counts, self.last, self.ages, source, last,
            np.ascontiguousarray(actions, np.int64), np.ascontiguousarray(rewards, np.float32), flags, first, streams,
            self.stack, self.n_step, self.gamma, priorities, self.highest, slots, values, completed,
        )  # fmt: skip
        touched, complete = self.counts[TOUCHED], self.counts[COMPLETED]
        if self.tree is not None:
            self.tree.assign(slots[:touched], values[:touched])
        if len(priorities) not in (0, complete):
            raise ValueError(f"there are {len(priorities)} priorities for {complete} transitions that became complete")
        return completed[:complete]

    def cut(self) -> None:
        """End the unfinished episodes; their transitions that lack a next frame are never drawn."""
        self.last[:], self.ages[:] = -1, 0

    def sample(self, batch: int, beta: float, random: np.random.Generator) -> Sample:
        """Draw `batch` transitions. beta, from 0 to 1: how far the sample's weights correct the bias of priorities."""
        if not self.size:
            raise ValueError("the replay memory has no complete transition")
        if self.tree is None:
            filled = min(self.written, self.capacity)
            index = random.integers(filled, size=batch)
            while len(empty := np.flatnonzero(self.steps["ahead"][index] < 0)):
                index[empty] = random.integers(filled, size=len(empty))
            return self.gather(index)
        total = self.tree.total
        index = self.tree.draw((np.arange(batch) + random.random(batch)) * (total / batch))
        return self.gather(index, td.importance_weights(self.tree.leaves[index], total, self.size, beta))

    def gather(self, index: np.ndarray, weights: np.ndarray | None = None) -> Sample:
        """Return the transitions in these non-empty slots, int64 (rows,); the slot of a serial is serial % capacity."""
        rows, width = len(index), self.stack * self.frames.shape[1]
        serial, actions = np.empty(rows, np.int64), np.empty(rows, np.int64)
        returns, discounts = np.empty(rows, np.float32), np.empty(rows, np.float32)
        x, y = np.empty((rows, width), np.uint8), np.empty((rows, width), np.uint8)
        ring, drawn = (self.frames, self.steps, self.counts), (serial, x, actions, returns, discounts, y)
        replay_ring.gather(*ring, index, self.stack, *drawn)
        first, second = (each.reshape(-1).view(self.dtype).reshape(rows, *self.shape) for each in (x, y))
        w = np.ones(rows, np.float32) if weights is None else weights.astype(np.float32)
        return Sample(index, serial, first, actions, returns, discounts, second, w)

    def update(self, index: np.ndarray, serial: np.ndarray, errors: np.ndarray) -> int:
        """Set priorities of drawn transitions from |TD errors| (rows,), unless they are overwritten; return how many.
        Raises TrainingError if an error is NaN or infinite."""
        if self.tree is None:
            return 0
        priorities = self.priorities_of(errors)
        present = (serial >= max(0, self.written - self.capacity)) & (serial < self.written)
        present &= serial % self.capacity == index
        slots = index[present]
        valid = self.steps["ahead"][slots] >= 0
        slots, priorities = slots[valid], priorities[present][valid]
        if len(slots):
            self.tree.assign(slots, priorities)
            self.highest = max(self.highest, float(priorities.max()))
        return len(slots)

    def priorities_of(self, errors: np.ndarray) -> np.ndarray:
        """Return (|e| + EPSILON)^alpha, float64, for errors e. Raises TrainingError if a priority is not finite."""
        priorities = (np.abs(np.asarray(errors, np.float64)) + EPSILON) ** self.alpha
        if not np.isfinite(priorities).all():
            raise TrainingError("a TD error is NaN or infinite: a smaller --lr may help")
        return priorities

    def state(self) -> dict[str, np.ndarray]:
        """Return the contents for a checkpoint, as views without copies."""
        filled = min(self.written, self.capacity)
        geometry = [self.capacity, self.frames.shape[1], self.stack, self.n_step, self.streams]
        arrays = {
            "geometry": np.array(geometry),
            "gamma": np.array([self.gamma]),
            "counts": self.counts[:2],
            "frames": self.frames[:filled],
            "last": self.last,
            "ages": self.ages,
            "highest": np.array([self.highest]),
        }
        arrays |= {name: self.steps[name][:filled] for name in STEP.names or ()}
        return arrays if self.tree is None else arrays | {"priorities": self.tree.leaves[:filled]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state. Call `cut` as well if the environments do not continue where they were.
        Raises UsageError if the state is damaged, or of a memory with other arguments."""
        own = self.state()
        expected = {name: own[name] for name in ("geometry", "gamma")}
        if not all(name in state and np.array_equal(np.asarray(state[name]), expected[name]) for name in expected):
            raise UsageError(
                "the checkpoint's replay memory has another capacity, observation size, --n-step, --gamma or number of "
                "environments: give the same, or leave out --save-replay"
            )
        if missing := set(own) - {"priorities"} - set(state):
            raise UsageError(f"the checkpoint's replay memory is damaged: it has no {', '.join(sorted(missing))}")
        filled = len(state["frames"])
        self.counts[:2] = state["counts"]
        if filled != min(self.written, self.capacity):
            raise UsageError("the checkpoint's replay memory is damaged: its counts do not fit its frames")
        self.frames[:filled], self.last[:], self.ages[:] = state["frames"], state["last"], state["ages"]
        self.steps[:], self.steps["ahead"] = 0, -1
        for name in STEP.names or ():
            self.steps[name][:filled] = state[name]
        self.highest = float(np.asarray(state["highest"])[0])
        if self.tree is not None:
            complete = self.steps["ahead"][:filled] >= 0
            leaves = np.zeros(self.capacity)
            leaves[:filled] = np.where(complete, state.get("priorities", np.full(filled, self.highest)), 0.0)
            self.tree.assign(np.arange(self.capacity), leaves)
