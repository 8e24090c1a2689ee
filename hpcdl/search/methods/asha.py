"""Asynchronous successive halving: trials begin short, and the best 1/eta of each rung go on to the next.

                 epochs, eta = 3      9 trials
    rung 0       1                    o o o o o o o o o
    rung 1       3                    o . . o . . . o .       as soon as it is among the best third of its rung so far
    rung 2       9                    . . . o . . . . .

Algorithm 2 of Li et al., "A system for massively parallel hyperparameter tuning", MLSys 2020. Whoever is free gets,
from the upper rungs down, a trial that is among the best floor(n / eta) of the n that have told there and has not gone
on yet; if there is none, a new trial at the bottom. So nobody waits for a rung to be whole; a trial that goes on early
may turn out to be none of the best.

Cost: rung k trains about trials / eta^k trials, so all rungs cost together what the bottom rung costs, times their
number (trials go on from where they were). The bottom's trials are those of random search.
"""

from hpcdl.search.methods.random import point
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask, Values


def amounts(least: float, most: float, eta: int) -> list[float]:
    """least eta^k for k = 0, 1, ..., as many as are within `most`; the last is `most` itself, a whole trial."""
    found = [least]
    while found[-1] * eta <= most * (1 + 1e-9):
        found.append(found[-1] * eta)
    return [*found[:-1], most]


class Asha:
    """So many `trials` at the bottom. A trial that fails counts among those that have told, and never goes on."""

    planned = False

    def __init__(self, space: Space, trials: int, seed: int, least: float, most: float, eta: int):
        self.space, self.trials, self.seed, self.eta = space, trials, seed, eta
        self.amounts = amounts(least, most, eta)
        self.values: list[Values] = []  # of each trial
        self.told: list[dict[int, float | None]] = [{} for _ in self.amounts]  # of each rung: loss by trial
        self.begun: list[set[int]] = [set() for _ in self.amounts]  # of each rung: who trains there, or has

    def ask(self) -> SearchTask | None:
        """A trial that goes on, else a new one."""
        for rung in reversed(range(1, len(self.amounts))):
            if (trial := self._promotable(rung - 1)) is not None:
                return self._begin(trial, rung)
        if len(self.values) == self.trials:
            return None
        self.values.append(point(self.space, self.seed, len(self.values)))
        return self._begin(len(self.values) - 1, 0)

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """What a trial has brought in a rung."""
        self.told[task.rung][task.trial] = loss

    @property
    def over(self) -> bool:
        """Whether the bottom is full, nobody may go on, and nobody trains below the top who still might."""
        below = range(len(self.amounts) - 1)
        return len(self.values) == self.trials and all(
            len(self.told[rung]) == len(self.begun[rung]) and self._promotable(rung) is None for rung in below
        )

    def _begin(self, trial: int, rung: int) -> SearchTask:
        self.begun[rung].add(trial)
        return SearchTask(trial, self.values[trial], rung, self.amounts[rung])

    def _promotable(self, rung: int) -> int | None:
        """The best of a rung's best 1/eta that has not gone on; of equals the one that began first."""
        ranked = sorted((loss, trial) for trial, loss in self.told[rung].items() if loss is not None)
        best = ranked[: len(self.told[rung]) // self.eta]
        return next((trial for _, trial in best if trial not in self.begun[rung + 1]), None)
