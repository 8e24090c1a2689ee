"""An environment in the place of a data set: what a run learns, and how it is scored.

The score is the mean return of episodes that the greedy policy plays. Their seeds are fixed and differ from those of
all training episodes, so that scores can be compared within a run and between runs of any seed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.data.schema import Schema
from hpcdl.kernels.device import Array, Device
from hpcdl.rl.q_network import QNetwork

SIDE_BY_SIDE = 10  # episodes played at the same time
LONGEST = 27_000  # most steps of a scored episode: half an hour of an Atari game
APART = 2**40  # number of the first scoring environment; training ones have smaller numbers

Make = Callable[..., Any]  # (count, seed, first) -> Environments


class Episode(NamedTuple):
    """A finished episode: the sum of its rewards, and its steps."""

    returned: float
    length: int


class NoRows:
    """The rows of an empty data set."""

    def __init__(self, width: tuple[int, ...]):
        self.width = width

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((0, *self.width)), np.zeros(0, np.int64)


class EnvironmentTask:
    """The environment that `make` makes copies of; name, settings: of --env and --env-options.

    environments: some copies, for the shape of observations and the number of actions.
    """

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
        self.train = NoRows(self.features)
        self.environment = {
            "name": name,
            "options": settings,
            "shape": list(self.features),
            "dtype": np.dtype(environments.dtype).name,
            "actions": self.classes,
        }

    def to(self, device: Device) -> None:
        """Do nothing: observations come from the host."""

    def play(self, network: QNetwork, parameters: Array, episodes: int = 0, seed: int = 0) -> list[Episode]:
        """Play episodes (0: as many as an evaluation has) with the greedy policy."""
        return play(network, parameters, self.make, episodes or self.episodes, seed)

    def scores(self, network: QNetwork, parameters: Array) -> dict[str, float]:
        """Return the scores of an evaluation, by name."""
        return scores(self.play(network, parameters))


def scores(episodes: list[Episode]) -> dict[str, float]:
    """Return mean, smallest and largest return of episodes, and their mean length."""
    returns = np.array([episode.returned for episode in episodes], np.float64)
    return {
        "test_return": float(returns.mean()),
        "test_return_min": float(returns.min()),
        "test_return_max": float(returns.max()),
        "test_episode_length": float(np.mean([episode.length for episode in episodes])),
    }


def play(network: QNetwork, parameters: Array, make: Make, episodes: int, seed: int) -> list[Episode]:
    """Play episodes with the greedy policy; their order depends only on their number.

    Each copy of the environment plays its share, one after the other.
    """
    copies = min(episodes, SIDE_BY_SIDE)
    left = [part.stop - part.start for part in chunks(episodes, copies)]
    environments = make(copies, seed, APART)
    played: list[list[Episode]] = [[] for _ in range(copies)]
    returned, length = np.zeros(copies), np.zeros(copies, np.int64)
    observations = environments.reset()
    while any(len(each) < wanted for each, wanted in zip(played, left, strict=True)):
        stepped = environments.step(network.values(parameters, observations).argmax(axis=1))
        observations, ended = stepped.observations, stepped.terminated | stepped.truncated
        returned, length = returned + stepped.rewards, length + 1
        finished = iter(finished_episodes(environments))
        for i in range(copies):
            episode = Episode(*next(finished)) if ended[i] else Episode(float(returned[i]), int(length[i]))
            if ended[i] and len(played[i]) < left[i]:
                played[i].append(episode)
            elif episode.length >= LONGEST:  # an endless episode: the copy's later ones count the same
                played[i] += [episode] * (left[i] - len(played[i]))
        returned[ended], length[ended] = 0, 0
    return [episode for each in played for episode in each]


def finished_episodes(environments: Any) -> list[Any]:
    """Return (return, length) of the episodes that have finished since the last call, in order."""
    finished, environments.finished = environments.finished, []
    return finished
