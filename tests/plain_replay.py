"""A replay memory of lists, which keeps all that ever was and looks afterwards at what is still there."""

from typing import NamedTuple

import numpy as np


class Taken(NamedTuple):
    """A step: the serial of its frame, its whole observation, the action and the reward."""

    serial: int
    observation: np.ndarray
    action: int
    reward: float


class Transition(NamedTuple):
    observation: np.ndarray
    action: int
    returns: float
    discount: float
    after: np.ndarray | None  # None: terminated
    frames: list[int]  # serials that the observation needs


class PlainReplay:
    def __init__(self, capacity, streams, stack, n, gamma):
        self.capacity, self.stack, self.n, self.gamma = capacity, stack, n, gamma
        self.episodes = [[] for _ in range(streams)]
        self.written, self.transitions, self.completed = 0, {}, []

    def alive(self, serials):
        return all(serial >= self.written - self.capacity for serial in serials)

    def complete(self, episode, start, stop, discount, after):
        steps = episode[start:stop]
        returns = sum(self.gamma**k * step.reward for k, step in enumerate(steps))
        needs = [step.serial for step in episode[max(0, start + 1 - self.stack) : start + 1]]
        there = self.alive(needs)
        self.completed.append(steps[0].serial if there else -1)
        if there:
            found = Transition(steps[0].observation, steps[0].action, returns, discount, after, needs)
            self.transitions[steps[0].serial] = found

    def add(self, stream, observation, action, reward, terminated, truncated, final):
        episode, n = self.episodes[stream], self.n
        episode.append(Taken(self.written, observation.copy(), action, reward))
        self.written += 1
        if len(episode) > n:
            self.complete(episode, len(episode) - 1 - n, len(episode) - 1, self.gamma**n, observation.copy())
        if terminated or truncated:
            self.written += not terminated  # the true last frame
            for start in range(len(episode) - 1, max(-1, len(episode) - 1 - n), -1):
                discount = 0.0 if terminated else self.gamma ** (len(episode) - start)
                self.complete(episode, start, len(episode), discount, None if terminated else final.copy())
            self.episodes[stream] = []

    def cut(self):
        self.episodes = [[] for _ in self.episodes]

    def there(self):
        """What can be drawn now, by serial."""
        return {serial: each for serial, each in self.transitions.items() if self.alive(each.frames)}


def assert_same(replay, state):
    """The memory holds to the bit what a state says."""
    for name, array in replay.state().items():
        assert array.tobytes() == state[name].tobytes(), name


class Walk:
    """Random episodes of several streams, whose observations are stacks of random frames."""

    def __init__(self, random, streams, frame, stack, dtype, ending=0.15):
        self.random, self.frame, self.stack, self.dtype, self.ending = random, frame, stack, np.dtype(dtype), ending
        self.now = [self.begun() for _ in range(streams)]

    def drawn(self):
        if self.dtype == np.uint8:
            return self.random.integers(0, 256, self.frame, np.uint8)
        return self.random.standard_normal(self.frame).astype(self.dtype)

    def begun(self):
        frame = self.drawn()
        return [frame] * self.stack

    def observation(self, frames):
        return np.concatenate(frames) if self.stack > 1 else frames[-1]

    def step(self, first, count):
        """A step of some streams: what Replay.add takes."""
        some = range(first, first + count)
        before = np.stack([self.observation(self.now[s]) for s in some])
        terminated, truncated = self.random.random((2, count)) < self.ending
        final = np.zeros_like(before)
        for i, s in enumerate(some):
            self.now[s] = [*self.now[s][1:], self.drawn()]
            if terminated[i] or truncated[i]:
                final[i] = self.observation(self.now[s])
                self.now[s] = self.begun()
        actions = self.random.integers(0, 5, count)
        rewards = self.random.standard_normal(count).astype(np.float32)
        return before, actions, rewards, terminated, truncated, final
