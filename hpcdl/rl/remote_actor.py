"""An actor on a rank of its own: acts by parameters that it receives now and then, and sends its steps.

    until the memory says that the run is over
        parameters <- the newest
        act until a chunk is full
        priorities <- |TD errors| of its transitions by these parameters      Ape-X only
        send the chunk, when it has a credit                                  transition_stream.py

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
from hpcdl.rl.transition_stream import ChunkSender
from hpcdl.runs.stopwatch import Stopwatch


@contextlib.contextmanager
def failing_alone() -> Iterator[None]:
    """Context that turns an environment's TrainingError into a LoneError, which only this rank knows."""
    try:
        yield
    except TrainingError as error:
        raise LoneError(str(error)) from error


def make_recorder(options: Any, environments: Environments) -> ChunkRecorder:
    """Return a recorder for chunks of --chunk steps."""
    return ChunkRecorder(
        options.chunk,
        environments.shape,
        environments.dtype,
        streams=environments.count,
        stack=environments.stack,
        n_step=options.n_step,
        gamma=options.gamma,
    )


def make_actor(
    network: QNetwork, environments: Environments, random: Random, add: Callable, first: int, before: int
) -> Actor:
    """Return an actor whose episodes continue after `before` environment steps: no leg repeats another's seeds."""
    if before:
        environments.load({"episodes": np.full(environments.count, before), "restarts": [0]})
    return Actor(network, environments, random, add, first, since=before)


def td_errors(network: QNetwork, parameters: Array, transitions: Sample) -> np.ndarray:
    """Return |Q(s, a) - R - d max_a Q(s', a)| (rows,), by the actor's own network without a target network."""
    targets = Learner(network, None).targets(parameters, transitions)
    values = network.values(parameters, transitions.observations)
    errors: np.ndarray = np.abs(values[np.arange(len(targets)), transitions.actions] - targets)
    return errors


def act(
    stopwatch: Stopwatch,
    actor: Actor,
    recorder: ChunkRecorder,
    feeder: ChunkSender,
    tally: RankCounts,
    newest: Callable[[int], Array],
    epsilon: Callable[[], Any],
    priorities: bool = False,
    meanwhile: Callable[[], bool] | None = None,
) -> None:
    """Act until the memory reports the end; `actor.add` is that of the recorder.

    newest(steps): returns parameters after so many environment steps of this rank. epsilon(): probability of a random
    action, for all copies or for each. meanwhile: called while waiting.
    """
    environments = actor.environments
    actor.begin()
    while not feeder.over:
        with stopwatch.step("act"):
            parameters = newest(actor.steps * environments.count)
            with stopwatch.fetching(), failing_alone():
                while not recorder.full:
                    actor.act(parameters, epsilon())
            errors = td_errors(actor.network, parameters, recorder.transitions()) if priorities else None
            tally.note(actor, environments)
            feeder.send(recorder.take(errors), meanwhile)
    feeder.close()
