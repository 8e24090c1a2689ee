"""Copies of an environment that an actor steps together.

    environments = Environments("CartPole-v1", {}, count=8, seed=0)
    observations = environments.reset()
    stepped = environments.step(actions)                actions int64 (8,)
    replay.add(observations, actions, *stepped[1:])
    observations = stepped.observations                 of new episodes where old ones have ended

Environment i of an actor has the number first + i, and its episodes are seeded by (seed, number, episode): independent
of where it runs and of how the environments are divided among actors.

An environment that raises is replaced by a new one, and counted; its episode is truncated at its last observation, with
reward 0. The third exception in a row without a step between ends the run. (--env's names: environment_factory.py)"""

import contextlib
import os
import time
import traceback
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import TrainingError, UsageError, blamed_on, reason
from hpcdl.random import Random
from hpcdl.rl.environment_factory import actions_of, first_observation, maker, observation_converter

PATIENCE = 3  # exceptions in a row that end the run


class Episode(NamedTuple):
    """A finished episode. returned: the sum of its rewards, unclipped. length: the number of its steps."""

    returned: float
    length: int


class StepResult(NamedTuple):
    """Result of a step in each environment: rewards float32, terminated and truncated bool (count,).
    observations (count, *shape): where an episode has ended, the first one of the next. final (count, *shape): where an
    episode has ended, its last observation; undefined elsewhere."""

    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final: np.ndarray


