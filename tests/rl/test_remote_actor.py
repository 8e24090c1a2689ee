"""An actor on a rank of its own: chunks of what it sees, with errors by the parameters it acts by, until it is told."""

import contextlib
from types import SimpleNamespace

import chains
import numpy as np
import pytest

from hpcdl.errors import LoneError, TrainingError, UsageError
from hpcdl.random import Random
from hpcdl.rl.agent import Actor
from hpcdl.rl.environments import Environments
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.remote_actor import act, failing_alone, make_actor, make_recorder, td_errors
from hpcdl.rl.replay import Replay
from hpcdl.rl.tally import RankCounts

OPTIONS = SimpleNamespace(chunk=5, n_step=2, gamma=chains.GAMMA)


class Stopwatch:
    """Counts steps and fetches, and how deep it is in them."""

    def __init__(self):
        self.steps = self.fetches = 0

    @contextlib.contextmanager
    def step(self, name):
        assert name == "act"
        self.steps += 1
        yield

    @contextlib.contextmanager
    def fetching(self):
        self.fetches += 1
        yield


class Kept:
    """In the place of a feeder: keeps so many chunks, then all is over."""

    def __init__(self, most):
        self.most, self.chunks, self.closed, self.meanwhile = most, [], 0, []

    @property
    def over(self):
        return len(self.chunks) >= self.most

    def send(self, chunk, meanwhile):
        assert not self.over
        self.chunks.append(chunk)
        self.meanwhile.append(meanwhile)

    def close(self):
        self.closed += 1


@pytest.fixture
def parts():
    """Two copies of the chain, a network, and what records and counts."""
    environments = Environments("chains:chain", {}, 2, seed=3, first=4)
    network = QNetwork(environments.shape, environments.actions, "mlp:6", "float64")
    recorder, run = make_recorder(OPTIONS, environments), SimpleNamespace(stopwatch=Stopwatch())
    return SimpleNamespace(
        run=run,
        environments=environments,
        network=network,
        recorder=recorder,
        actor=Actor(network, environments, Random(3), recorder.add, first=4),
        tally=RankCounts(),
        parameters=[network.initialize(Random(seed)) for seed in range(9)],
    )


@pytest.mark.parametrize("priorities", [False, True])
def test_it_sends_what_it_sees(parts, priorities):
    """As an actor beside its memory does, by the parameters of each chunk; epsilon is asked for before each step."""
    asked, drawn, feeder = [], [], Kept(4)

    def newest(steps):
        asked.append(steps)
        return parts.parameters[len(asked)]

    def epsilon():
        drawn.append(parts.actor.steps)
        return 0.5

    waiting = object()
    act(parts.run.stopwatch, parts.actor, parts.recorder, feeder, parts.tally, newest, epsilon, priorities, waiting)
    assert asked == [0, 10, 20, 30] and drawn == list(range(20)) and feeder.closed == 1
    assert set(feeder.meanwhile) == {waiting}
    assert (parts.run.stopwatch.steps, parts.run.stopwatch.fetches) == (4, 4)
    assert parts.tally["steps"] == 40 and parts.tally["episodes"] == parts.actor.episodes > 0

    how = {"streams": 2, "n_step": 2, "gamma": chains.GAMMA}
    remote, local = (Replay(100, (chains.STATES,), "f4", prioritized=priorities, **how) for _ in range(2))
    beside = Actor(parts.network, Environments("chains:chain", {}, 2, seed=3, first=4), Random(3), None, first=4)
    complete = []
    beside.add = lambda *step: complete.append(local.add(*step))
    beside.begin()
    for number, chunk in enumerate(feeder.chunks, 1):
        complete.clear()
        for _ in range(OPTIONS.chunk):
            beside.act(parts.parameters[number], 0.5)
        serials = chunk.add_to(remote)
        np.testing.assert_array_equal(serials, np.concatenate(complete))
        errors = td_errors(parts.network, parts.parameters[number], local.gather(serials))
        assert len(chunk.priorities) == (len(serials) if priorities else 0)
        if priorities:
            np.testing.assert_allclose(chunk.priorities, errors, rtol=1e-6)
            local.highest = max([local.highest, *local.priorities_of(chunk.priorities)])
            local.update(serials, serials, chunk.priorities)
    for name, array in remote.state().items():
        np.testing.assert_array_equal(array, local.state()[name], name)


def test_a_leg_draws_nothing_that_another_has_drawn(parts):
    """Neither actions nor the seeds of episodes; the first leg is as DQN."""
    seen = []
    for before in (0, 0, 40):
        environments, kept = Environments("chains:chain", {}, 2, seed=3, first=4), []
        actor = make_actor(parts.network, environments, Random(3), lambda *_: None, 4, before)
        actor.begin()
        for _ in range(40):
            kept.append((environments.seed_of(0), *actor.explorer.draw(actor.since + actor.steps)[0]))
            actor.act(parts.parameters[0], 1.0)
        seen.append(kept)
        assert actor.steps == 40
    assert seen[0] == seen[1]
    for column in range(3):
        assert not {each[column] for each in seen[0]} & {each[column] for each in seen[2]}


def test_errors_are_those_of_the_formula(parts):
    """|R + d max_a Q(s', a) - Q(s, a)|, with the actor's own parameters for both."""
    parameters, replay = parts.parameters[0], Replay(50, (chains.STATES,), "f4", streams=2, n_step=2, gamma=0.8)
    actor = Actor(parts.network, parts.environments, Random(0), replay.add)
    actor.begin()
    for _ in range(15):
        actor.act(parameters, 1.0)
    sample = replay.sample(20, 1.0, np.random.default_rng(0))
    values, after = (
        parts.network.values(parameters, shown) for shown in (sample.observations, sample.next_observations)
    )
    for i, error in enumerate(td_errors(parts.network, parameters, sample)):
        target = sample.returns[i] + sample.discounts[i] * after[i].max()
        assert error == pytest.approx(abs(target - values[i, sample.actions[i]]), rel=1e-6)
    assert (sample.discounts == 0).any() and (sample.discounts > 0).any()


def test_nothing_is_sent_where_all_is_over_from_the_start(parts):
    feeder = Kept(0)
    act(
        parts.run.stopwatch,
        parts.actor,
        parts.recorder,
        feeder,
        parts.tally,
        lambda steps: parts.parameters[0],
        lambda: 1.0,
    )
    assert feeder.closed == 1 and not parts.actor.steps


def test_what_an_environment_does_is_known_to_one_rank():
    with pytest.raises(LoneError, match="three times") as raised, failing_alone():
        raise TrainingError("has raised three times in a row")
    assert isinstance(raised.value.__cause__, TrainingError)
    with pytest.raises(UsageError), failing_alone():
        raise UsageError("as it is")
    with failing_alone():
        pass
