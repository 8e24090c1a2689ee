"""Copies of an environment that an actor steps together.

    environments = Environments("CartPole-v1", {}, count=8, seed=0)
    observations = environments.reset()
    stepped = environments.step(actions)                actions int64 (8,)
    replay.add(observations, actions, *stepped[1:])
    observations = stepped.observations                 of new episodes, where old ones have ended

Environment i of an actor has the number first + i, and its episodes are seeded by (seed, number, episode): the same
wherever it runs, and however the environments are divided among actors.

One that raises is made anew, its episode is cut at what it has shown last, with the reward 0, and it is counted. Three
times in a row without a step between end the run.
(--env's names: environment_factory.py)
"""

import contextlib
import os
import time
import traceback
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import TrainingError, UsageError, blamed_on, reason
from hpcdl.random import Random
from hpcdl.rl.environment_factory import actions_of, first_of, maker, viewer

PATIENCE = 3  # times in a row that an environment may raise, less one


class EpisodeReturn(NamedTuple):
    """The sum of an episode's rewards, as they are, not clipped, and its steps."""

    return_: float
    length: int


class Stepped(NamedTuple):
    """What a step of each environment has led to.

    observations (count, *shape): where an episode has ended the first of the next. rewards float32, terminated and
    truncated bool (count,). final (count, *shape): where an episode has ended its true last observation; else anything.
    """

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final: np.ndarray


