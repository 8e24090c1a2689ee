"""State of a reinforcement learning run beside the parameters: a target network, actors, and a replay memory.

    parameters, optimizer/NAME, target      vectors, as in any run
    actor/NAME                              episode counts, unfinished episodes, last returns
    replay/NAME                             with --save-replay: the whole replay memory

A run that is resumed without its replay memory fills a new one before it continues to learn.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import OptionalArray, Same, Tracked
from hpcdl.data import Batch
from hpcdl.kernels.device import Array
from hpcdl.models.model import unwrapped
from hpcdl.optim import Optimizer
from hpcdl.rl.agent import Actor
from hpcdl.rl.q_network import QBatch, QNetwork
from hpcdl.runs.ownership import Ownership, Whole

log = logging.getLogger("hpcdl")


class ReturnScored(Ownership):
    """Ownership of a Q-network, scored by the returns of episodes."""

    @property
    def network(self) -> QNetwork:
        """The Q-network."""
        network: QNetwork = unwrapped(self.model)
        return network

    def judged(self, found: dict, train_loss: float) -> float:
        """Return the loss for early stopping and best models: larger returns are better."""
        return -float(found["test_return"])

    def warm_up(self, few: Batch) -> None:
        """Run an empty batch and the values of one observation, to compile kernels."""
        shape, network = self.network.shape, self.network
        empty = np.zeros(0, network.dtype)
        batch = QBatch(np.zeros((0, *shape), np.float32), np.zeros(0, np.int64), empty, empty, 1)
        if self.parameters is not None:
            network.loss_and_gradient(self.parameters, batch, self.device.zeros(network.size, network.dtype))
            network.values(self.parameters, np.zeros((1, *shape), np.float32))


def tracked_state(prefix: str, of: Any, loaded: dict[str, np.ndarray]) -> dict[str, Tracked]:
    """Return tracked entries PREFIX/NAME for each vector of of.state(), of any shape; `loaded` gets loaded values."""
    return {
        f"{prefix}/{name}": OptionalArray(
            lambda name=name: of.state()[name],  # type: ignore[misc]
            lambda value, name=f"{prefix}/{name}": loaded.__setitem__(name, value),  # type: ignore[misc]
        )
        for name in of.state()
    }


def state_of(prefix: str, loaded: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the loaded vectors of PREFIX, by their names in `state`."""
    return {name.removeprefix(f"{prefix}/"): value for name, value in loaded.items() if name.startswith(f"{prefix}/")}


class AgentOwnership(ReturnScored, Whole):
    """Ownership on one rank that acts and learns. replay: saved if not None. told: further scores for evaluations."""

    def __init__(
        self,
        model: Any,
        parameters: Array,
        optimizer: Optimizer,
        target: Array | None,
        actor: Actor,
        replay: Any,
        told: Callable[[], dict] = dict,
    ):
        super().__init__(model, parameters, optimizer)
        self.target, self.actor, self.replay, self.told = target, actor, replay, told
        self.loaded: dict[str, np.ndarray] = {}

    def tracked(self) -> dict[str, Tracked]:
        state = super().tracked()
        if self.target is not None:
            state["target"] = Same(self.target)
        parts = {"actor": self.actor, "replay": self.replay}
        for name, owner in parts.items():
            state |= tracked_state(name, owner, self.loaded) if owner is not None else {}
        return state

    def go_on(self) -> None:
        """Restore what a checkpoint has loaded, if any; the environments begin."""
        actor, replay = state_of("actor", self.loaded), state_of("replay", self.loaded)
        self.loaded = {}
        same = not actor or self.actor.load(actor)
        if replay:
            self.replay.load(replay)
        if not same:
            log.warning("the environment does not repeat itself: new episodes begin")
            if replay:
                self.replay.cut()
        self.actor.begin()

    def scores(self, data: Any) -> dict:
        return data.scores(self.network, self.parameters) | self.actor.scores() | self.told()
