"""Who is asked in a round, what the change of a client counts, and what the sum is divided by.

                        weighted: FedAvg                           private: DP-FedAvg (privacy.py)
asked, of K clients     max(1, C K) of those that have rows        each with probability C, by a coin of its own
a change w_k - w        as it is                                   clipped to 2-norm S
counts                  n_k times, for its n_k rows                once
the sum                 as it is                                   with normal noise of deviation z S
is divided by           the sum of the n_k that came               C K, whoever came
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.federated import privacy
from hpcdl.federated.clients import sample, toss
from hpcdl.kernels.device import device_of
from hpcdl.random import Random

ENDLESS = 1e200  # what a round spends of privacy where there is none left to speak of


class WeightedAverage:
    """The mean of the clients' changes, weighted by their rows. rows: of each client; fraction: C.

    clients: how many are asked in a round. expected: the same, or what chance makes of it in the mean.
    """

    def __init__(self, random: Random, rows: Sequence[np.ndarray], fraction: float):
        self.random, self.rows, self.fraction = random, rows, fraction
        self.having_rows = [client for client, own in enumerate(rows) if len(own)]
        self.clients = min(max(1, round(fraction * len(rows))), len(self.having_rows))
        self.expected: float = self.clients

    def tracked(self) -> dict[str, Same]:
        """What a checkpoint holds of it, by name."""
        return {}

    def ask(self, turn: int) -> list[int]:
        """The clients that work in round `turn`; none without rows."""
        return sample(self.random, turn, self.having_rows, self.clients)

    def weigh(self, client: int, change: np.ndarray) -> int:
        """How often the client's change counts; it is made, in place, what may be sent of it."""
        return len(self.rows[client])

    def finish(self, descent: np.ndarray, weight: int, turn: int) -> float:
        """What the sum, whose parts weigh so much, is divided by; 0: there is none. It may be changed in place."""
        return weight

    def report(self) -> dict:
        """Entries of the summary."""
        return {}


class Spent(Same):
    """What the rounds of a run have spent, at each of `privacy.ORDERS`; older checkpoints have the whole orders alone.

    What such a run has spent at the other orders is not known: it counts as infinite, and bounds no epsilon.
    """

    older_shapes = ((len(privacy.WHOLE),),)
    may_be_infinite = True

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        if whole is not None and whole.shape in self.older_shapes:
            spent = dict(zip(privacy.WHOLE, whole, strict=True))
            whole = np.array([spent.get(order, np.inf) for order in privacy.ORDERS])
        super().scatter(comm, whole)


class PrivateAverage(WeightedAverage):
    """A mean that tells little of any one client, of changes that are vectors like this one.

    clip, noise: S and z; the epsilon of the rounds is that at delta.
    """

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
                raise UsageError(f"--noise {noise} is too little for any epsilon; take more, or 0 for none")
        self.spent = np.zeros(len(privacy.ORDERS))

    def tracked(self) -> dict[str, Same]:
        return {"privacy_spent": Spent(self.spent)} if self.noise else {}

    def ask(self, turn: int) -> list[int]:
        tossed = toss(self.random, turn, range(len(self.rows)), self.fraction)
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
