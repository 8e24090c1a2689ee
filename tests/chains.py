"""An environment whose values are known: a chain of states, at whose ends there are rewards.

    reward 0.2  <-  0  1  2  3  4  ->  reward 1           actions: 0 left, 1 right; begins in the middle

An episode is cut after 20 steps."""

import numpy as np

STATES, GAMMA = 5, 0.8


class Actions:
    n, shape = 2, ()


class Chain:
    action_space = Actions()

    def __init__(self, signal=0):
        self.at = self.steps = 0

    def shown(self):
        return np.eye(STATES, dtype=np.float32)[min(max(self.at, 0), STATES - 1)]

    def reset(self, seed):
        self.at, self.steps = int(np.random.default_rng(seed).integers(1, STATES - 1)), 0
        return self.shown(), {}

    def step(self, action):
        self.at, self.steps = self.at + 2 * action - 1, self.steps + 1
        reward = 0.2 if self.at < 0 else float(self.at == STATES)
        return self.shown(), reward, not 0 <= self.at < STATES, self.steps == 20, {}


def chain():
    return Chain()


def best_values():
    """Q* of each state and action, by going over them until nothing changes."""
    values = np.zeros((STATES, 2))
    for _ in range(200):
        of_state = values.max(axis=1)
        left = [0.2, *(GAMMA * of_state[:-1])]
        right = [*(GAMMA * of_state[1:]), 1.0]
        values = np.stack([left, right], axis=1)
    return values
