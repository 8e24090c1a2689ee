"""Asynchronous successive halving (ASHA): trials begin short, and the best 1/eta of each rung go on to the next.

                 epochs, eta = 3      9 trials
    rung 0       1                    o o o o o o o o o
    rung 1       3                    o . . o . . . o .       as soon as it is in the best third of its rung so far
    rung 2       9                    . . . o . . . . .

Algorithm 2 of Li et al., "A system for massively parallel hyperparameter tuning", MLSys 2020. A free group gets, from
the upper rungs down, an unpromoted trial among the best floor(n / eta) of the n results of its rung, else a new trial,
as in random search. No group waits for a complete rung; an early promotion may turn out wrong. Rung k trains about
trials / eta^k trials, and promoted trials continue: all rungs cost the bottom rung times the number of rungs."""

from hpcdl.search.methods.random import point
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask, Values


def amounts(least: float, most: float, eta: int) -> list[float]:
    """Return the epochs by the end of rung k: least eta^k, up to `most`; the last becomes `most`, a whole trial."""
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
        for rung in reversed(range(1, len(self.amounts))):
            if (trial := self._promotable(rung - 1)) is not None:
                return self._begin(trial, rung)
        if len(self.values) == self.trials:
            return None
        self.values.append(point(self.space, self.seed, len(self.values)))
        return self._begin(len(self.values) - 1, 0)

    def tell(self, task: SearchTask, loss: float | None) -> None:
        self.told[task.rung][task.trial] = loss

    @property
    def over(self) -> bool:
        below = range(len(self.amounts) - 1)
        return len(self.values) == self.trials and all(
            len(self.told[rung]) == len(self.begun[rung]) and self._promotable(rung) is None for rung in below
        )

    def _begin(self, trial: int, rung: int) -> SearchTask:
        self.begun[rung].add(trial)
        return SearchTask(trial, self.values[trial], rung, self.amounts[rung])

    def _promotable(self, rung: int) -> int | None:
        """Return the best unpromoted trial among a rung's best 1/eta, the first one of a tie; None if there is none."""
        ranked = sorted((loss, trial) for trial, loss in self.told[rung].items() if loss is not None)
        best = ranked[: len(self.told[rung]) // self.eta]
        return next((trial for _, trial in best if trial not in self.begun[rung + 1]), None)
