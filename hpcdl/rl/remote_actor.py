"""An actor on a rank of its own: it acts by parameters that it gets now and then, and sends what it sees.

    until the memory says that all is over
        parameters <- the newest
        act until a chunk is full
        priorities <- |TD errors| of its transitions by these parameters      Ape-X; else none
        send the chunk, when there is leave to                                transition_stream.py

(Nair et al., "Massively parallel methods for deep reinforcement learning", 2015; Horgan et al., "Distributed
prioritized experience replay", ICLR 2018)
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdl.errors import LoneError, TrainingError
from hpcdl.kernels.device import Array
from hpcdl.random import Random
from hpcdl.rl.agent import Actor, Learner
from hpcdl.rl.chunk import ChunkRecorder
from hpcdl.rl.environments import Environments
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Sample
from hpcdl.rl.tally import RankCounts
from hpcdl.rl.transition_stream import Feeder
from hpcdl.runs.run import Run


@contextlib.contextmanager
def failing_alone() -> Iterator[None]:
    """What an environment raises on one rank is a failure that only this rank knows."""
    try:
        yield
    except TrainingError as error:
        raise LoneError(str(error)) from error


def made_recorder(options: Any, environments: Environments) -> ChunkRecorder:
    """For chunks of so many steps as the options say."""
    return ChunkRecorder(
        options.chunk,
        environments.shape,
        environments.dtype,
        streams=environments.count,
        stack=environments.stack,
        n_step=options.n_step,
        gamma=options.gamma,
    )


def made_actor(
    network: QNetwork, environments: Environments, random: Random, add: Callable, first: int, before: int
) -> Actor:
    """One that begins new episodes, after so many environment steps of all: no leg of a run draws what another has."""
    if before:
        environments.load({"episodes": np.full(environments.count, before), "restarts": [0]})
    return Actor(network, environments, random, add, first, since=before)


def errors_of(network: QNetwork, parameters: Array, transitions: Sample) -> np.ndarray:
    """|Q(s, a) - R - d max_a Q(s', a)| (rows,): as the actor itself, which has no target network, sees them."""
    targets = Learner(network, None).targets(parameters, transitions)
    values = network.values(parameters, transitions.observations)
    found: np.ndarray = np.abs(values[np.arange(len(targets)), transitions.actions] - targets)
    return found


def act(
    run: Run,
    actor: Actor,
    recorder: ChunkRecorder,
    feeder: Feeder,
    tally: RankCounts,
    newest: Callable[[int], Array],
    epsilon: Callable[[], Any],
    priorities: bool = False,
    meanwhile: Callable[[], bool] | None = None,
) -> None:
    """What the actor does until it is told that all is over; its `add` is that of the recorder.

    newest(steps): parameters to act by, after so many environment steps of this rank. epsilon(): the probability of a
    random action, for all copies or for each. meanwhile: what is done while it waits.
    """
    environments = actor.environments
    actor.begin()
    while not feeder.over:
        with run.stopwatch.step("act"):
            parameters = newest(actor.steps * environments.count)
            with run.stopwatch.fetching(), failing_alone():
                while not recorder.full:
                    actor.act(parameters, epsilon())
            errors = errors_of(actor.network, parameters, recorder.transitions()) if priorities else None
            tally.note(actor, environments)
            feeder.send(recorder.take(errors), meanwhile)
    feeder.close()
