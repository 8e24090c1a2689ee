"""State of a reinforcement learning run beside the parameters: a target network, actors, and a replay memory.

    parameters, optimizer/NAME, target      vectors, as in any run
    actor/NAME                              episode counts, unfinished episodes, last returns
    replay/NAME                             with --save-replay: the whole replay memory

A run that is resumed without its replay memory fills a new one before it continues to learn."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import OptionalArray
from hpcdl.data import Batch
from hpcdl.models.model import unwrapped
from hpcdl.rl.agent import Actor
from hpcdl.rl.q_network import QBatch, QNetwork
from hpcdl.rl.replay import Replay
from hpcdl.runs.ownership import Ownership, Scored
from hpcdl.runs.run import Run

log = logging.getLogger("hpcdl")


class ReturnScored(Scored):
    """Scores of a Q-network: the returns of episodes, and the scores that `more` returns."""

    def __init__(self, held: Ownership, more: Callable[[], dict]):
        self.held, self.more = held, more
        self.network: QNetwork = unwrapped(held.model)

    def scores(self, data: Any) -> dict:
        scores: dict = data.scores(self.network, self.held.parameters)
        return scores | self.more()

    def last_scores(self, data: Any) -> dict:
        return {}

    def judged(self, found: dict, train_loss: float) -> float:
        """Return the negative mean return: larger returns are better."""
        return -float(found["test_return"])

    def warm_up(self, few: Batch) -> None:
        shape, network, parameters = self.network.shape, self.network, self.held.parameters
        empty = np.zeros(0, network.dtype)
        batch = QBatch(np.zeros((0, *shape), np.float32), np.zeros(0, np.int64), empty, empty, 1)
        if parameters is not None:
            network.loss_and_gradient(parameters, batch, self.held.device.zeros(network.size, network.dtype))
            network.values(parameters, np.zeros((1, *shape), np.float32))


def track_state(run: Run, prefix: str, of: Any) -> dict[str, np.ndarray]:
    """Have each checkpoint save the arrays of of.state(), of any shape, as PREFIX/NAME.
    Return a dictionary by NAME, into which `run.begin` puts the arrays of the checkpoint that it resumes."""
    loaded: dict[str, np.ndarray] = {}
    for name in of.state():
        read = partial(lambda name: of.state()[name], name)
        run.track(f"{prefix}/{name}", OptionalArray(read, partial(loaded.__setitem__, name)))
    return loaded


def begin_acting(actor: Actor, replay: Replay, actor_state: dict, replay_state: dict) -> None:
    """Restore the states loaded from a checkpoint, if any, and begin to act."""
    same = not actor_state or actor.load(actor_state)
    if replay_state:
        replay.load(replay_state)
    if not same:
        log.warning("the environment did not repeat its unfinished episodes as before: new episodes begin")
        if replay_state:
            replay.cut()
    actor.begin()
    actor_state.clear()
    replay_state.clear()
