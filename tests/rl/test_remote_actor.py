"""An actor on a rank of its own: chunks of what it sees, with errors by the parameters it acts by, until it is told."""

import chains
import numpy as np
import pytest
from agent_ranks import Takes, agent_rank, network
from plain_replay import assert_same

from hpcdl.errors import LoneError, TrainingError, UsageError
from hpcdl.random import Random
from hpcdl.rl.agent import Actor
from hpcdl.rl.environments import Environments
from hpcdl.rl.remote_actor import act, failing_alone, td_errors
from hpcdl.rl.replay import Replay


def environments():
    """Two copies of the chain, the third rank's."""
    return Environments("chains:chain", {}, 2, seed=3, first=4)


def test_it_sends_what_it_sees():
    """As an actor beside its memory does, by the parameters of each chunk."""
    asked, feeder, rank = [], Takes(4), agent_rank(network(), environments())
    parameters = [rank.network.initialize(Random(seed)) for seed in range(5)]

    def newest(steps):
        asked.append(steps)
        return parameters[len(asked)]

    act(rank, feeder, newest, priorities=True)
    assert asked == [0, 16, 32, 48] and feeder.closed == 1
    assert rank.tally["steps"] == 64 and rank.tally["episodes"] > 0

    how = {"streams": 2, "n_step": 3, "gamma": chains.GAMMA, "prioritized": True}
    remote, local = (Replay(200, (chains.STATES,), "f4", **how) for _ in range(2))
    complete = []
    beside = Actor(rank.network, environments(), Random(3), lambda *step: complete.append(local.add(*step)), first=4)
    beside.begin()
    for number, chunk in enumerate(feeder.chunks, 1):
        complete.clear()
        for _ in range(8):
            beside.act(parameters[number], 0.7)
        serials = chunk.add_to(remote)
        np.testing.assert_array_equal(serials, np.concatenate(complete))
        errors = td_errors(rank.network, parameters[number], local.gather(serials))
        np.testing.assert_allclose(chunk.priorities, errors, rtol=1e-6)
        local.highest = max([local.highest, *local.priorities_of(chunk.priorities)])
        local.update(serials, serials, chunk.priorities)
    assert_same(remote, local.state())


def test_epsilon_goes_by_the_steps_of_all_actors():
    """Of three ranks with two copies each, after those of earlier legs: 40 steps of a copy here are 240 of all."""
    rank, taken = agent_rank(network(), environments(), epsilon="linear:first=1,last=0,steps=1000"), []
    act_ = Actor.act
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actor, "act", lambda self, w, epsilon: (taken.append(epsilon), act_(self, w, epsilon)))
        act(rank, Takes(5), lambda steps: rank.network.initialize(Random(0)), 100, np.array([1, 2]))
    np.testing.assert_allclose(taken, [[e, e**2] for e in 1 - (100 + 6 * np.arange(40)) / 1000])


def test_a_leg_draws_nothing_that_another_has_drawn():
    """Neither actions nor the seeds of episodes; the first leg is as DQN."""
    seen = []
    for before in (0, 0, 40):
        rank, drawn = agent_rank(network(), environments()), []
        actor = rank.actor(lambda *_: None, before)
        actor.begin()
        for _ in range(40):
            drawn.append((rank.environments.seed_of(0), *actor.explorer.draw(actor.since + actor.steps)[0]))
            actor.act(rank.network.initialize(Random(0)), 1.0)
        seen.append(drawn)
        assert actor.steps == 40
    assert seen[0] == seen[1]
    for column in range(3):
        assert not {each[column] for each in seen[0]} & {each[column] for each in seen[2]}


def test_nothing_is_sent_where_all_is_over_from_the_start():
    feeder, rank = Takes(0), agent_rank(network(), environments())
    act(rank, feeder, lambda steps: pytest.fail("asks for parameters"))
    assert feeder.closed == 1 and not rank.tally["steps"]


def test_what_an_environment_does_is_known_to_one_rank():
    with pytest.raises(LoneError, match="three times") as raised, failing_alone():
        raise TrainingError("has raised three times in a row")
    assert isinstance(raised.value.__cause__, TrainingError)
    with pytest.raises(UsageError), failing_alone():
        raise UsageError("as it is")
