"""Averaging rules: which clients work in a round, the weight of a client's change, and the divisor of the sum.

                        weighted: FedAvg                           private: DP-FedAvg (privacy.py)
sampled, of K clients   max(1, C K) of the clients with rows       each with probability C, independently
a change w_k - w        unchanged                                  clipped to 2-norm S
its weight              n_k, the number of its rows                1
the sum                 unchanged                                  with normal noise of deviation z S
the divisor             the sum of the n_k that arrived            C K, whatever arrived"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.federated import privacy
from hpcdl.federated.aggregators import RoundPart
from hpcdl.federated.clients import poisson_sample, sample
from hpcdl.kernels.device import device_of
from hpcdl.random import Random

ENDLESS = 1e200  # a divergence per round above this gives no epsilon


class WeightedAverage(RoundPart):
    """Mean of the clients' changes, weighted by their numbers of rows. rows: row numbers of each client. fraction: C.
    clients: how many a round samples. expected: the same number, or in a private average its expectation."""

    def __init__(self, random: Random, rows: Sequence[np.ndarray], fraction: float):
        self.random, self.rows, self.fraction = random, rows, fraction
        self.having_rows = [client for client, own_rows in enumerate(rows) if len(own_rows)]
        self.clients = min(max(1, round(fraction * len(rows))), len(self.having_rows))
        self.expected: float = self.clients

    def ask(self, turn: int) -> list[int]:
        """Return the clients that work in round `turn`, never a client without rows."""
        return sample(self.random, turn, self.having_rows, self.clients)

    def weigh(self, client: int, change: np.ndarray) -> int:
        """Return the weight of the client's change; turn the change, in place, into what may be sent."""
        return len(self.rows[client])

    def finish(self, descent: np.ndarray, weight: int, turn: int) -> float:
        """Return the divisor of `descent`, a sum of this total weight; 0: no client answered. May modify `descent`."""
        return weight


class PrivacySpent(Same):
    """Privacy spent by the rounds of a run, at each of `privacy.ORDERS`. Older checkpoints have integer orders only:
    what they spent at other orders counts as infinite, and bounds no epsilon."""

    older_shapes = ((len(privacy.INTEGERS),),)
    may_be_infinite = True

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None and whole.shape in self.older_shapes:
            spent = dict(zip(privacy.INTEGERS, whole, strict=True))
            whole = np.array([spent.get(order, np.inf) for order in privacy.ORDERS])
        super().scatter(comm, whole)


class PrivateAverage(WeightedAverage):
    """A differentially private mean of changes like `like`. clip, noise: S and z. delta: for the reported epsilon."""

    def __init__(
        self,
        random: Random,
        rows: Sequence[np.ndarray],
        fraction: float,
        like: np.ndarray,
        clip: float,
        noise: float = 0.0,
        delta: float = 1e-5,
    ):
        super().__init__(random, rows, fraction)
        one = device_of(like).array(np.ones(1, like.dtype))  # compile what they need, before any clock runs
        privacy.clip(one, 0.5)
        privacy.add_noise(one, 0.0, np.random.default_rng())
        self.expected = fraction * len(rows)
        self.clip, self.noise, self.delta = clip, noise, delta
        self.each_round: Any = None
        if noise:
            self.each_round = privacy.divergences(noise, fraction)
            if not self.each_round.max() < ENDLESS:
                raise UsageError(f"--noise {noise} is too small for a finite epsilon; take more, or 0 for no noise")
        self.spent = np.zeros(len(privacy.ORDERS))

    def tracked(self) -> dict[str, Same]:
        return {"privacy_spent": PrivacySpent(self.spent)} if self.noise else {}

    def ask(self, turn: int) -> list[int]:
        tossed = poisson_sample(self.random, turn, range(len(self.rows)), self.fraction)
        return [client for client in tossed if len(self.rows[client])]

    def weigh(self, client: int, change: np.ndarray) -> int:
        privacy.clip(change, self.clip)
        return 1

    def finish(self, descent: np.ndarray, weight: int, turn: int) -> float:
        if self.noise:
            privacy.add_noise(descent, self.noise * self.clip, self.random("noise", turn))
            self.spent += self.each_round
        return self.expected

    def report(self) -> dict:
        epsilon = privacy.epsilon(self.spent, self.delta) if self.noise else None
        return {"clip": self.clip, "noise": self.noise, "epsilon": epsilon, "delta": self.delta}
