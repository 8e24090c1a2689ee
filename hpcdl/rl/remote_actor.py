"""An actor on a rank of its own: acts by parameters that it receives now and then, and sends its steps.

    until the memory says that the run is over
        parameters <- the newest
        act until a chunk is full
        priorities <- |TD errors| of its transitions by these parameters      Ape-X only
        send the chunk, when it has a credit                                  transition_stream.py

(Nair et al., 2015: gorila.py; Horgan et al., 2018: apex.py)"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcdl.errors import LoneError, TrainingError
from hpcdl.kernels.device import Array
from hpcdl.rl.agent import Epsilon, Learner
from hpcdl.rl.agent_rank import AgentRank
from hpcdl.rl.chunk import ChunkRecorder
from hpcdl.rl.q_network import QNetwork
from hpcdl.rl.replay import Sample
from hpcdl.rl.transition_stream import ChunkReceiver, ChunkSender


@contextlib.contextmanager
def failing_alone() -> Iterator[None]:
    """Context that turns an environment's TrainingError into a LoneError: only this rank knows of the error."""
    try:
        yield
    except TrainingError as error:
        raise LoneError(str(error)) from error


def chunk_sender(rank: AgentRank) -> ChunkSender:
    """Return the sender of chunks from this actor to its memory."""
    return ChunkSender(rank.everyone, rank.roles.memory_of(rank.everyone.rank), rank.tally)


def chunk_receiver(rank: AgentRank) -> ChunkReceiver:
    """Return the receiver of the chunks of this memory's actors."""
    actors = rank.roles.actors_of(rank.everyone.rank)
    return ChunkReceiver(rank.everyone, actors, rank.roles.envs, rank.replay, rank.tally)


def td_errors(network: QNetwork, parameters: Array, transitions: Sample) -> np.ndarray:
    """Return |Q(s, a) - R - d max_a Q(s', a)| (rows,), by the actor's own network without a target network."""
    targets = Learner(network, None).targets(parameters, transitions)
    values = network.values(parameters, transitions.observations)
    errors: np.ndarray = np.abs(values[np.arange(len(targets)), transitions.actions] - targets)
    return errors


def act(
    rank: AgentRank, feeder: ChunkSender, newest: Callable, since: int = 0, exponents: Any = 1, priorities: bool = False
) -> None:
    """Act until the memory reports the end. newest(steps): parameters to act by after `steps` steps of this actor.
    since: environment steps of earlier legs. exponents: of epsilon, one for all copies or an array. Epsilon falls with
    the steps of all actors, estimated from this actor's. priorities: True to send |TD errors|."""
    environments, options = rank.environments, rank.options
    about = {"stack": environments.stack, "n_step": options.n_step, "gamma": options.gamma}
    recorder = ChunkRecorder(options.chunk, environments.shape, environments.dtype, streams=environments.count, **about)
    actor, copies = rank.actor(recorder.add, since), len(rank.roles.actors) * rank.roles.envs
    epsilon = Epsilon.read(options.epsilon)
    actor.begin()
    while not feeder.over:
        with rank.stopwatch.step("act"):
            parameters = newest(actor.steps * environments.count)
            with rank.stopwatch.fetching(), failing_alone():
                while not recorder.full:
                    actor.act(parameters, epsilon(since + actor.steps * copies) ** exponents)
            errors = td_errors(rank.network, parameters, recorder.transitions()) if priorities else None
            rank.tally.note(actor)
            feeder.send(recorder.take(errors))
    feeder.close()
