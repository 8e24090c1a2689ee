"""Hyperband: successive halving in several brackets, from many short trials to few whole ones.

Successive halving has to choose between n trials and the length of each; Hyperband tries every choice with about the
same amount of training. With R epochs for a whole trial and s_max = floor(log_eta(R / least)), bracket s begins with

    n = ceil((s_max + 1) eta^s / (s + 1)) trials of R eta^-s epochs,      s = s_max, ..., 1, 0

and of the n_i = floor(n eta^-i) trials of rung i the best n_(i+1) go on to eta times as many epochs. R = 81, eta = 3:

    rung    s = 4       s = 3       s = 2       s = 1       s = 0         trials x epochs
    0       81 x 1      34 x 3      15 x 9      8 x 27      5 x 81
    1       27 x 3      11 x 9      5 x 27      2 x 81
    2       9 x 9       3 x 27      1 x 81
    3       3 x 27      1 x 81
    4       1 x 81

Li et al., "Hyperband: a novel bandit-based approach to hyperparameter optimization", JMLR 2018, algorithm 1. A rung is
complete before its best trials go on, as in the paper, so these counts are exact; free groups meanwhile begin the next
bracket, and wait only if there is none. The brackets repeat until there are enough trials."""

from hpcdl.search.methods.asha import amounts
from hpcdl.search.methods.random import point
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask, Values


class Bracket:
    """Successive halving of trials `first` to first + size - 1. lengths: epochs of a trial by the end of each rung."""

    def __init__(self, first: int, size: int, lengths: list[float], eta: int):
        self.size, self.lengths, self.eta = size, lengths, eta
        self.rung = 0
        self.waiting = list(range(first, first + size))  # trials of this rung that have not begun
        self.training: set[int] = set()
        self.told: dict[int, float | None] = {}

    def begin(self) -> tuple[int, int, float] | None:
        """Return the next trial, its rung and its epochs; None if there is none now."""
        if not self.waiting:
            return None
        trial = self.waiting.pop(0)
        self.training.add(trial)
        return trial, self.rung, self.lengths[self.rung]

    def tell(self, trial: int, loss: float | None) -> None:
        """Record a trial's loss (None: failed). After a rung's last loss, its best trials wait for the next rung."""
        self.training.discard(trial)
        self.told[trial] = loss
        if self.waiting or self.training or not self.following:
            return
        ranked = sorted((loss, trial) for trial, loss in self.told.items() if loss is not None)
        self.waiting = [trial for _, trial in ranked[: self.following]]
        self.rung, self.told = self.rung + 1, {}

    @property
    def following(self) -> int:
        """The number of trials that go on from this rung."""
        return self.size // self.eta ** (self.rung + 1) if self.rung + 1 < len(self.lengths) else 0

    @property
    def over(self) -> bool:
        """True if no further trial can begin."""
        return not self.waiting and not (self.training and self.following)


class Hyperband:
    """Hyperband with `trials` trials in all, the last bracket truncated; 0: each bracket once."""

    planned = False

    def __init__(self, space: Space, trials: int, seed: int, least: float, most: float, eta: int):
        self.space, self.seed, self.eta, self.most = space, seed, eta, most
        self.largest = len(amounts(least, most, eta)) - 1  # s_max
        self.trials = trials or sum(self._size(s) for s in range(self.largest + 1))
        self.begun = 0  # trials in all brackets so far
        self.brackets: list[Bracket] = []
        self.of: dict[int, Bracket] = {}
        self.values: dict[int, Values] = {}

    def ask(self) -> SearchTask | None:
        begun = next(filter(None, (bracket.begin() for bracket in self.brackets)), None)
        if begun is None and self.begun < self.trials:
            begun = self._open().begin()
        if begun is None:
            return None
        trial, rung, amount = begun
        if trial not in self.values:
            self.values[trial] = point(self.space, self.seed, trial)
        return SearchTask(trial, self.values[trial], rung, amount)

    def tell(self, task: SearchTask, loss: float | None) -> None:
        self.of[task.trial].tell(task.trial, loss)

    @property
    def over(self) -> bool:
        return self.begun == self.trials and all(bracket.over for bracket in self.brackets)

    def _size(self, s: int) -> int:
        return -(-(self.largest + 1) * self.eta**s // (s + 1))  # rounded up

    def _open(self) -> Bracket:
        s = self.largest - len(self.brackets) % (self.largest + 1)
        size = min(self._size(s), self.trials - self.begun)
        bracket = Bracket(self.begun, size, [self.most / self.eta ** (s - i) for i in range(s + 1)], self.eta)
        self.brackets.append(bracket)
        self.of |= dict.fromkeys(bracket.waiting, bracket)
        self.begun += size
        return bracket
