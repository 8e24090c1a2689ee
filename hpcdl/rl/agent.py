"""What acts, and what learns from what was seen: the parts that DQN, Gorila and Ape-X are made of.

    Epsilon     how often an action is random, by the environment steps so far
    Actor       acts in its copies of an environment, and hands on what it sees
    Learner     makes the gradient of a sample, with the values of a target network

    target of a row     R + d Q'(s', argmax_a Q(s', a))     double DQN: R the n-step return, d gamma^n, or 0 at the end
                        R + d max_a Q'(s', a)               without; Q' is the target network, or Q if there is none

(Mnih et al., Nature 2015; van Hasselt, Guez and Silver, "Deep reinforcement learning with double Q-learning", AAAI
2016; Sutton, "Learning to predict by the methods of temporal differences", 1988, for returns of n steps.)
"""

import contextlib
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError, finite, parse_spec
from hpcdl.kernels import td
from hpcdl.kernels.device import Array
from hpcdl.random import Random
from hpcdl.rl.q_network import QBatch, QNetwork
from hpcdl.rl.task import taken

EPSILON: dict[str, dict[str, Any]] = {"linear": {"first": 1.0, "last": 0.04, "steps": 8_000}}
LAST = 100  # training episodes whose returns are told
THEIRS = "environments/"  # begins the names of what a checkpoint holds of them
BLOCK = 1024  # draws of one key


class Epsilon(NamedTuple):
    """The probability of a random action: from `first` to `last`, linearly in so many environment steps."""

    first: float
    last: float
    steps: int

    @classmethod
    def read(cls, text: str) -> "Epsilon":
        """From a number, or linear:first=1,last=0.04,steps=8000. Raises UsageError."""
        with contextlib.suppress(ValueError):
            return cls(finite(text), finite(text), 1)._checked(text)
        return cls(**parse_spec("epsilon", text, EPSILON)[1])._checked(text)

    def _checked(self, text: str) -> "Epsilon":
        if not (0 <= self.first <= 1 and 0 <= self.last <= 1 and self.steps > 0):
            raise UsageError(f"--epsilon {text}: first and last are probabilities, from 0 to 1, and steps more than 0")
        return self

    def __call__(self, step: int) -> float:
        """After so many environment steps."""
        return self.first + (self.last - self.first) * min(1.0, step / self.steps)


