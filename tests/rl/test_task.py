"""How a policy is scored: which episodes it plays, and that it comes to an end."""

import chains
import numpy as np
import pytest

from hpcdl.rl import task
from hpcdl.rl.environments import Environments
from hpcdl.rl.task import EnvironmentTask, Episode, play, scores


class Right:
    """A network that always likes to go right."""

    def values(self, parameters, observations):
        return np.tile([0.0, 1.0], (len(observations), 1))


def make(count, seed, first):
    return Environments("chains:chain", {}, count, seed, first)


@pytest.mark.parametrize("episodes", [1, 7, 25])
def test_so_many_episodes_the_same_ones_each_time(episodes):
    played = [play(Right(), None, make, episodes, seed) for seed in (0, 0, 1)]
    assert [len(each) for each in played] == [episodes] * 3 and played[0] == played[1]
    # from where it begins, 1 to 3, it is so far to the end, where the reward is
    assert {episode.returned for episode in played[0]} == {1.0}
    assert {episode.length for each in played for episode in each} <= {2, 3, 4}
    assert played[0] != played[2] or episodes == 1


def test_they_are_other_ones_than_those_of_training():
    environments = make(3, 0, 0)
    starts = environments.current.copy()
    assert make(3, 0, 0).current.tolist() == starts.tolist()
    seeds = {environments.seed_of(i) for i in range(3)}
    assert not seeds & {make(3, 0, task.APART).seed_of(i) for i in range(3)}


def test_an_episode_that_never_ends_is_cut(monkeypatch):
    monkeypatch.setattr(task, "LONGEST", 2)
    played = play(Right(), None, make, 12, 0)
    assert len(played) == 12 and all(episode.length <= 2 or episode.returned == 1 for episode in played)


def test_scores():
    found = scores([Episode(1.0, 4), Episode(4.0, 8)])
    assert found == {"test_return": 2.5, "test_return_min": 1, "test_return_max": 4, "test_episode_length": 6}


def test_it_stands_in_the_place_of_a_data_set():
    environments = make(1, 0, 0)
    told = EnvironmentTask("chains:chain", {"a": 1}, make, environments, 3)
    about = {"name": "chains:chain", "options": {"a": 1}, "shape": [chains.STATES], "dtype": "float32", "actions": 2}
    assert told.environment == about
    x, y = told.train.rows(0, 1)
    assert x.shape == (0, chains.STATES) and len(y) == 0 and told.features == (chains.STATES,)
