"""An environment as a run sees it, in the place of a data set: what is to be learned, and how it is scored.

A score is the mean return of episodes that the greedy policy plays: always the same ones, of seeds that no training
episode has, so that the scores of a run, and of runs of any seed, can be compared.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.chunks import chunks
from hpcdl.data.schema import Schema
from hpcdl.kernels.device import Array, Device
from hpcdl.rl.q_network import QNetwork

SIDE_BY_SIDE = 10  # episodes that are played at the same time
LONGEST = 27_000  # steps of an episode that is scored, if it does not end before: half an hour of a game
APART = 2**40  # the number of the first environment that scores: none that trains has it

Make = Callable[..., Any]  # (count, seed, first) -> Environments


class Episode(NamedTuple):
    """An episode that is over: the sum of its rewards, and its steps."""

    returned: float
    length: int


class NoRows:
    """The rows of a data set, of which there are none."""

    def __init__(self, width: tuple[int, ...]):
        self.width = width

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((0, *self.width)), np.zeros(0, np.int64)


class EnvironmentTask:
    """The environment that `make` makes copies of; `name` is what --env says, `settings` what --env-options do.

    environments: some of them, which tell what an observation is and how many actions there are.
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
        """Observations come from the host, one by one."""

    def play(self, network: QNetwork, parameters: Array, episodes: int = 0, seed: int = 0) -> list[Episode]:
        """So many episodes (0: those of an evaluation) of the greedy policy."""
        return play(network, parameters, self.make, episodes or self.episodes, seed)

    def scores(self, network: QNetwork, parameters: Array) -> dict[str, float]:
        """Those of an evaluation, by name."""
        return scores(self.play(network, parameters))


def scores(found: list[Episode]) -> dict[str, float]:
    """The mean, the least and the largest return of episodes, and their mean length."""
    returns = np.array([episode.returned for episode in found], np.float64)
    return {
        "test_return": float(returns.mean()),
        "test_return_min": float(returns.min()),
        "test_return_max": float(returns.max()),
        "test_episode_length": float(np.mean([episode.length for episode in found])),
    }


def play(network: QNetwork, parameters: Array, make: Make, episodes: int, seed: int) -> list[Episode]:
    """So many episodes of the greedy policy, in an order that depends on nothing but their number.

    Each copy of the environment plays as many as are its share, one after the other; the seeds are of those alone.
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
        finished = iter(taken(environments))
        for i in range(copies):
            episode = Episode(*next(finished)) if ended[i] else Episode(float(returned[i]), int(length[i]))
            if ended[i] and len(played[i]) < left[i]:
                played[i].append(episode)
            elif episode.length >= LONGEST:  # it never ends, nor would those after it
                played[i] += [episode] * (left[i] - len(played[i]))
        returned[ended], length[ended] = 0, 0
    return [episode for each in played for episode in each]


def taken(environments: Any) -> list[Any]:
    """The episodes that have come to their end since this was asked last: (return, length) of each, in their order."""
    found, environments.finished = environments.finished, []
    return found