class Environments:
    """`count` copies of the environment `spec`, made with these options. Raises UsageError if it cannot be used.

    first: number of the first copy. pretend: extra milliseconds per step of one copy. render: allow `picture`. shape,
    dtype: of an observation; stack: frames along its first axis, the oldest first. actions: number of actions.
    finished: episodes ended since the caller emptied the list. restarts: environments replaced so far."""

    def __init__(
        self, spec: str, options: dict, count: int, seed: int, first: int = 0, pretend: float = 0, render: bool = False
    ):
        self.option, self.count, self.first, self.pretend = f"--env {spec}", count, first, pretend / 1000
        self.random = Random(seed)
        self.finished: list[Episode] = []
        self.restarts, self.failures = 0, np.zeros(count, np.int64)
        self.episodes = np.zeros(count, np.int64)
        self.returns, self.lengths = np.zeros(count), np.zeros(count, np.int64)
        self.make, self.stack, self.clip = maker(spec, options, render)
        self.copies = [self.make() for _ in range(count)]
        self.actions, self.start = actions_of(self.copies[0], self.option)
        self.view = observation_converter(self.copies[0], self.option)
        begun = [first_observation(each, self.seed_of(i), self.option) for i, each in enumerate(self.copies)]
        with blamed_on(f"{self.option}: its observation cannot be converted to an array"):
            arrays = [self.view(each) for each in begun]
        self.shape, self.dtype = arrays[0].shape, arrays[0].dtype
        self.current = np.empty((count, *self.shape), self.dtype)
        for i, array in enumerate(arrays):
            self.current[i] = self.checked_observation(array, i, UsageError)
        self.fresh = True  # no step was taken since the constructor's reset

    def seed_of(self, i: int) -> int:
        """Return the seed of the current episode of environment i."""
        return int(self.random("environment", self.first + i, self.episodes[i]).integers(2**31))

    def reset(self) -> np.ndarray:
        """Begin a new episode in each environment; return the first observations (count, *shape)."""
        if not self.fresh:
            for i in range(self.count):
                self.current[i] = self.begin_episode(i)
        self.fresh = False
        return self.current.copy()

    def step(self, actions: np.ndarray) -> StepResult:
        """Take an action, int64 (count,), in each environment.
        Raises TrainingError for an invalid observation or reward, and after three exceptions in a row."""
        if self.pretend:
            time.sleep(self.pretend * self.count)
        self.fresh = False
        rewards = np.zeros(self.count, np.float32)
        terminated, truncated = np.zeros(self.count, bool), np.zeros(self.count, bool)
        now = np.empty_like(self.current)
        final = now
        for i, action in enumerate(actions):
            failed = None
            try:
                shown, reward, ends, cut, _ = self.copies[i].step(int(action) + self.start)
                array, reward, ends, cut = self.view(shown), float(reward), bool(ends), bool(cut)
            except (Exception, SystemExit) as error:  # an exit would leave other ranks waiting
                failed, array, ends, cut = error, self.current[i], False, True
            else:
                self.failures[i] = 0
                array = self.checked_observation(array, i, TrainingError)
                self.count_reward(i, reward)
                rewards[i] = np.sign(reward) if self.clip else reward
            terminated[i], truncated[i] = ends, cut
            if not (ends or cut):
                now[i] = array
                continue
            if final is now:
                final = np.zeros_like(now)
            final[i] = array
            self.finished.append(Episode(float(self.returns[i]), int(self.lengths[i])))
            if failed is not None:
                self.replace_environment(i, failed)
            now[i] = self.begin_episode(i)
        self.current = now
        return StepResult(now.copy(), rewards, terminated, truncated, final)

    def count_reward(self, i: int, reward: float) -> None:
        """Add a reward to the episode of environment i. Raises TrainingError if the reward is not finite."""
        self.lengths[i] += 1
        self.returns[i] += reward
        if not np.isfinite(reward):
            raise TrainingError(f"{self.where(i)} returned the reward {reward}, which is not finite")

    def begin_episode(self, i: int) -> np.ndarray:
        """Begin a new episode of environment i and return its first observation."""
        while True:
            self.episodes[i] += 1
            self.returns[i], self.lengths[i] = 0.0, 0
            try:
                shown, _ = self.copies[i].reset(seed=self.seed_of(i))
                array = self.view(shown)
            except (Exception, SystemExit) as error:
                self.replace_environment(i, error)
            else:
                return self.checked_observation(array, i, TrainingError)

    def replace_environment(self, i: int, error: BaseException) -> None:
        """Replace an environment that has raised. Raises TrainingError the third time in a row."""
        while True:
            self.restarts += 1
            self.failures[i] += 1
            if self.failures[i] >= PATIENCE:
                raise TrainingError(f"{self.where(i)} has raised three times in a row: {last_line(error)}") from error
            with contextlib.suppress(Exception, SystemExit):
                self.copies[i].close()
            try:
                self.copies[i] = self.make()
                return
            except (Exception, SystemExit) as another:
                error = another

    def checked_observation(self, array: np.ndarray, i: int, kind: type[Exception]) -> np.ndarray:
        """Return the observation if its shape, type and values are valid; else raise an error of this kind."""
        if array.shape != self.shape or array.dtype != self.dtype:
            first = f"the first observation was {self.dtype} of shape {self.shape}"
            raise kind(f"{self.where(i)} shows {array.dtype} of shape {array.shape}, but {first}")
        if self.dtype != np.uint8 and not np.isfinite(array).all():
            raise kind(f"{self.where(i)} shows NaN or infinity in its observation")
        return array

    def where(self, i: int) -> str:
        return f"{self.option}: environment {self.first + i}, episode {self.episodes[i]}, step {self.lengths[i]},"

    def picture(self, i: int = 0) -> np.ndarray:
        """Return a picture of environment i, uint8 (height, width, 3). Raises UsageError if it has none."""
        with blamed_on(f"{self.option} cannot be shown in a picture"):
            picture = self.copies[i].render()
        if not (isinstance(picture, np.ndarray) and picture.ndim == 3 and picture.shape[2] == 3):
            raise UsageError(f"{self.option} cannot be shown in a picture: render() gave no array (height, width, 3)")
        return picture if picture.dtype == np.uint8 else (255 * picture).clip(0, 255).astype(np.uint8)

    def state(self) -> dict[str, np.ndarray]:
        """Return the state for a checkpoint: episode counts; unfinished episodes are not part of it."""
        return {"episodes": self.episodes.copy(), "restarts": np.array([self.restarts])}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state; `reset` begins the next episodes. Raises UsageError if the number of copies differs."""
        if "episodes" not in state or np.shape(state["episodes"]) != (self.count,):
            raise UsageError(f"the checkpoint is not of {self.count} environments: give the --envs of the run before")
        self.episodes[:] = state["episodes"]
        self.restarts, self.fresh = int(np.asarray(state["restarts"])[0]), False

    def close(self) -> None:
        for environment in self.copies:
            with contextlib.suppress(Exception, SystemExit):
                environment.close()


def last_line(error: BaseException) -> str:
    """Return type, message and place of an exception: the last traceback line outside this file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {reason(error)}{where}"
