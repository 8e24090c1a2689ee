"""What a run of reinforcement learning holds, beside parameters: a target network, actors, and a replay memory.

    parameters, optimizer/NAME, target      as vectors of any run
    actor/NAME                              where the environments are, and how the last episodes ended
    replay/NAME                             with --save-replay: all that it holds

Without the replay memory a run that is gone on with fills it anew before it goes on learning.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Loose, Same, Tracked
from hpcdl.data import Batch
from hpcdl.kernels.device import Array
from hpcdl.models.model_wrapper import plain
from hpcdl.optim import Optimizer
from hpcdl.rl.agent import Actor
from hpcdl.rl.q_network import QBatch, QNetwork
from hpcdl.runs.ownership import Ownership, Whole

log = logging.getLogger("hpcdl")


class ByReturn(Ownership):
    """What is judged by the returns of episodes, and computes the values of actions."""

    @property
    def network(self) -> QNetwork:
        """What computes them."""
        network: QNetwork = plain(self.model)
        return network

    def judged(self, found: dict, train_loss: float) -> float:
        """The return is to become larger."""
        return -float(found["test_return"])

    def warm_up(self, few: Batch) -> None:
        """A batch of nothing, and the values of one observation."""
        shape, network = self.network.shape, self.network
        nothing = np.zeros(0, network.dtype)
        batch = QBatch(np.zeros((0, *shape), np.float32), np.zeros(0, np.int64), nothing, nothing, 1)
        if self.parameters is not None:
            network.loss_and_gradient(self.parameters, batch, self.device.zeros(network.size, network.dtype))
            network.values(self.parameters, np.zeros((1, *shape), np.float32))


def loose(prefix: str, of: Any, loaded: dict[str, np.ndarray]) -> dict[str, Tracked]:
    """The vectors of of.state(), of any form, as a checkpoint has them: PREFIX/NAME; `loaded` gets what it had."""
    return {
        f"{prefix}/{name}": Loose(
            lambda name=name: of.state()[name],  # type: ignore[misc]
            lambda value, name=f"{prefix}/{name}": loaded.__setitem__(name, value),  # type: ignore[misc]
        )
        for name in of.state()
    }


def part(prefix: str, loaded: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of what was loaded, what belongs to PREFIX, by the names that `state` has for it."""
    return {name.removeprefix(f"{prefix}/"): value for name, value in loaded.items() if name.startswith(f"{prefix}/")}


class Acting(ByReturn, Whole):
    """One rank that acts and learns. replay: whose state is saved, or None. told: more for an evaluation's line."""

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
        for name, of in parts.items():
            state |= loose(name, of, self.loaded) if of is not None else {}
        return state

    def go_on(self) -> None:
        """Take what a checkpoint had, where there was one; the environments begin."""
        actor, replay = part("actor", self.loaded), part("replay", self.loaded)
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
