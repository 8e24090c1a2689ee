"""Asynchronous successive halving (ASHA): trials begin short, and the best 1/eta of each rung go on to the next.

                 epochs, eta = 3      9 trials
    rung 0       1                    o o o o o o o o o
    rung 1       3                    o . . o . . . o .       as soon as it is in the best third of its rung so far
    rung 2       9                    . . . o . . . . .

Algorithm 2 of Li et al., "A system for massively parallel hyperparameter tuning", MLSys 2020. A free group gets, from
the upper rungs down, a trial among the best floor(n / eta) of the n results of its rung that has not been promoted; if
there is none, a new trial at the bottom. No group waits for a rung to be complete; an early promotion may turn out
wrong.

Cost: rung k trains about trials / eta^k trials, so all rungs together cost the bottom rung times the number of rungs
(promoted trials continue). The trials of the bottom rung are those of random search.
"""

from hpcdl.search.methods.random import point
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask, Values


def amounts(least: float, most: float, eta: int) -> list[float]:
    """Return least eta^k for k = 0, 1, ... up to `most`; the last is `most` itself, a whole trial."""
    epochs = [least]
    while epochs[-1] * eta <= most * (1 + 1e-9):
        epochs.append(epochs[-1] * eta)
    return [*epochs[:-1], most]


class Asha:
    """ASHA with `trials` trials in the bottom rung. A failed trial counts as a result and is never promoted."""

    planned = False

    def __init__(self, space: Space, trials: int, seed: int, least: float, most: float, eta: int):
        self.space, self.trials, self.seed, self.eta = space, trials, seed, eta
        self.amounts = amounts(least, most, eta)
        self.values: list[Values] = []  # of each trial
        self.told: list[dict[int, float | None]] = [{} for _ in self.amounts]  # per rung: loss by trial
        self.begun: list[set[int]] = [set() for _ in self.amounts]  # per rung: trials that train or have trained there

    def ask(self) -> SearchTask | None:
        """Return a promoted trial, else a new one."""
        for rung in reversed(range(1, len(self.amounts))):
            if (trial := self._promotable(rung - 1)) is not None:
                return self._begin(trial, rung)
        if len(self.values) == self.trials:
            return None
        self.values.append(point(self.space, self.seed, len(self.values)))
        return self._begin(len(self.values) - 1, 0)

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """Record the loss of a trial in a rung."""
        self.told[task.rung][task.trial] = loss

    @property
    def over(self) -> bool:
        """True if the bottom rung is full and no trial below the top is, or may become, promotable."""
        below = range(len(self.amounts) - 1)
        return len(self.values) == self.trials and all(
            len(self.told[rung]) == len(self.begun[rung]) and self._promotable(rung) is None for rung in below
        )

    def _begin(self, trial: int, rung: int) -> SearchTask:
        self.begun[rung].add(trial)
        return SearchTask(trial, self.values[trial], rung, self.amounts[rung])

    def _promotable(self, rung: int) -> int | None:
        """Return the best trial in the best 1/eta of a rung that was not promoted; the first one of a tie."""
        ranked = sorted((loss, trial) for trial, loss in self.told[rung].items() if loss is not None)
        best = ranked[: len(self.told[rung]) // self.eta]
        return next((trial for _, trial in best if trial not in self.begun[rung + 1]), None)
