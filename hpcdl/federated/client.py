"""Client update: a client trains on its own rows, starting from the server's model.

    w_k <- w, with a fresh state of the optimizer
    for each of E epochs, in a new order of rows
        for each batch of B of its n_k rows, the last one smaller
            g   <- mean of grad f(w_k) + mu (w_k - w)       mu > 0: FedProx
            w_k <- w_k - lr g                               (or the rule of the optimizer)

The client sends w_k - w. The order of rows depends on seed, client, round and epoch, not on the rank."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.data import Data
from hpcdl.kernels.device import device_of
from hpcdl.kernels.reduce import add_scaled
from hpcdl.kernels.updates import proximal
from hpcdl.optim import Optimizer
from hpcdl.random import Random


class ClientUpdate:
    """The training of this rank's clients, one after the other. rows: row numbers of each client. gradient: a vector to
    work in. epochs, batch: E and B (B = 0: all of the client's rows at once). penalty: mu."""

    def __init__(
        self,
        model: Any,
        data: Data,
        rows: Sequence[np.ndarray],
        optimizer: Optimizer,
        random: Random,
        gradient: np.ndarray,
        epochs: int,
        batch: int,
        penalty: float = 0.0,
    ):
        self.model, self.data, self.rows, self.optimizer, self.random = model, data, rows, optimizer, random
        self.epochs, self.batch, self.penalty, self.gradient = epochs, batch, penalty, gradient
        device = device_of(gradient)
        self.local = device.empty(gradient.size, gradient.dtype)
        one = device.zeros(1, gradient.dtype)  # compile kernels before any clock runs
        proximal(one, one, one, 0.0)
        add_scaled(one, one, 0.0)

    @property
    def held(self) -> list[tuple[str, np.ndarray]]:
        """The vectors of a client beside the gradient, each with its kind (hpcdl/memory.py)."""
        return [("parameters", self.local), *(("optimizer", vector) for vector in self.optimizer.state.values())]

    def work(self, client: int) -> int:
        """Return the number of examples that this client computes in a round."""
        return self.epochs * len(self.rows[client])

    def __call__(self, client: int, turn: int, w: np.ndarray) -> tuple[np.ndarray, float]:
        """Return w_k - w of this client in round `turn`, and the sum of its losses; the next call reuses the array."""
        local, gradient, optimizer, rows = self.local, self.gradient, self.optimizer, self.rows[client]
        local[:] = w
        optimizer.step = 0
        optimizer.reset()
        loss, rate = 0.0, optimizer.schedule(turn)
        for epoch in range(self.epochs):
            order = rows[self.random("local order", client, turn, epoch).permutation(len(rows))]
            for batch in self.data.visit(order, self.batch or len(rows)):
                batch.epoch = turn * self.epochs + epoch  # key of dropout
                gradient[:] = 0
                loss += self.model.loss_and_gradient(local, batch, gradient)
                if self.penalty:
                    proximal(gradient, local, w, self.penalty * batch.total)
                optimizer.update(local, gradient, scale=1 / batch.total, rate=rate)
        add_scaled(local, w, -1.0)
        return local, loss
