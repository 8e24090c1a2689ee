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

from hpcdl.data import Batch
from hpcdl.kernels.device import Array
from hpcdl.optim import Optimizer
from hpcdl.rl.agent import Actor
from hpcdl.rl.q_network import QBatch, QNetwork
from hpcdl.runs.held import Whole
from hpcdl.runs.state import Loose, Same, Tracked
from hpcdl.runs.wrapped import plain

log = logging.getLogger("hpcdl")


class Acting(Whole):
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
        self.network: QNetwork = plain(model)
        self.target, self.actor, self.replay, self.told = target, actor, replay, told
        self.loaded: dict[str, np.ndarray] = {}

    def tracked(self) -> dict[str, Tracked]:
        state = super().tracked()
        if self.target is not None:
            state["target"] = Same(self.target)
        parts = {"actor": self.actor, "replay": self.replay}
        for part, of in parts.items():
            for name in of.state() if of is not None else ():
                state[f"{part}/{name}"] = Loose(
                    lambda of=of, name=name: of.state()[name],  # type: ignore[misc]
                    lambda value, name=f"{part}/{name}": self.loaded.__setitem__(name, value),  # type: ignore[misc]
                )
        return state

    def go_on(self) -> None:
        """Take what a checkpoint had, where there was one; the environments begin."""
        actor, replay = (
            {name.removeprefix(part): value for name, value in self.loaded.items() if name.startswith(part)}
            for part in ("actor/", "replay/")
        )
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

    def judged(self, found: dict, train_loss: float) -> float:
        """The return is to become larger."""
        return -float(found["test_return"])

    def warm_up(self, few: Batch) -> None:
        """A batch of nothing, and the values of one observation."""
        shape, network = self.network.shape, self.network
        nothing = np.zeros(0, network.dtype)
        batch = QBatch(np.zeros((0, *shape), np.float32), np.zeros(0, np.int64), nothing, nothing, 1)
        network.loss_and_gradient(self.parameters, batch, self.device.zeros(network.size, network.dtype))
        network.values(self.parameters, np.zeros((1, *shape), np.float32))
