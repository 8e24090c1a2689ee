"""What a sampler of Optuna proposes: ask-and-tell.

    study.ask()     the sampler proposes, given what was told; a parameter with a condition only where that holds
    study.tell()    what it has brought, or that it has failed

Akiba et al., "Optuna: a next-generation hyperparameter optimization framework", KDD 2019; `tpe`, the tree-structured
Parzen estimator: Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS 2011. Many trials are in
flight at once; TPE takes those for bad ones meanwhile (the constant liar), so that it proposes others.

The study is in memory and its sampler has a seed of ours, so the same asks and tells give the same proposals.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from hpcdl.errors import UsageError, blamed_on, unknown
from hpcdl.plugins import made, own
from hpcdl.random import Random
from hpcdl.search.space import Parameter, Space
from hpcdl.search.tasks import SearchTask, Values

REHEARSED = 12  # trials: more than samplers draw at random before they begin, so that what they lack is missed at once


class Optuna:
    """`trials` trials of a sampler, as in TPESampler, or with settings, as in TPESampler,multivariate=True.

    Raises UsageError where Optuna is not installed, for an unknown sampler or setting, and where the sampler cannot
    work: it needs another library, or takes no such space.
    """

    planned = False

    def __init__(self, sampler: str, space: Space, trials: int, seed: int):
        self.space, self.trials, self.told = space, trials, f"--method optuna:{sampler}"
        self.trials_of: dict[int, Any] = {}  # optuna.trial.Trial, by number
        self.exhausted = False
        seed = int(Random(seed)("optuna").integers(2**32))
        with blamed_on(f"{self.told} does not work here"):
            for number in range(REHEARSED):
                if number == 0:
                    self.study = self._made(sampler, seed)
                trial = self.study.ask()
                self._values(trial)
                self.study.tell(trial, float(number))
            self.study, self.exhausted = self._made(sampler, seed), False

    def ask(self) -> SearchTask | None:
        """What the sampler proposes."""
        if self.over:
            return None
        with blamed_on(self.told):
            trial = self.study.ask()
            values = self._values(trial)
        self.trials_of[trial.number] = trial
        return SearchTask(trial.number, values)

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """What a trial has brought; one that has failed tells the sampler nothing but that."""
        from optuna.trial import TrialState

        with blamed_on(self.told):
            if loss is None:
                self.study.tell(self.trials_of[task.trial], state=TrialState.FAIL)
            else:
                self.study.tell(self.trials_of[task.trial], loss)

    @property
    def over(self) -> bool:
        """Whether there were enough trials, or the sampler has proposed all there are."""
        return len(self.trials_of) == self.trials or self.exhausted

    def _values(self, trial: Any) -> Values:
        found: Values = {}
        for each in self.space.order:
            if self.space.active(each, found):
                found[each.name] = _suggested(trial, each)
        return self.space.in_order(found)

    def _made(self, sampler: str, seed: int) -> Any:
        """A study that keeps what it is told in memory."""
        with _quiet() as optuna:
            known = _samplers(optuna)
            name, comma, settings = sampler.partition(",")
            full = {each.lower(): each for each in [*(each.removesuffix("Sampler") for each in known), *known]}
            name = full.get(name.lower(), name)
            name = name if name in known else f"{name}Sampler"
            if name not in known:
                raise unknown("sampler of Optuna", sampler.partition(",")[0], known)
            kind, given = own(f"optuna.samplers:{name}{comma}{settings}", self.told)
            study = optuna.create_study(sampler=made(kind, given, {"seed": seed, "constant_liar": True}, self.told))
        study.stop = self._stop  # a sampler calls it that has proposed all there are
        return study

    def _stop(self) -> None:
        self.exhausted = True


def _suggested(trial: Any, each: Parameter) -> str | int | float:
    if each.kind == "choice":
        return trial.suggest_categorical(each.name, each.choices)
    if each.kind == "int":
        return int(trial.suggest_int(each.name, int(each.low), int(each.high), log=each.log))
    return float(trial.suggest_float(each.name, each.low, each.high, log=each.log))


def _samplers(optuna: Any) -> list[str]:
    """Those that need nothing but what they can be given here: a grid is ours, and what is fixed is no parameter."""
    found = inspect.getmembers(optuna.samplers, inspect.isclass)
    return [
        name
        for name, each in found
        if name.endswith("Sampler")
        and not name.startswith("Base")
        and all(
            takes.default is not takes.empty or takes.kind in (takes.VAR_POSITIONAL, takes.VAR_KEYWORD)
            for takes in inspect.signature(each).parameters.values()
        )
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Optuna, which says less than it would. Raises UsageError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UsageError('this method needs Optuna, which is not installed: pip install "hpcdl[search]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a sampler or a setting is experimental
        yield optuna
