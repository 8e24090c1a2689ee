"""The parts of DQN, Gorila and Ape-X: exploration, an actor, and a learner.

    target of a row     R + d Q'(s', argmax_a Q(s', a))     double DQN: R n-step return, d gamma^n, 0 if terminated
                        R + d max_a Q'(s', a)               else; Q': the target network, or Q if there is none

(van Hasselt, Guez and Silver, "Deep reinforcement learning with double Q-learning", AAAI 2016; n-step returns: Sutton,
"Learning to predict by the methods of temporal differences", 1988)"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcdl.errors import UsageError, parse_finite, parse_spec
from hpcdl.kernels import td
from hpcdl.kernels.device import Array
from hpcdl.random import Random
from hpcdl.rl.q_network import QBatch, QNetwork
from hpcdl.rl.task import finished_episodes

EPSILON: dict[str, dict[str, Any]] = {"linear": {"first": 1.0, "last": 0.04, "steps": 8_000}}
LAST = 100  # training episodes whose returns are reported
ENVIRONMENTS = "environments/"  # prefix of the environments' state in a checkpoint
BLOCK = 1024  # draws per random key


class Epsilon(NamedTuple):
    """Probability of a random action: from `first` to `last`, linear in environment steps, constant after `steps`."""

    first: float
    last: float
    steps: int

    @classmethod
    def read(cls, text: str) -> "Epsilon":
        """Parse a number, or linear:first=1,last=0.04,steps=8000. Raises UsageError."""
        try:
            found = cls(parse_finite(text), parse_finite(text), 1)
        except ValueError:
            found = cls(**parse_spec("epsilon", text, EPSILON)[1])
        if not (0 <= found.first <= 1 and 0 <= found.last <= 1 and found.steps > 0):
            raise UsageError(f"--epsilon {text}: first and last are probabilities, from 0 to 1; steps is more than 0")
        return found

    def __call__(self, step: int) -> float:
        return self.first + (self.last - self.first) * min(1.0, step / self.steps)


class Explorer:
    """Random numbers of exploration, keyed by each environment copy's global number and step, not by actor or leg."""

    def __init__(self, random: Random, first: int, count: int, actions: int):
        self.random, self.first, self.count, self.actions = random, first, count, actions
        self.block, self.chance, self.action = -1, np.zeros((0, count)), np.zeros((0, count), np.int64)

    def draw(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each copy a uniform number in [0, 1) and a random action."""
        block, offset = divmod(step, BLOCK)
        if block != self.block:
            generators = [self.random("explore", self.first + i, block) for i in range(self.count)]
            self.chance = np.stack([each.random(BLOCK) for each in generators], axis=1)
            self.action = np.stack([each.integers(0, self.actions, BLOCK) for each in generators], axis=1)
            self.block = block
        return self.chance[offset], self.action[offset]


class Actor:
    """Acts in `environments`, and hands each step to `add`, which takes the arguments of Replay.add.
    first: global number of the first copy. since: number of steps in earlier legs, after which random numbers
    continue. steps: of each copy after `since`. episodes: number of finished episodes; returns: of the last LAST."""

    def __init__(self, network: QNetwork, environments: Any, random: Random, add: Any, first: int = 0, since: int = 0):
        self.network, self.environments, self.add, self.since = network, environments, add, since
        self.explorer = Explorer(random, first, environments.count, network.actions)
        self.steps = self.episodes = 0
        self.returns: list[float] = []
        self.action_history: list[list[int]] = [[] for _ in range(environments.count)]  # actions of unfinished episodes
        self.observations: np.ndarray = np.zeros(0)
        self.begun = False

    def begin(self) -> None:
        """Begin the first episodes, unless a checkpoint was loaded."""
        if not self.begun:
            self.observations = self.environments.reset()
            self.begun = True

    def act(self, parameters: Array, epsilon: Any) -> None:
        """Step each copy: randomly with probability epsilon (a number, or one for each copy), else greedily."""
        chance, actions = self.explorer.draw(self.since + self.steps)
        if (chance >= epsilon).any():
            best = self.network.values(parameters, self.observations).argmax(axis=1)
            actions = np.where(chance < epsilon, actions, best)
        stepped = self.environments.step(actions)
        self.add(self.observations, actions, *stepped[1:])
        self.observations = stepped.observations
        self.steps += 1
        for i, action in enumerate(actions.tolist()):
            self.action_history[i].append(action)
            if stepped.terminated[i] or stepped.truncated[i]:
                self.action_history[i] = []
        for returned, _ in finished_episodes(self.environments):
            self.episodes += 1
            self.returns = [*self.returns[1 - LAST :], float(returned)]

    def scores(self) -> dict[str, float]:
        return return_scores(self.episodes, self.returns)

    def state(self) -> dict[str, np.ndarray]:
        """Return the state for a checkpoint, with the actions of unfinished episodes."""
        return {
            "counts": np.array([self.steps, self.episodes], np.int64),
            "returns": np.array(self.returns, np.float64),
            "lengths": np.array([len(each) for each in self.action_history], np.int64),
            "actions": np.array([action for each in self.action_history for action in each], np.int64),
            "observations": self.observations,
        } | {f"{ENVIRONMENTS}{name}": value for name, value in self.environments.state().items()}

    def load(self, state: dict[str, np.ndarray]) -> bool:
        """Restore a state: begin the unfinished episodes with their seeds, and repeat their actions; return True.
        If this does not lead to the saved observations, begin new episodes and return False."""
        environments, self.begun = self.environments, True
        begun = {name: state[f"{ENVIRONMENTS}{name}"] for name in environments.state()}
        self.steps, self.episodes = map(int, state["counts"])
        self.returns = state["returns"].tolist()
        environments.load(begun | {"episodes": begun["episodes"] - 1})
        environments.reset()
        histories = np.split(state["actions"], np.cumsum(state["lengths"])[:-1])
        if repeat_actions(environments, histories) and np.array_equal(environments.current, state["observations"]):
            self.action_history = [each.tolist() for each in histories]
            self.observations = environments.current.copy()
            return True
        environments.load(begun)
        self.observations = environments.reset()
        return False


def return_scores(episodes: int, returns: Sequence[float]) -> dict[str, float]:
    """Return the number of training episodes and, unless `returns` is empty, its mean, smallest and largest value."""
    scores: dict[str, float] = {"episodes": episodes}
    if returns:
        scores |= {f"return_{name}": float(getattr(np, name)(returns)) for name in ("mean", "min", "max")}
    return scores


def repeat_actions(environments: Any, actions: list[np.ndarray]) -> bool:
    """Repeat the actions of each copy in environments that have begun an episode; False if a step raises."""
    for i, each in enumerate(actions):
        for action in each:
            try:
                shown, reward, *_ = environments.copies[i].step(int(action) + environments.start)
                environments.count_reward(i, float(reward))
                environments.current[i] = environments.view(shown)
            except Exception:
                return False
    return True


class Learner:
    """Computes gradients of samples. target: parameters of the target network; None: the network is its own target."""

    def __init__(self, network: QNetwork, target: Array | None, double: bool = True):
        self.network, self.target, self.double = network, target, double

    def targets(self, parameters: Array, sample: Any) -> np.ndarray:
        """Return the targets (rows,) for the values of the actions taken."""
        target = parameters if self.target is None else self.target
        valued = chosen = self.network.values(target, sample.next_observations)
        if self.double and self.target is not None:
            chosen = self.network.values(parameters, sample.next_observations)
        return td.targets(valued, chosen, sample.returns, sample.discounts)

    def gradient(
        self, parameters: Array, sample: Any, gradient: Array, model: Any = None, step: int = 0, whole: bool = True
    ) -> tuple[float, np.ndarray]:
        """Add the gradient of a sample's losses to `gradient`; return the sum of losses and |errors| (rows,).
        model: a straggler's wrapper of the network; None: the network. step: number of the update. whole: True: divide
        weights by the largest; False: the sample is part of a batch, by whose largest weight the caller divides."""
        rows = len(sample.actions)
        targets = self.targets(parameters, sample)
        weights = sample.weights / sample.weights.max(initial=0) if whole and rows else sample.weights
        batch = QBatch(sample.observations, sample.actions, targets, weights, rows, step=step)
        loss = (model or self.network).loss_and_gradient(parameters, batch, gradient)
        return loss, batch.errors