class Explorer:
    """What the copies of an environment draw, in their step 0, 1, 2, ...: each copy by its own number, for all time.

    So it does not matter how copies are divided among actors, nor where a run was gone on with.
    """

    def __init__(self, random: Random, first: int, count: int, actions: int):
        self.random, self.first, self.count, self.actions = random, first, count, actions
        self.block, self.chance, self.action = -1, np.zeros((0, count)), np.zeros((0, count), np.int64)

    def draw(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """For each copy a number from 0 to 1, and an action."""
        block, at = divmod(step, BLOCK)
        if block != self.block:
            keyed = [self.random("explore", self.first + i, block) for i in range(self.count)]
            self.chance = np.stack([each.random(BLOCK) for each in keyed], axis=1)
            self.action = np.stack([each.integers(0, self.actions, BLOCK) for each in keyed], axis=1)
            self.block = block
        return self.chance[at], self.action[at]


class Actor:
    """Acts in `environments`, the first of which has the number `first`; `add` is that of a replay.

    since: what is drawn is that of the steps after so many. steps: of each copy so far. episodes: that have ended;
    returns: of the last of them.
    """

    def __init__(self, network: QNetwork, environments: Any, random: Random, add: Any, first: int = 0, since: int = 0):
        self.network, self.environments, self.add, self.since = network, environments, add, since
        self.explorer = Explorer(random, first, environments.count, network.actions)
        self.steps = self.episodes = 0
        self.returns: list[float] = []
        self.taken: list[list[int]] = [[] for _ in range(environments.count)]  # actions of the episodes that go on
        self.observations: np.ndarray = np.zeros(0)
        self.begun = False

    def begin(self) -> None:
        """The first episodes begin, unless those of a checkpoint have."""
        if not self.begun:
            self.observations = self.environments.reset()
            self.begun = True

    def act(self, parameters: Array, epsilon: Any) -> None:
        """A step of each copy: the best action by these parameters, or with probability epsilon any.

        epsilon: a number, or one for each copy.
        """
        chance, actions = self.explorer.draw(self.since + self.steps)
        if (chance >= epsilon).any():
            best = self.network.values(parameters, self.observations).argmax(axis=1)
            actions = np.where(chance < epsilon, actions, best)
        stepped = self.environments.step(actions)
        self.add(self.observations, actions, *stepped[1:])
        self.observations = stepped.observations
        self.steps += 1
        for i, action in enumerate(actions.tolist()):
            self.taken[i].append(action)
            if stepped.terminated[i] or stepped.truncated[i]:
                self.taken[i] = []
        for returned, _ in taken(self.environments):
            self.episodes += 1
            self.returns = [*self.returns[1 - LAST :], float(returned)]

    def scores(self) -> dict[str, float]:
        """Of the training episodes: how many, and the mean, the least and the largest return of the last ones."""
        if not self.returns:
            return {"episodes": self.episodes}
        of = np.array(self.returns)
        found = {"return_mean": of.mean(), "return_min": of.min(), "return_max": of.max()}
        return {"episodes": self.episodes} | {name: float(value) for name, value in found.items()}

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds of it, among it how the environments have come to where they are."""
        return {
            "counts": np.array([self.steps, self.episodes], np.int64),
            "returns": np.array(self.returns, np.float64),
            "lengths": np.array([len(each) for each in self.taken], np.int64),
            "actions": np.array([action for each in self.taken for action in each], np.int64),
            "observations": self.observations,
        } | {f"environments/{name}": value for name, value in self.environments.state().items()}

    def load(self, state: dict[str, np.ndarray]) -> bool:
        """Go on from there; False where the environments do not come to where they were, and begin new episodes.

        An episode is begun with its seed again, and its actions are taken again.
        """
        of = {name.removeprefix(THEIRS): value for name, value in state.items() if name.startswith(THEIRS)}
        self.steps, self.episodes = map(int, state["counts"])
        self.returns, self.begun = state["returns"].tolist(), True
        self.environments.load(of | {"episodes": of["episodes"] - 1})
        self.environments.reset()
        pieces = np.split(state["actions"], np.cumsum(state["lengths"])[:-1])
        if retrace(self.environments, pieces) and np.array_equal(self.environments.now, state["observations"]):
            self.taken = [each.tolist() for each in pieces]
            self.observations = self.environments.now.copy()
            return True
        self.environments.load(of)
        self.observations = self.environments.reset()
        return False


def retrace(environments: Any, actions: list[np.ndarray]) -> bool:
    """Let each environment, which has begun an episode, take these actions; False where one raises."""
    for i, each in enumerate(actions):
        for action in each:
            try:
                shown, reward, *_ = environments.each[i].step(int(action) + environments.start)
                environments.count_reward(i, float(reward))
                environments.now[i] = environments.view(shown)
            except Exception:
                return False
    return True


class Learner:
    """Makes gradients of samples. target: the parameters of the target network; None: the network's own are taken."""

    def __init__(self, network: QNetwork, target: Array | None, double: bool = True):
        self.network, self.target, self.double = network, target, double

    def targets(self, parameters: Array, sample: Any) -> np.ndarray:
        """What the values of the actions that were taken should be, (rows,)."""
        held = parameters if self.target is None else self.target
        valued = chosen = self.network.values(held, sample.next_observations)
        if self.double and self.target is not None:
            chosen = self.network.values(parameters, sample.next_observations)
        return td.targets(valued, chosen, sample.returns, sample.discounts)

    def gradient(
        self, parameters: Array, sample: Any, gradient: Array, model: Any = None, step: int = 0, whole: bool = True
    ) -> tuple[float, np.ndarray]:
        """Add the gradient of a sample's losses to `gradient`; returns their sum, and |errors| (rows,).

        model: what computes it, where that is not the network itself, as one that straggles. step: of the updates.
        whole: the sample is a whole batch, and its weights are divided by the largest of them; the gradient and the
        losses of a part remain to be divided by the largest weight of all parts.
        """
        rows = len(sample.actions)
        targets = self.targets(parameters, sample)
        weights = sample.weights / sample.weights.max(initial=0) if whole and rows else sample.weights
        batch = QBatch(sample.observations, sample.actions, targets, weights, rows, step=step)
        loss = (model or self.network).loss_and_gradient(parameters, batch, gradient)
        return loss, batch.errors
