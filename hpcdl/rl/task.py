"""An environment in the place of a data set: what a run learns, and how it is scored.

The score is the mean return of episodes that the greedy policy plays. Their seeds are fixed and differ from those of
all training episodes, so that scores can be compared within a run and between runs of any seed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.data.schema import Schema
from hpcdl.kernels.device import Array, Device
from hpcdl.rl.environments import Episode
from hpcdl.rl.q_network import QNetwork

SIDE_BY_SIDE = 10  # episodes played at the same time
LONGEST = 27_000  # most steps of a scored episode: half an hour of an Atari game
APART = 2**40  # number of the first scoring environment; training ones have smaller numbers

Make = Callable[..., Any]  # (count, seed, first) -> Environments


class EnvironmentTask:
    """The environment as a run's data set. name, settings: --env and --env-options. make(count, seed, first): makes
    copies. environments: copies that show the shape of observations and the actions. episodes: played for a score."""

    sparse = False
    outputs: tuple[int, ...] = ()
    examples = 0
    vocabulary = validation = test = scales = digest = None
    order = "as the environment goes"
    unit = 1.0

    def __init__(self, name: str, settings: dict[str, Any], make: Make, environments: Any, episodes: int):
        self.name = self.source = name
        self.make, self.episodes = make, episodes
        self.features, self.classes = tuple(environments.shape), int(environments.actions)
        self.schema, self.statistics = Schema(), {}  # type: Schema, dict[str, np.ndarray]
        empty = np.zeros((0, *self.features)), np.zeros(0, np.int64)
        self.train = SimpleNamespace(rows=lambda start, stop: empty)
        self.environment: dict[str, Any] = {"name": name, "options": settings, "shape": list(self.features)}
        self.environment |= {"dtype": np.dtype(environments.dtype).name, "actions": self.classes}

    def to(self, device: Device) -> None:
        """Do nothing: observations come from the host."""

    def scores(self, network: QNetwork, parameters: Array) -> dict[str, float]:
        return scores(play(network, parameters, self.make, self.episodes, seed=0))


def scores(episodes: list[Episode]) -> dict[str, float]:
    """Return mean, smallest and largest return of episodes, and their mean length."""
    returns = np.array([episode.returned for episode in episodes], np.float64)
    return {
        "test_return": float(returns.mean()),
        "test_return_min": float(returns.min()),
        "test_return_max": float(returns.max()),
        "test_episode_length": float(np.mean([episode.length for episode in episodes])),
    }


def play(
    network: QNetwork, parameters: Array, make: Make, episodes: int, seed: int, watch: Callable[[], None] | None = None
) -> list[Episode]:
    """Play episodes with the greedy policy; each copy of the environment plays its share, one episode after another.
    The order depends only on the number of episodes. watch(): called first and after each step that ends no episode."""
    copies = min(episodes, SIDE_BY_SIDE)
    left = [part.stop - part.start for part in chunks(episodes, copies)]
    environments = make(copies, seed, APART)
    played: list[list[Episode]] = [[] for _ in range(copies)]
    returned, length = np.zeros(copies), np.zeros(copies, np.int64)
    observations = environments.reset()
    if watch:
        watch()
    while any(len(each) < wanted for each, wanted in zip(played, left, strict=True)):
        stepped = environments.step(network.values(parameters, observations).argmax(axis=1))
        observations, ended = stepped.observations, stepped.terminated | stepped.truncated
        returned, length = returned + stepped.rewards, length + 1
        if watch and not ended.any():  # afterwards the environment shows the next episode
            watch()
        finished = iter(finished_episodes(environments))
        for i in range(copies):
            episode = next(finished) if ended[i] else Episode(float(returned[i]), int(length[i]))
            if ended[i] and len(played[i]) < left[i]:
                played[i].append(episode)
            elif episode.length >= LONGEST:  # an endless episode: the copy's later ones count the same
                played[i] += [episode] * (left[i] - len(played[i]))
        returned[ended], length[ended] = 0, 0
    return [episode for each in played for episode in each]


def finished_episodes(environments: Any) -> list[Episode]:
    """Return the episodes that have finished since the last call, in order."""
    finished: list[Episode] = environments.finished
    environments.finished = []
    return finished