class Environments:
    """So many copies of what `spec` names, made with these options.

    first: the number of the first. pretend_ms: a step of one of them takes so many milliseconds more. render: `picture`
    shows them.

    shape, dtype: of an observation; stack: how many frames along its first axis, the oldest first, make it. actions:
    how many there are. finished: the episodes that have ended since its user emptied the list. restarts: how often one
    was made anew. Raises UsageError, one line, where there are none of that kind, or they cannot be used.
    """

    def __init__(
        self,
        spec: str,
        options: dict[str, Any],
        count: int,
        seed: int,
        first: int = 0,
        pretend_ms: float = 0.0,
        *,
        render: bool = False,
    ):
        self.told, self.count, self.first, self.pretend = f"--env {spec}", count, first, pretend_ms / 1000
        if count < 1:
            raise UsageError(f"--envs must be 1 or more, not {count}")
        self.random = Random(seed)
        self.finished: list[EpisodeReturn] = []
        self.restarts, self.failures = 0, np.zeros(count, np.int64)
        self.episodes = np.zeros(count, np.int64)
        self.returns, self.lengths = np.zeros(count), np.zeros(count, np.int64)
        self.make, self.stack, self.clip = maker(spec, options, render)
        self.each = [self.make() for _ in range(count)]
        self.actions, self.start = actions_of(self.each[0], self.told)
        self.view = viewer(self.each[0], self.told)
        begun = [first_of(environment, self.seed_of(i), self.told) for i, environment in enumerate(self.each)]
        with blamed_on(f"{self.told}: what it shows cannot be made an array"):
            arrays = [self.view(each) for each in begun]
        self.shape, self.dtype = arrays[0].shape, arrays[0].dtype
        self.now = np.empty((count, *self.shape), self.dtype)
        for i, array in enumerate(arrays):
            self.now[i] = self.checked(array, i, UsageError)
        self.fresh = True  # nothing has been taken of these episodes yet

    def seed_of(self, i: int) -> int:
        """The seed of the present episode of environment i of this actor."""
        return int(self.random("environment", self.first + i, self.episodes[i]).integers(2**31))

    def reset(self) -> np.ndarray:
        """Begin a new episode everywhere; the first observations (count, *shape)."""
        if not self.fresh:
            for i in range(self.count):
                self.now[i] = self.begun(i)
        self.fresh = False
        return self.now.copy()

    def step(self, actions: np.ndarray) -> Stepped:
        """Take an action, int64 (count,), in each environment.

        Raises TrainingError where one shows or rewards with NaN or infinity, or has raised three times in a row.
        """
        if self.pretend:
            time.sleep(self.pretend * self.count)
        self.fresh = False
        rewards = np.zeros(self.count, np.float32)
        terminated, truncated = np.zeros(self.count, bool), np.zeros(self.count, bool)
        now = np.empty_like(self.now)
        final = now
        for i, action in enumerate(actions):
            failed = None
            try:
                shown, reward, ends, cut, _ = self.each[i].step(int(action) + self.start)
                array, reward, ends, cut = self.view(shown), float(reward), bool(ends), bool(cut)
            except (Exception, SystemExit) as error:  # an exit would leave other ranks waiting
                failed = error
            if failed is not None:
                array, ends, cut = self.now[i], False, True
            else:
                self.failures[i] = 0
                array = self.checked(array, i, TrainingError)
                self.count_reward(i, reward)
                rewards[i] = np.sign(reward) if self.clip else reward
            terminated[i], truncated[i] = ends, cut
            if not (ends or cut):
                now[i] = array
                continue
            if final is now:
                final = np.zeros_like(now)
            final[i] = array
            self.finished.append(EpisodeReturn(float(self.returns[i]), int(self.lengths[i])))
            if failed is not None:
                self.made_anew(i, failed)
            now[i] = self.begun(i)
        self.now = now
        return Stepped(now.copy(), rewards, terminated, truncated, final)

    def count_reward(self, i: int, reward: float) -> None:
        """Add it to the episode. Raises TrainingError where it is no number."""
        self.lengths[i] += 1
        self.returns[i] += reward
        if not np.isfinite(reward):
            raise TrainingError(f"{self.where(i)} gives the reward {reward}")

    def begun(self, i: int) -> np.ndarray:
        """The first observation of a new episode of environment i."""
        while True:
            self.episodes[i] += 1
            self.returns[i], self.lengths[i] = 0.0, 0
            try:
                shown, _ = self.each[i].reset(seed=self.seed_of(i))
                array = self.view(shown)
            except (Exception, SystemExit) as error:
                self.made_anew(i, error)
            else:
                return self.checked(array, i, TrainingError)

    def made_anew(self, i: int, error: BaseException) -> None:
        """Another environment takes the place of one that has raised. Raises TrainingError the third time in a row."""
        while True:
            self.restarts += 1
            self.failures[i] += 1
            if self.failures[i] >= PATIENCE:
                raise TrainingError(f"{self.where(i)} has raised three times in a row: {last_line(error)}") from error
            with contextlib.suppress(Exception, SystemExit):
                self.each[i].close()
            try:
                self.each[i] = self.make()
                return
            except (Exception, SystemExit) as another:
                error = another

    def checked(self, array: np.ndarray, i: int, kind: type[Exception]) -> np.ndarray:
        """The array, where it is one of those that may be shown; else an error of this kind is raised."""
        if array.shape != self.shape or array.dtype != self.dtype:
            was = f"{array.dtype} of shape {array.shape}, and was {self.dtype} of shape {self.shape}"
            raise kind(f"{self.where(i)} shows {was} before")
        if self.dtype != np.uint8 and not np.isfinite(array).all():
            raise kind(f"{self.where(i)} shows NaN or infinity")
        return array

    def where(self, i: int) -> str:
        """Which environment, and how far it has come."""
        return f"{self.told}: environment {self.first + i}, episode {self.episodes[i]}, step {self.lengths[i]},"

    def picture(self, i: int = 0) -> np.ndarray:
        """Environment i as a picture, uint8 (height, width, 3). Raises UsageError where it cannot be seen."""
        with blamed_on(f"{self.told} cannot be shown"):
            found = self.each[i].render()
        if not (isinstance(found, np.ndarray) and found.ndim == 3 and found.shape[2] == 3):
            raise UsageError(f"{self.told} cannot be shown: its render returns no picture (height, width, 3)")
        return found if found.dtype == np.uint8 else (255 * found).clip(0, 255).astype(np.uint8)

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint needs to go on with the episodes that come next; those that run now are lost."""
        return {"episodes": self.episodes.copy(), "restarts": np.array([self.restarts])}

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state of as many environments: `reset` begins the episodes after those. Raises UsageError."""
        if "episodes" not in state or np.shape(state["episodes"]) != (self.count,):
            raise UsageError(f"the checkpoint is not of {self.count} environments: take as many --envs as it has")
        self.episodes[:] = state["episodes"]
        self.restarts, self.fresh = int(np.asarray(state["restarts"])[0]), False

    def close(self) -> None:
        """Give back what the environments hold."""
        for environment in self.each:
            with contextlib.suppress(Exception, SystemExit):
                environment.close()


def last_line(error: BaseException) -> str:
    """Of what was raised its kind, what it says, and where: the last line of its traceback that is not ours."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {reason(error)}{where}"
