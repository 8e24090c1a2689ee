"""Environments of one's own, with every fault that there may be, and every kind of observation."""

import types

import numpy as np


class Walk:
    """Shows where it is and how far: `faults` is a function of (episode, step) that says what goes wrong."""

    action_space = types.SimpleNamespace(n=3)
    made = 0

    def __init__(self, length=5, faults="", render_mode=None):
        if faults == "make" and Walk.made > 0:
            raise OSError("no more of them")
        Walk.made += 1
        self.length, self.faults, self.episode = length, faults, -1

    def reset(self, seed=None):
        self.random, self.step_number = np.random.default_rng(seed), 0
        self.episode += 1
        if self.faults == "reset":
            raise ValueError("cannot begin")
        if self.faults == "first":
            return np.array([np.nan, 0.0]), {}
        return self.shown(), {}

    def shown(self):
        return np.array([self.random.random(), self.step_number])

    def step(self, action):
        self.step_number += 1
        step, faults = self.step_number, self.faults
        if (step == 3 and faults in ("step", "make")) or faults == "always":
            raise RuntimeError("it broke\nin two lines")
        if step == 3 and faults == "exit":
            raise SystemExit(7)
        reward = {"reward": float("nan")}.get(faults, float(action)) if step == 3 else float(action)
        shown = self.shown()
        if step == 3 and faults == "shown":
            shown[0] = np.inf
        if step == 3 and faults == "shape":
            shown = shown[:1]
        return shown, reward, step == self.length, False, {}


def once(**options):
    return Walk(**options)


class Shows:
    action_space = types.SimpleNamespace(n=2, start=5)

    def __init__(self, kind):
        self.kind = kind

    def reset(self, seed=None):
        return self.shown(0), {}

    def step(self, action):
        return self.shown(action), 1.0, False, action == 6, {}

    def shown(self, action):
        if self.kind == "number":
            return float(action)
        count = {"image": (4, 5, 3), "first": (3, 4, 5), "grey": (4, 5), "truth": (4, 5, 3), "bytes": (7,)}
        shape = count.get(self.kind, (2, 3))
        dtype = {"truth": bool, "float": np.float64}.get(self.kind, np.uint8)
        return (np.arange(np.prod(shape)).reshape(shape) + action).astype(dtype)

    def render(self):
        return np.zeros((2, 2, 3)) if self.kind == "image" else None


class Spaced(Shows):
    def __init__(self, n, shape=()):
        self.kind, self.action_space = "number", types.SimpleNamespace(shape=shape)
        if n is not None:
            self.action_space.n = n


def nothing():
    return 3


def no_pair():
    made = Walk()
    made.reset = lambda seed: np.zeros(2)
    return made


def no_seed():
    made = Walk()
    made.reset = lambda: (np.zeros(2), {})
    return made
